"""Ranks that share a model, on Gloo: tokens, lengths and log-prob bits of one rank."""

import sys
from dataclasses import replace

import pytest
import torch

from driver.common.errors import UserError
from driver.common.tensor_parallel import TensorParallel
from driver.common.world import World
from driver.config.sections import ModelConfig
from driver.model.shards import Shard, owned_columns
from driver.model.spec import ModelSpec
from driver.model.target_weights import TargetWeights
from driver.model.tiny import build_policy
from driver.rollout import graphs
from driver.rollout.bandit import Bandit
from driver.rollout.request import SamplingParams
from driver.session import Session
from driver.session.load import spec_of
from tests import kit
from tests.driver import hugging_face
from tests.driver.rollout.test_bursts import looping
from tests.driver.rollout.test_engine import (
    STRATEGIES,
    generate,
    make_rollout,
    requests,
    same,
)
from tests.forks import run_ranks

SCRIPT = "from tests.driver.rollout import test_tensor_parallel; test_tensor_parallel.rank()"
# Ranks own different numbers of heads of each key-value head; the last block of K is short.
SHAPE = {
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "intermediate_size": 600,
    "num_hidden_layers": 2,
    "initializer_range": 0.05,
}
MODELS = {
    # Some ranks own no head, and one of four no column of the MLP.
    "tiny": lambda: build_policy(ModelConfig(max_position=256), 3),
    "qwen2": lambda: hugging_face.random_model("qwen2", hidden_size=640, **SHAPE),
    # A head is two blocks of K.
    "qwen3": lambda: hugging_face.random_model(
        "qwen3", hidden_size=256, **SHAPE | {"head_dim": 128}
    ),
}


WAYS = "symmetric", "gather"
ARMS = ["ngram:6,4,16", "learned:4,3,12", "hybrid:2,1,17"]


def rank() -> None:
    """One rank: compares its group with one rank that has the whole model.

    Words are a device, models, settings, and ways to exchange with `engine.graphs`.
    """
    device, *words = sys.argv[1:]
    world = World.join(device, 60)
    groups = {way: TensorParallel.of(world, world.size, way == "symmetric") for way in WAYS}
    settings = [f"run.device={world.device}", *(word for word in words if "=" in word)]
    few = [
        replace(r, prompt_ids=tuple(token % 11 + 3 for token in r.prompt_ids))
        for r in requests(8, new=16, stop=(2,))
    ]
    for policy in [MODELS[word]() for word in words if word in MODELS]:
        one = make_rollout(policy, *settings)
        wanted = world.share(generate(one, few) if world.rank == 0 else None)
        for word in [word for word in words if ":" in word]:
            way, graphs = word.split(":")
            shared = make_rollout(
                policy, *settings, f"engine.graphs={graphs}", parallel=groups[way]
            )
            if word == "symmetric:auto":
                assert shared.engine.runner.graphs.loop
            compare(shared, few, wanted, word)
    world.leave()


def compare(shared, few, wanted, word: str) -> None:
    world, accepted = shared.target.parallel.world, 0
    shared.spot.swap()
    bandit, page_size = shared.engine.bandit, shared.engine.cache.page_size
    # Each rank would choose other strategies of the last list.
    for arms in [["off"], *([arm] for arm in ARMS), ["off", *STRATEGIES]]:
        limit = 96 // page_size if len(arms) > 1 else None
        got = generate(shared, few, *arms, seed=world.rank, page_limit=limit)
        assert same(got, wanted), f"{arms} differs, {word}"
        assert arms == ["off"] or shared.engine.stats.drafted > 0, f"{arms} drafted none"
        accepted += shared.engine.stats.accepted
    assert accepted > 0 and (page_size > 4 or shared.engine.stats.preemptions > 0)
    shared.engine.bandit = Bandit(bandit.arms, bandit.config, bandit.spec_max_batch, world.rank)
    shared.engine.forget()
    assert same(shared.engine.generate(few, record=False), wanted), f"bandit differs, {word}"


def loops() -> None:
    """One rank, whose passes are repeated as in a graph; no rank may ask its device to stop."""
    world = World.join("cpu", 60)
    few, policy, words = requests(3, new=40, stop=(2,)), MODELS["qwen2"](), "engine.max_batch=2"
    wanted = generate(make_rollout(policy, words), few)
    shared = looping(policy, words, parallel=TensorParallel.of(world, world.size))
    shared.engine.ring.request_stop = None
    graphs.PROFILE_PASSES = 1
    for menu in (["off"], ["off", *STRATEGIES]):
        assert same(generate(shared, few, *menu, seed=world.rank, horizon=4), wanted)
        assert shared.engine.stats.bursts < shared.engine.stats.target_passes
    assert shared.engine.stats.switches > 2
    world.leave()


def start(log, ranks, *words, planted="", device="cpu", ways=("gather:auto",)):
    code = run_ranks(planted + SCRIPT, [device, *ways, *words], ranks, log)
    return code, log.read_text()[-3000:]


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_any_number_of_ranks_makes_the_bits_of_one(tmp_path, ranks):
    models = [name for name in MODELS if (ranks, name) != (8, "qwen3")]
    code, log = start(tmp_path / "log", ranks, *models)
    assert code == 0, log


