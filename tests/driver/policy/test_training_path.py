"""Whole training steps: known faults of other trainers, tested on the path of a run.

Rollouts, the update and the new weights in the engine are real. Rewards are replaced, because a
random model would earn none.
"""

from dataclasses import replace

import pytest
import torch

from driver.common.errors import UserError
from driver.config.load import load_config
from driver.model import tiny
from driver.policy import grpo
from driver.records.folder import read_jsonl
from driver.records.progress import Progress
from driver.rollout.request import Request, SamplingParams
from driver.run.collector import Collector
from driver.run.start import start_run
from driver.train import run_steps
from tests.driver.hugging_face import VARIANTS, save_model
from tests.driver.model.test_prompts import BEGIN, save_model_with_begin_token
from tests.driver.run.test_run import WORDS, share_of_ones

END = [1, 5]  # ids that end a response: the tokenizer's own and a digit


@pytest.fixture(autouse=True)
def mixed_rewards(monkeypatch):
    monkeypatch.setattr(Collector, "rewards", share_of_ones)


@pytest.fixture
def start(tmp_path):
    """Starts runs of the tiny model, changed by the words."""
    runs = []

    def make(*words):
        root = [f"run.root={tmp_path}", f"run.name=run-{len(runs)}"]
        config = load_config([*WORDS, "warmup.steps=0", *root, *words])
        runs.append(start_run(config, lambda line: None))
        return runs[-1]

    yield make
    for run in runs:
        run.close(whole=True)


def one_step(run):
    """One step as in `run_steps`: its experience and its metrics."""
    step = run.gather()
    run.finish_bubble()
    metrics = run.update_policy(step)
    run.sync_weights()
    run.log(metrics, step)
    return step, metrics


def greedy(run, prompt, count):
    """Greedy tokens of the engine, and of the trainer's model."""
    params = SamplingParams(temperature=0.0, max_new_tokens=count, stop_ids=())
    engine = run.rollout.engine
    (ours,) = engine.generate([Request(1, 0, prompt, params)], record=False)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(run.policy(torch.tensor([ids])).logits[0, -1].argmax()))
    return ours.token_ids, ids[len(prompt) :]


def recomputed(run, response):
    """Log-probs by an ordinary forward pass of the trainer's model over one response."""
    prompt = response.request.prompt_ids
    ids = torch.tensor([[*prompt, *response.token_ids]])
    with torch.no_grad():
        logits = run.policy(ids).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / response.request.params.temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]


def caught_gradients(trainer):
    """The gradient of each later update; none of them changes the policy."""
    gradients = []
    trainer._optimizer_step = lambda lr: (
        gradients.append([m.grad.clone() for m in trainer.params])
        or trainer.optimizer.zero_grad()
        or torch.zeros(())
    )
    return gradients


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_checkpoint_trains(variant, tmp_path, start):
    """Two steps of a random checkpoint: the log-probs of its speculative rollouts are those of the
    model, and after every sync the engine's greedy text is that of the trainer."""
    folder = tmp_path / "model"
    vocabulary = len(tiny.VOCABULARY)
    save_model(folder, variant, vocab_size=vocabulary, eos_token_id=END, pad_token_id=0)
    tiny.build_tokenizer().save_pretrained(folder)
    run = start(f"model.path={folder}", "run.steps=2", "grpo.lr=1e-2", "run.eval_prompts=0")
    prompt = run.collector.encode(run.task.prompt("eval", 0))
    before = greedy(run, prompt, 16)
    assert before[0] == before[1]
    finishes = set()
    for _ in range(2):
        step = run.gather()
        assert run.collector.stats.spec_passes > 0
        for response in step.responses:
            wanted = recomputed(run, response)
            torch.testing.assert_close(torch.tensor(response.logprobs), wanted, rtol=0, atol=1e-4)
            # Fault 40: any of several ids ends a response, and none occurs before its end.
            finishes.add(response.token_ids[-1] if response.finish == "stop" else None)
            assert not set(response.token_ids[:-1]) & set(END)
        run.finish_bubble()
        metrics = run.update_policy(step)
        assert metrics["actor/grad_norm"] > 0
        run.sync_weights()
        ours, theirs = greedy(run, prompt, 16)
        assert ours == theirs
    assert ours != before[0]  # the updates were large enough to change the text
    assert finishes >= set(END)


