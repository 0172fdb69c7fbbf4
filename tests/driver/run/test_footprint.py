"""The predicted memory of a run against what small models on the CPU really hold."""

import gc
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from driver.common.memory import CARD_MEMORY
from driver.common.tensor_parallel import TensorParallel
from driver.config.load import load_config
from driver.config.sections import GrpoConfig
from driver.model import tiny
from driver.policy.micro_batch import build_micro_batch
from driver.policy.trainer import PolicyTrainer
from driver.records.progress import Progress
from driver.rollout.request import Request, Response, SamplingParams
from driver.run.collector import Collector
from driver.run.dry_run import run_shape
from driver.run.footprint import (
    Row,
    RunShape,
    held_bytes,
    policy_spec,
    row_tokens,
    update_bytes,
)
from driver.session.load import load_policy, spec_of
from driver.session.parts import build_rollout
from driver.train import train
from tests import kit
from tests.driver.hugging_face import FAMILIES

PROMPT = 6
# Published shapes.
SMOLLM2 = {
    "family": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QWEN2_HALF_B = {
    "family": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
CARD_WORDS = [
    "run.device=cuda",
    "run.steps=2",
    "run.eval_prompts=0",
    "run.checkpoint_every=0",
    "model.dtype=bfloat16",
    "warmup.steps=0",
    "sampling.max_new_tokens=500",
    "grpo.prompts_per_step=8",
    "grpo.samples_per_prompt=8",
    "grpo.micro_batch_tokens=16384",
    "drafter.draft_vocab=1024",
]
WORDS = [
    "model.hidden_size=64",
    "model.num_layers=3",
    "run.threads=1",
    "engine.max_batch=8",
    "engine.prefill_chunk=64",
    "sampling.max_new_tokens=24",
]


def predicted(*words):
    config = load_config([*WORDS, *words])
    return config, RunShape(policy_spec(config, None), PROMPT).footprint(config)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model.dtype=bfloat16", "drafter.draft_vocab=16", "engine.max_batch=3"],
        ["engine.strategies=off ngram:4,1,5", "engine.num_pages=50"],
        ["engine.tensor_parallel=2", "model.hidden_size=256"],
    ],
)
def test_engine_and_drafter_hold_what_was_predicted(words):
    config, parts = predicted(*words)
    policy, _ = load_policy(config, None)
    spec, longest = spec_of(policy), 24 + 2 * PROMPT
    parallel = TensorParallel(0, config.engine.tensor_parallel)
    rollout = build_rollout(config, spec, policy.state_dict(), longest, parallel)
    got = parts.always
    weights = held_bytes(rollout.target.state_dict())
    cache, engine = rollout.engine.cache, rollout.engine
    assert got["engine weights"] == weights
    assert got["engine buffers"] == held_bytes(vars(rollout.target)) - weights
    assert got["KV pages"] == held_bytes(cache.k, cache.v)
    state = held_bytes(vars(engine.state.store), vars(engine.state))
    assert got["engine state"] == pytest.approx(state, rel=0.1)
    if not config.engine.needs_drafter:
        assert "drafter" not in got and "feature pages" not in got
        return
    spot = rollout.spot
    spot.swap()
    assert got["feature pages"] == held_bytes(cache.features)
    assert got["drafter KV pages"] == held_bytes(spot.runner.k, spot.runner.v)
    inference = held_bytes(spot.runner.weights, spot.runner.d2t)
    assert got["drafter"] == held_bytes(spot.drafter) + inference
    for weight in spot.drafter.trainable():
        weight.grad = torch.zeros_like(weight)
    spot.step.optimizer.step()
    made = spot.bin
    arrays = sum(x.nbytes for x in (made.features, made.final, *made.small))
    assert got["training bin"] == pytest.approx(arrays, rel=0.1)
    moments = held_bytes(
        [v for state in spot.step.optimizer.state.values() for v in state.values() if v.dim()]
    )
    gradients = held_bytes([weight.grad for weight in spot.drafter.trainable()])
    average = held_bytes(spot.step.average.values)
    assert got["drafter's optimizer"] == moments + gradients + average > 0


