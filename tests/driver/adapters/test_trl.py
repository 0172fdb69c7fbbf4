"""TRL's GRPO trainer with rollouts of the engine."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from driver.common.errors import UserError
from driver.config.sections import ModelConfig
from driver.model import tiny

pytest.importorskip("trl", reason="needs the extra `trl`")
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from driver.adapters.trl import TltRollout  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
SHAPE = ModelConfig(num_layers=2, hidden_size=32)
PROMPTS = [f"{a}+{b}=" for a in range(2, 8) for b in (3, 14)]
MESSAGES = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


def share_of_digits(completions, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in texts]


class Recorder(TltRollout):
    """Keeps each call: phase, step, updates so far, output, and the policy's own log-probs."""

    def __call__(self, prompts, trainer):
        out = super().__call__(prompts, trainer)
        phase = "train" if trainer.model.training else "eval"
        own = [
            logprobs(trainer, prompt, completion)
            for prompt, completion in zip(out["prompt_ids"], out["completion_ids"], strict=True)
        ]
        call = phase, trainer.state.global_step, self.updates, copy.deepcopy(out), own
        self.calls = [*getattr(self, "calls", []), call]
        return out


def logprobs(trainer, prompt, completion):
    """Log-probs of a completion under the trainer's present weights."""
    model, ids = (
        trainer.accelerator.unwrap_model(trainer.model),
        torch.tensor([prompt + completion]),
    )
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / trainer.temperature
    picked = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])
    return picked[:, 0].tolist()


class Trainer(GRPOTrainer):
    """Keeps the phase, the step and the batch of each rollout."""

    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        phase = "train" if self.model.training else "eval"
        self.batches = [*getattr(self, "batches", []), (phase, self.state.global_step, dict(out))]
        return out


class Noise(TrainerCallback):
    """Changes the weights after each step, by the step alone."""

    def on_step_end(self, args, state, control, model=None, **_):
        draw = torch.Generator().manual_seed(state.global_step)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=draw))


def make_trainer(
    folder,
    rollout,
    conversations=False,
    rows=None,
    policy=None,
    policy_seed=1,
    shape=SHAPE,
    **changes,
):
    tokenizer = tiny.build_tokenizer()
    prompts = PROMPTS
    if conversations:
        tokenizer.chat_template = MESSAGES
        prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-2,
        "max_steps": 3,
        "temperature": 0.9,
        "seed": 5,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "output_dir": str(folder),
        **changes,
    }
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts[:rows]])
    return Trainer(
        policy or tiny.build_policy(shape, seed=policy_seed),
        share_of_digits,
        args=GRPOConfig(**settings),
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        processing_class=tokenizer,
        rollout_func=rollout,
    )


@pytest.fixture
def rollout():
    made = Recorder(settings=["engine.strategies=[off,ngram:3,1,4]"])
    yield made
    made.close()


def train(folder, rollout, **changes):
    trainer = make_trainer(folder, rollout, **changes)
    trainer.train()
    return trainer


def tokens(rollout):
    return [call[3]["completion_ids"] for call in rollout.calls]


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
        {"conversations": True, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 5},
        {"pad_to_multiple_of": 8, "mask_truncated_completions": True, "loss_type": "dr_grpo"},
    ],
)
def test_batches_are_those_of_trls_own_generation(tmp_path, rollout, changes):
    pair = []
    for generator in (rollout, None):
        # Of one candidate the draw is the same whatever the noise.
        trainer = make_trainer(tmp_path, generator, top_k=1, max_completion_length=24, **changes)
        trainer.add_callback(Noise())
        trainer.train()
        pair.append(trainer.batches)
    ended = 0
    for (*when, batch), (*expected_when, expected) in zip(*pair, strict=True):
        assert batch.pop("sampling_per_token_logps").shape == batch["completion_ids"].shape
        assert when == expected_when and batch.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(batch[name], value, rtol=1e-4, atol=1e-3)
        ended += (expected["completion_mask"].sum(1) < 24).sum()
    assert len(pair[0]) > 1 and ended > 0
    ids = [batch["completion_ids"].tolist() for *_, batch in pair[0]]
    assert ids[0] != ids[-1]