def test_prompts_of_training_and_evaluation_begin_with_the_tokenizer_s_begin_token(tmp_path, start):
    folder = tmp_path / "model"
    save_model_with_begin_token(folder)
    run = start(f"model.path={folder}", "run.eval_prompts=0", "warmup.steps=1", "warmup.batch=2")
    step = run.gather()
    assert {r.request.prompt_ids[0] for r in step.responses} == {BEGIN}
    seen, generate = [], run.rollout.engine.generate
    run.rollout.engine.generate = lambda requests, **kw: (
        seen.extend(requests) or generate(requests, **kw)
    )
    run.collector.evaluate(3)
    assert len(seen) == 3 and {request.prompt_ids[0] for request in seen} == {BEGIN}


@pytest.mark.parametrize(("dtype", "difference"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_first_ratio_is_one_at_any_temperature_faults_43_and_44(
    start, temperature, dtype, difference
):
    words = [f"sampling.temperature={temperature}", f"model.dtype={dtype}"]
    run = start(*words, "grpo.micro_batch_tokens=64")
    _, metrics = one_step(run)
    assert abs(metrics["actor/ppo_kl"]) < (1e-3 if dtype == "bfloat16" else 1e-12)
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["sampling/sampling_logp_difference/max"] < difference


@pytest.mark.parametrize(("dtype", "off"), [("float32", 0.0), ("bfloat16", 1e-3)])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_first_minibatch_starts_from_the_policy_that_sampled_fault_43(
    start, monkeypatch, temperature, dtype, off
):
    """A separate forward pass computes its old log-probs, so the ratio could differ from 1."""
    words = [f"sampling.temperature={temperature}", f"model.dtype={dtype}"]
    run = start(*words, "grpo.minibatches=2", "grpo.micro_batch_tokens=64", "grpo.lr=1e-2")
    farthest, loss = [], grpo.policy_loss
    monkeypatch.setattr(
        grpo,
        "policy_loss",
        lambda new, old, *args, **settings: (
            farthest.append((new - old).detach().exp().sub(1).abs().max().item())
            or loss(new, old, *args, **settings)
        ),
    )
    step = run.gather()
    order = sorted(range(12), key=lambda i: step.responses[i].request.id)
    first, second = (
        len(list(run.trainer._micro_batches(step.responses, part)))
        for part in (order[:6], order[6:])
    )
    run.update_policy(step)
    assert len(farthest) == first + second and first > 1
    assert max(farthest[:first]) <= off
    assert min(farthest[first:]) > off  # that policy has moved


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_rollouts_give_one_gradient_however_they_are_packed_faults_39_41_47(start, advantage):
    run = start(f"grpo.advantage={advantage}", "sampling.max_new_tokens=12")
    step = run.gather()
    assert {r.finish for r in step.responses} == {"stop", "length"}
    trainer = run.trainer
    gradients = caught_gradients(trainer)
    for budget in (1, 40, 80, 1024):
        trainer.cfg = replace(trainer.cfg, micro_batch_tokens=budget)
        run.update_policy(step)
    assert all(g.abs().sum() > 0 for g in gradients[0] if g.dim() > 1)
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)


def test_cut_responses_stay_out_of_the_loss_fault_42(start):
    run = start("grpo.truncated=mask", "sampling.max_new_tokens=12")
    step = run.gather()
    cut = [r.finish == "length" for r in step.responses]
    assert 0 < sum(cut) < len(cut)
    assert step.keep == [not c for c in cut]
    seen, build = [], run.trainer._micro_batches

    def noted(responses, part, done):
        seen.extend(part)
        return build(responses, part, done)

    run.trainer._micro_batches = noted
    run.update_policy(step)
    assert sorted(seen) == [i for i, c in enumerate(cut) if not c]


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_the_gradient_is_that_of_a_batch_without_cut_responses_fault_42(start, advantage):
    run = start("grpo.truncated=mask", f"grpo.advantage={advantage}", "run.seed=1")
    step = replace(run.gather(), rewards=[float(i) for i in range(12)])
    assert any(1 < sum(step.keep[i : i + 4]) < 4 for i in range(0, 12, 4))
    left = [i for i, kept in enumerate(step.keep) if kept]
    without = replace(
        step,
        responses=[step.responses[i] for i in left],
        rewards=[step.rewards[i] for i in left],
        keep=[True] * len(left),
    )
    gradients = caught_gradients(run.trainer)
    for one in (step, without):
        run.update_policy(one)
    assert all(g.abs().sum() > 0 for g in gradients[0] if g.dim() > 1)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:dynamic sampling")
def test_cut_responses_do_not_make_a_group_mixed_fault_42(start, monkeypatch):
    """Without cut responses the rewards of a group may be equal; then the group is not kept."""
    monkeypatch.setattr(
        Collector,
        "rewards",
        lambda self, p, responses: [float(r.finish == "stop") for r in responses],
    )
    for truncated, learned in (("train", True), ("mask", False)):
        run = start(
            f"grpo.truncated={truncated}", "grpo.max_refills=1", "sampling.max_new_tokens=12"
        )
        assert any(run.gather().keep) == learned


def test_equal_prompts_of_a_step_are_groups_of_their_own_fault_45(start, monkeypatch):
    run = start()
    prompt = run.task.prompt
    monkeypatch.setattr(run.task, "prompt", lambda split, i: replace(prompt(split, i), text="1+1="))
    step = run.gather()
    groups = [r.request.group for r in step.responses]
    assert len({r.request.prompt_ids for r in step.responses}) == 1
    assert groups == [g for g in sorted(set(groups)) for _ in range(4)] and len(set(groups)) == 3
    assert len({tuple(r.token_ids) for r in step.responses}) > 6  # noise of their own too


@pytest.mark.filterwarnings("ignore:.*equal rewards", "ignore:sampling_logp_difference")
def test_single_outliers_and_equal_groups_are_finite_faults_46_and_48(start):
    run = start("grpo.advantage=rloo")
    step = run.gather()
    step = replace(step, rewards=[0.0, 1.0, 1.0, 1.0, *[0.1] * 4, *[0.7] * 4])
    metrics = run.update_policy(step)
    assert 0 < metrics["actor/grad_norm"] < 100
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    equal = run.update_policy(replace(step, rewards=[0.3] * 12))
    assert equal["actor/grad_norm"] == 0.0 and equal["frac_reward_zero_std"] == 1.0


def test_where_no_group_qualifies_a_step_ends_without_an_update_fault_49(start, monkeypatch):
    monkeypatch.setattr(Collector, "rewards", lambda self, p, responses: [1.0] * len(responses))
    run = start("grpo.max_refills=2")
    before = [p.detach().clone() for p in run.policy.parameters()]
    with pytest.warns(UserWarning) as caught:
        step, metrics = one_step(run)
    text = " ".join(str(w.message) for w in caught)
    assert "only 0 of 3 groups have mixed rewards after 2 refills" in text
    assert len(step.responses) == 3 * 12 and not any(step.keep)
    assert metrics["actor/grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, run.policy.parameters(), strict=True))


def test_nan_of_a_response_that_is_left_out_is_not_read_fault_50(start):
    run = start()
    step = run.gather()
    bad = replace(step.responses[0], logprobs=[float("nan")] * len(step.responses[0].logprobs))
    responses = [bad, *step.responses[1:]]
    metrics = run.update_policy(replace(step, responses=responses, keep=[False] + [True] * 11))
    assert 0 < metrics["actor/grad_norm"] < 100
    assert all(torch.isfinite(p).all() for p in run.policy.parameters())


@pytest.mark.parametrize(("value", "message"), [(None, "got None"), (float("nan"), "got nan")])
def test_rewards_that_are_not_numbers_stop_the_step_fault_51(start, monkeypatch, value, message):
    run = start()
    monkeypatch.undo()  # the real rewards
    monkeypatch.setattr(run.task, "reward", lambda *of: value)
    reason = f"expected a number from -1e30 to 1e30, {message}"
    wanted = f"response [0-3] to prompt sums/train/0: {reason}"
    with pytest.raises(UserError, match=wanted):
        run.gather()


@pytest.mark.parametrize("value", [None, float("nan"), [1.0]])
def test_rewards_that_are_not_numbers_count_as_configured_fault_51(start, monkeypatch, value):
    run = start("reward.on_error=zero")
    monkeypatch.undo()
    bad = run.task.prompt("train", 1)
    monkeypatch.setattr(run.task, "reward", lambda p, *of: value if p == bad else 0.5)
    with pytest.warns(
        UserWarning, match=f"prompt {bad.id}: expected a number from -1e30 to.*counted as 0"
    ):
        step = run.gather()
    assert step.rewards == [0.5] * 4 + [0.0] * 4 + [0.5] * 4


def test_a_limit_shorter_than_any_answer_warns_fault_52(start):
    run = start("sampling.max_new_tokens=1")
    with pytest.warns(UserWarning, match="raise sampling.max_new_tokens"):
        one_step(run)


def test_an_engine_that_missed_a_sync_is_found_fault_53(start, monkeypatch):
    run = start("grpo.lr=0.05")
    one_step(run)
    one_step(run)
    monkeypatch.setattr(run.rollout, "update_weights", lambda state, version: None)
    one_step(run)
    with pytest.warns(UserWarning, match="does not hold the trainer's weights"):
        one_step(run)


def test_the_training_loop_makes_the_same_steps(start):
    run = start("run.steps=2")
    run_steps(run, Progress(2))
    records = read_jsonl(run.folder.path / "metrics.jsonl")[1:]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["actor/grad_norm"] > 0 for record in records)