def test_a_card_s_drafter_has_the_target_s_head():
    """In its precision; on the CPU a drafter is float32 throughout."""
    words = ["model.dtype=bfloat16", "drafter.draft_vocab=16", "engine.num_pages=50"]
    here, card = (predicted(*words, f"run.device={d}")[1].always for d in ("cpu", "cuda"))
    assert here["drafter"] - card["drafter"] == 2 * 16 * 64  # bytes x rows x width
    assert here["KV pages"] == card["KV pages"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policy_optimizer_and_gradients_take_what_was_predicted(dtype):
    config, parts = predicted(f"model.dtype={dtype}")
    trainer = PolicyTrainer(load_policy(config, None)[0], config.grpo)
    for param in trainer.params:
        param.grad = torch.zeros_like(param)
    assert parts.phases["optimizer"]["gradients"] == held_bytes([p.grad for p in trainer.params])
    assert parts.always["policy"] == held_bytes(trainer.params)
    trainer.optimizer.step()
    moments = [v for s in trainer.optimizer.state.values() for v in s.values() if v.dim()]
    assert parts.always["Adam"] == held_bytes(moments)


def documents(count, length, vocab_size):
    params = SamplingParams(max_new_tokens=length)
    draw = torch.Generator().manual_seed(0)
    out = []
    for index in range(count):
        tokens = torch.randint(vocab_size, (length,), generator=draw).tolist()
        request = Request(index, 0, tuple(range(1, 9)), params)
        out.append(Response(request, tokens, [0.0] * length, "length"))
    return out


def batch_of(family, vocab_size, dtype, checkpointing):
    config, model = FAMILIES[family]
    policy = model(
        config(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=256,
        )
    ).to(dtype)
    trainer = PolicyTrainer(policy, GrpoConfig(checkpointing=checkpointing))
    batch = build_micro_batch(documents(6, 100, vocab_size), range(6), "cpu")
    return trainer, trainer.with_fixed_logprobs(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_activations_are_those_of_a_forward_pass(family, dtype):
    trainer, batch = batch_of(family, 64, dtype, False)
    own = {p.untyped_storage().data_ptr() for p in trainer.params}
    saved = []  # holds them, so that no address comes twice

    def save(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        trainer.weights.logprobs(batch)
    sizes = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in saved)}
    total = sum(size for place, size in sizes.items() if place not in own)
    tokens = batch.input_ids.shape[1]
    parts = update_bytes(spec_of(trainer.model), Row(tokens, dtype, on_card=False))
    needs = parts["update, logits"]
    copies = needs.get("copies of embedding and head", 0)
    assert needs["activations"] + copies == pytest.approx(total, rel=0.02)


def peak_bytes(work):
    """Most memory that torch had taken at once, beyond what it had before."""
    gc.collect()  # what an earlier test left must not be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [
        (e.start_ns(), e.nbytes())
        for e in profiler.profiler.kineto_results.events()
        if e.name() == "[memory]"
    ]
    return max(accumulate(size for _, size in sorted(events, key=lambda event: event[0])))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_of_an_update_is_within_a_tenth(dtype, vocab_size, checkpointing):
    trainer, batch = batch_of("llama", vocab_size, dtype, checkpointing)
    got = peak_bytes(lambda: trainer.backward([batch], torch.ones(6)))
    tokens = batch.input_ids.shape[1]
    row = Row(tokens, dtype, checkpointing, on_card=False)
    spec = spec_of(trainer.model)
    parts = update_bytes(spec, row)
    parts["update, its end"]["gradients"] = 4 * spec.num_parameters
    assert max(sum(part.values()) for part in parts.values()) == pytest.approx(got, rel=0.1)


def test_packed_rows_are_as_long_as_the_longest_response_at_least():
    config = load_config(["sampling.max_new_tokens=100", "grpo.micro_batch_tokens=50"])
    assert row_tokens(config, 10) == 110
    few = load_config(["grpo.prompts_per_step=1", "grpo.samples_per_prompt=2"])
    assert row_tokens(few, 10) == 2 * (192 + 10)


def test_a_storage_counts_once():
    x = torch.zeros(8)
    assert held_bytes({"x": x}, [x[2:], x.view(2, 4)], 3, None) == 32


@kit.gpu
@kit.needs_gpu
@pytest.mark.parametrize(
    ("freed", "offload"), [("false", "none"), ("true", "none"), ("true", "all")]
)
@pytest.mark.parametrize("shape", [SMOLLM2, QWEN2_HALF_B], ids=["smollm2", "qwen2-0.5b"])
def test_peak_of_a_card_is_within_a_tenth(shape, freed, offload, tmp_path, monkeypatch):
    """Random weights never end a response, so every row of the update is full.

    They earn nothing, and equal rewards would leave the update out.
    """

    def rewards(self, prompts, responses):
        return [index % 7 / 7 for index in range(len(responses))]

    monkeypatch.setattr(Collector, "rewards", rewards)
    config, model = FAMILIES[shape["family"]]
    folder = tmp_path / "model"
    sizes = {name: size for name, size in shape.items() if name != "family"}
    model(config(**sizes)).bfloat16().save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    words = [f"model.path={folder}", f"run.root={tmp_path}", f"engine.free_in_update={freed}"]
    run = load_config([*CARD_WORDS, *words, f"grpo.offload={offload}"])
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # what earlier tests left
    held = train(run, Progress(2)).last_metrics[CARD_MEMORY] * 1e9 - before
    predicted = run_shape(run, folder).footprint(run)
    assert predicted.torch_peak == pytest.approx(held, rel=0.1)