def test_tokens_are_drawn_from_the_present_weights(tmp_path, rollout):
    before = tiny.build_policy(SHAPE, seed=1).state_dict()
    trainer = train(tmp_path, rollout)
    after = trainer.model.state_dict()
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3
    assert len(rollout.calls) == 3
    for *_, out, own in rollout.calls:
        for given, expected in zip(out["logprobs"], own, strict=True):
            assert given == pytest.approx(expected, abs=1e-4)


def test_a_completion_ends_with_the_end_token_or_at_the_limit(tmp_path, rollout):
    trainer = train(tmp_path, rollout)
    end, pad, cut = trainer.processing_class.eos_token_id, trainer.processing_class.pad_token_id, []
    for completions in tokens(rollout):
        for ids in completions:
            assert 1 <= len(ids) <= 12 and end not in ids[:-1]
            assert ids[-1] == end or len(ids) == 12
        # TRL takes one that ends with the padding token, which may be drawn, as ended.
        cut.append(sum(ids[-1] not in (end, pad) for ids in completions) / len(completions))
    logged = [line["completions/clipped_ratio"] for line in trainer.state.log_history[:3]]
    assert cut == pytest.approx(logged) and 0 < sum(cut) < 3
    assert any(line.get("tlt/accept_length", 0) > 1 for line in trainer.state.log_history[:3])


def test_siblings_of_a_prompt_and_later_steps_have_noise_of_their_own(tmp_path, rollout):
    train(tmp_path, rollout, rows=2, learning_rate=0.0)  # the same two prompts, the same policy
    drawn = [tuple(ids) for completions in tokens(rollout) for ids in completions]
    assert len(drawn) == 24 and len(set(drawn)) > 20


def test_a_seed_gives_the_same_tokens_again(tmp_path, rollout):
    train(tmp_path, rollout)
    first = tokens(rollout)
    for seed, same in ((5, True), (6, False)):
        again = Recorder()
        train(tmp_path, again, seed=seed)
        again.close()
        assert (tokens(again) == first) == same


def test_a_drafter_that_is_trained_saved_and_trained_again_changes_no_token(tmp_path, rollout):
    shape = ModelConfig(num_layers=3, hidden_size=32)  # the fewest layers of a saved drafter
    train(tmp_path, rollout, shape=shape)
    spot = ["spot.tail_batch=8", "spot.every=1", "drafter.draft_vocab=32"]
    drafting = Recorder(
        train_drafter=True, settings=["engine.strategies=[off,learned:2,1,3]", *spot]
    )
    train(tmp_path, drafting, shape=shape)
    steps = drafting.session.spot.steps
    drafting.session.save_drafter(tmp_path / "drafter")
    drafting.close()
    assert steps > 0 and tokens(drafting) == tokens(rollout)
    drafting.drafter = str(tmp_path / "drafter")
    train(tmp_path, drafting, shape=shape)
    assert drafting.session.spot.steps > steps and tokens(drafting) == 2 * tokens(rollout)
    drafting.close()


def test_tokens_of_a_tool_are_left_out_of_the_loss(tmp_path, rollout):
    plus, end = tiny.build_tokenizer().encode("+++")[:3], tiny.build_tokenizer().eos_token_id
    rollout.on_end = lambda state: None if state.tools else plus
    trainer = train(tmp_path, rollout, max_steps=1, max_completion_length=24)
    out, own = rollout.calls[0][3:]
    generated = 0
    for ids, mask, given, expected in zip(
        out["completion_ids"], out["env_mask"], out["logprobs"], own, strict=True
    ):
        generated += sum(mask)
        if end in ids[:-1]:  # the turn that the tool answered
            at = ids.index(end) + 1
            answer = range(at, min(at + 3, len(ids)))  # the limit may cut it
            assert [ids[i] for i in answer] == plus[: len(answer)]
            assert mask == [i not in answer for i in range(len(ids))]
        else:
            assert all(mask)
        pairs = zip(mask, given, expected, strict=True)
        assert all(abs(a - b) < 1e-4 for made, a, b in pairs if made)
    assert generated < sum(map(len, out["completion_ids"]))
    mean = trainer.state.log_history[0]["completions/mean_length"]
    assert mean == pytest.approx(generated / len(out["completion_ids"]))