def test_ranks_repeat_passes_without_the_host(tmp_path):
    log = tmp_path / "log"
    assert run_ranks(SCRIPT.replace("rank()", "loops()"), [], 2, log) == 0, log.read_text()[-3000:]


@kit.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_cards_make_the_bits_of_one(tmp_path, dtype):
    words = [*MODELS, f"model.dtype={dtype}", "engine.page_size=16"]
    ways = ["symmetric:auto", "gather:pass", "gather:off"]
    code, log = start(tmp_path / "log", 2, *words, device="cuda", ways=ways)
    assert code == 0, log


FROM_THE_LEFT = """
import tlt_ext
def fold(partials, out, *, bias=None, residual=None):
    total = sum(partials)
    for part in (bias, residual):
        total = total if part is None else total + part
    out.copy_(total)
tlt_ext.fold_partials = fold
"""
HALVES = """
import torch
from driver.model import shards
shards.owned_columns = lambda count, rank, size: torch.arange(count).chunk(size)[rank]
"""


@pytest.mark.parametrize(
    ("ranks", "planted"),
    [(4, FROM_THE_LEFT), pytest.param(2, HALVES, marks=pytest.mark.slow)],
)
def test_another_order_of_additions_is_found(tmp_path, ranks, planted):
    code, log = start(tmp_path / "log", ranks, "qwen2", planted=planted)
    assert code != 0 and "['off'] differs" in log, log


def spec(heads=10, kv_heads=2, head_dim=64, inner=600):
    return ModelSpec.from_config(
        {
            **hugging_face.QWEN2_7B,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": inner,
        }
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "size"),
    [
        (10, 2, 64, 4),
        (9, 3, 64, 2),
        (28, 4, 128, 2),
        (28, 4, 128, 4),
        (64, 8, 128, 2),
        (64, 8, 64, 8),
        (6, 2, 16, 2),
    ],
)
def test_each_head_and_column_has_one_owner(heads, kv_heads, head_dim, size):
    """Owned columns stay in their part of K; each place reads its own key-value head."""
    whole, seen = spec(heads, kv_heads, head_dim), []
    for rank in range(size):
        part = Shard.of(whole, rank, size)
        rows, columns = (part.chosen[f"self_attn.{n}_proj.weight"][1] for n in "qo")
        owned = columns >= 0
        assert torch.equal(columns[owned], owned_columns(whole.q_dim, rank, size))
        assert torch.equal(rows[owned], columns[owned])
        own_parts = 8 // size
        local = torch.arange(len(columns))[owned]
        assert torch.equal(local % 64, columns[owned] % 64)
        assert torch.equal(local // 64 % own_parts + rank * own_parts, columns[owned] // 64 % 8)
        by_place = rows.view(-1, head_dim)
        group = part.spec.num_heads // part.spec.num_kv_heads
        read = part.chosen["self_attn.k_proj.weight"][1].view(-1, head_dim)[:, 0] // head_dim
        for place in range(part.spec.num_heads):
            head = int(by_place[place, 0]) // head_dim
            assert head // (heads // kv_heads) == read[place // group]
        seen += [columns[owned], part.chosen["mlp.down_proj.weight"][1] + whole.q_dim]
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(whole.q_dim + 600))


def test_a_group_that_divides_a_head_is_refused():
    with pytest.raises(UserError, match="tensor_parallel=8: it would divide heads of 128 columns"):
        Shard.of(spec(head_dim=128), 0, 8)
    with pytest.raises(UserError, match="tensor_parallel=2: it would divide heads of 96 columns"):
        Shard.of(spec(head_dim=96), 0, 2)


def test_a_session_of_a_group_takes_no_arrivals():
    """Each rank would get them at another pass."""
    with pytest.raises(UserError, match="a session of one process has"):
        Session.from_pretrained("tiny", settings=["engine.tensor_parallel=2"])
    rollout = make_rollout(MODELS["tiny"](), parallel=TensorParallel(0, 2))
    with Session(rollout) as session, pytest.raises(UserError, match="only roll_out makes"):
        session.generate([[3, 4, 5]], SamplingParams(max_new_tokens=8))


def test_ranks_that_do_not_divide_into_groups_are_refused():
    with pytest.raises(UserError, match="tensor_parallel=2: .* a multiple of it, got 3"):
        TensorParallel.of(World(0, 3), 2)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_the_same_rows_of_joined_projections(size):
    policy = hugging_face.random_model("phi3", hidden_size=640, **SHAPE)
    joined = spec_of(policy)
    apart = replace(joined, family="LlamaForCausalLM")
    weights = policy.state_dict()
    split = {}
    for name, weight in weights.items():
        rows, names = [len(weight)], [name]
        if "qkv_proj" in name:
            rows = [joined.q_dim, joined.kv_dim, joined.kv_dim]
            names = [name.replace("qkv", x) for x in "qkv"]
        if "gate_up_proj" in name:
            rows = [joined.intermediate_size] * 2
            names = [name.replace("gate_up", x) for x in ("gate", "up")]
        split |= zip(names, weight.split(rows), strict=True)
    for rank in range(size):
        ours, theirs = (
            TargetWeights(spec, Shard.of(spec, rank, size), torch.device("cpu"), torch.float32)
            for spec in (joined, apart)
        )
        ours.load_weights(weights)
        theirs.load_weights(split)
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(layer.qkv, other.qkv)
            assert torch.equal(layer.gate_up, other.gate_up)