@pytest.mark.parametrize(
    "changes, steps, updates",
    [
        ({}, [0, 1, 2], [0, 1, 2]),
        ({"num_iterations": 2, "max_steps": 4}, [0, 2], [0, 1]),
        ({"steps_per_generation": 1}, [0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2]),
        ({"steps_per_generation": 4}, [0, 2], [0, 1]),
    ],
)
def test_weights_are_copied_once_for_each_change(tmp_path, rollout, changes, steps, updates):
    train(tmp_path, rollout, **changes)
    assert [call[1] for call in rollout.calls] == steps
    assert [call[2] for call in rollout.calls] == updates
    drawn = [tuple(ids) for completions in tokens(rollout) for ids in completions]
    assert len(set(drawn)) > 0.8 * len(drawn)
    for *_, out, own in rollout.calls:
        assert sum(out["logprobs"], []) == pytest.approx(sum(own, []), abs=1e-4)


def test_weights_loaded_without_a_step_are_copied_too(tmp_path, rollout):
    trainer = make_trainer(tmp_path, rollout)
    trainer.evaluate()
    trainer.evaluate()
    assert rollout.updates == 0
    trainer.model.load_state_dict(tiny.build_policy(SHAPE, seed=2).state_dict())
    trainer.evaluate()
    assert rollout.updates == 1
    *_, out, own = rollout.calls[-1]
    assert sum(out["logprobs"], []) == pytest.approx(sum(own, []), abs=1e-4)


def test_weights_put_in_for_an_evaluation_are_taken_and_given_back(tmp_path, rollout):
    trainer = make_trainer(tmp_path, rollout, eval_strategy="steps", eval_steps=1)
    other, evaluate = tiny.build_policy(SHAPE, seed=2), trainer.evaluate

    def exchange():
        for weight, own in zip(trainer.model.parameters(), other.parameters(), strict=True):
            weight.data, own.data = own.data.clone(), weight.data.clone()

    def evaluate_other(*arguments, **named):
        exchange()
        metrics = evaluate(*arguments, **named)
        exchange()
        return metrics

    trainer.evaluate = evaluate_other
    trainer.train()
    assert {call[0] for call in rollout.calls} == {"train", "eval"}
    for *_, out, own in rollout.calls:
        assert sum(out["logprobs"], []) == pytest.approx(sum(own, []), abs=1e-4)


def test_another_trainer_of_the_same_policy_gets_its_own_seed(tmp_path, rollout):
    policy = tiny.build_policy(SHAPE, seed=1)
    for seed in (5, 6, 5):
        make_trainer(tmp_path, rollout, policy=policy, seed=seed, top_k=None).evaluate()
    first, other, again = tokens(rollout)
    assert first == again != other


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_mixed_precision_is_that_of_the_engine(tmp_path, rollout, name):
    make_trainer(tmp_path, rollout, **{"bf16": False, name: True}).evaluate()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    assert rollout.session.rollout.target.dtype == dtype


def test_another_trainer_gets_an_engine_with_its_own_policy_and_seed(tmp_path, rollout):
    for changes in ({}, {"policy_seed": 2}, {"seed": 6}):
        make_trainer(tmp_path, rollout, **changes).evaluate()
        *_, out, own = rollout.calls[-1]
        assert sum(out["logprobs"], []) == pytest.approx(sum(own, []), abs=1e-4)
    make_trainer(tmp_path, rollout, top_k=None).evaluate()
    first, _, other_seed, again = tokens(rollout)
    assert first == again != other_seed


def test_evaluations_have_the_same_noise_at_every_step(tmp_path, rollout):
    changes = {"learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 1}
    train(tmp_path, rollout, per_device_eval_batch_size=4, **changes)
    evals = [call for call in rollout.calls if call[0] == "eval"]
    drawn = [call[3]["completion_ids"] for call in evals]
    assert [call[1] for call in evals] == [1, 1, 2, 2, 3, 3]
    assert drawn[:2] == drawn[2:4] == drawn[4:] and drawn[0] != drawn[1]


def test_conversations_get_the_chat_template(tmp_path, rollout):
    trainer = train(tmp_path, rollout, conversations=True, max_steps=1)
    prompts = {tuple(ids) for ids in rollout.calls[0][3]["prompt_ids"]}
    texts = {trainer.processing_class.decode(ids) for ids in prompts}
    assert len(texts) == 2 and texts <= {f"<{text}>" for text in PROMPTS}


@pytest.mark.parametrize(
    "changes",
    [
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"generation_kwargs": {"num_beams": 2}},
        {"max_completion_length": None},
        {"cache_implementation": "static"},
        {"use_transformers_continuous_batching": True},
        {"cast_lm_head_to_fp32": True},
    ],
)
def test_settings_that_the_engine_lacks_are_refused(tmp_path, rollout, changes):
    with pytest.raises(UserError, match=f"uses {next(iter(changes))}.*leave it out"):
        train(tmp_path, rollout, **changes)
    with pytest.raises(UserError, match="settings: must be a list of key=value words, got 'run.s"):
        TltRollout(settings="run.seed=1")


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path, rollout, monkeypatch):
    tokenizer = tiny.build_tokenizer()
    tokenizer.eos_token = None
    monkeypatch.setattr(tiny, "build_tokenizer", lambda: tokenizer)
    with pytest.raises(UserError, match="the tokenizer has no end token; set its eos_token"):
        train(tmp_path, rollout)


def test_a_completion_without_room_is_refused(tmp_path, rollout):
    rollout.max_len = 16
    train(tmp_path, rollout, max_steps=1, max_completion_length=11)
    rollout.close()
    with pytest.raises(UserError, match="max_completion_length=12 has 17 tokens, at most 16 fit"):
        train(tmp_path, rollout, max_steps=1)


@pytest.mark.parametrize("name, value", [("suppress_tokens", [5]), ("no_repeat_ngram_size", 2)])
def test_settings_of_the_models_generation_that_the_engine_lacks_are_refused(
    tmp_path, rollout, name, value
):
    policy = tiny.build_policy(SHAPE, seed=1)
    policy.generation_config.update(num_beams=1, typical_p=1.0, min_length=0, temperature=0.1)
    make_trainer(tmp_path, rollout, policy=policy).evaluate()
    setattr(policy.generation_config, name, value)
    with pytest.raises(UserError, match=f"{name}=.* of the model's generation_config"):
        make_trainer(tmp_path, rollout, policy=policy).evaluate()


WORKER = """
import json
import sys

from tests.driver.adapters.test_trl import Recorder, train
rollout = Recorder()
trainer = train(sys.argv[1], rollout, per_device_train_batch_size=int(sys.argv[2]))
out = [call[3] for call in rollout.calls], rollout.updates
rank = trainer.accelerator.process_index
rollout.close()
open(f"{sys.argv[1]}/{rank}.json", "w").write(json.dumps(out))
"""


def in_processes(folder, count):
    """Prompts and completions of each step in the order of all processes, and their updates."""
    folder.mkdir()
    script = folder / "worker.py"
    script.write_text(WORKER)
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command = [sys.executable, *words, str(script), str(folder), str(8 // count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, check=True, env=environment)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    steps = zip(*(rank[0] for rank in ranks), strict=True)
    rows = [
        [
            (prompt, ids)
            for out in step
            for prompt, ids in zip(out["prompt_ids"], out["completion_ids"], strict=True)
        ]
        for step in steps
    ]
    return rows, [rank[1] for rank in ranks]


@pytest.mark.slow
def test_two_processes_draw_the_tokens_of_one(tmp_path):
    one, _ = in_processes(tmp_path / "one", 1)
    two, updates = in_processes(tmp_path / "two", 2)
    assert two[0] == one[0]  # later steps differ by the rounding of the update
    assert len(two) == len(one) == 3 and updates == [2, 2]
    assert len({tuple(ids) for _, ids in two[0]}) > 6
