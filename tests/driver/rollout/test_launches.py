"""Kernel launches of a captured pass: those of a layer, and those of torch."""

import collections
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tlt_ext
from driver.model.drafter import Drafter
from driver.model.fetch import SMOLLM2_CONFIG
from driver.model.kv_cache import KvCache
from driver.model.spec import ModelSpec
from driver.model.target import TargetModel, layer_launches
from driver.rollout.plan import CHAIN_LAUNCHES
from driver.rollout.request import Request, SamplingParams
from tests import kit
from tests.driver.hugging_face import QWEN2_7B, SMOLLM3_3B, random_model
from tests.driver.rollout.test_engine import Choose, make_rollout

SHAPES = {
    "smollm2": SMOLLM2_CONFIG,
    "smollm3_3b": {**SMOLLM3_3B, "no_rope_layers": [0] * 36},  # no layer has RoPE
    "qwen2_7b": {**QWEN2_7B, "dtype": "bfloat16"},
}
# Calls that launch nothing: views, and allocations from the pool of a graph during capture.
FREE = {"view", "slice", "select", "split", "split_with_sizes", "unbind", "expand", "as_strided",
        "unsqueeze", "squeeze", "_unsafe_view", "detach", "t", "alias", "empty", "new_empty",
        "empty_like", "_local_scalar_dense"}  # fmt: skip


class TorchCalls(TorchDispatchMode):
    """Counts the calls that launch a kernel, by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        self.counts[name] += name not in FREE
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("strategy", "few_rows", "wanted"),
    [
        ("off", 0, {"index_select": 1}),  # the embedding
        # The roots into the node store, its counts; the last entry's rows, or its hidden state.
        ("learned:5,3,12", 64, {"index_select": 2, "copy_": 1, "fill_": 1}),
        ("learned:5,3,12", 0, {"index_select": 3, "copy_": 1, "fill_": 1, "sub": 1}),
        # The chain's positions; on a CPU also ids of -1.
        (
            "learned:5,1,6",
            64,
            {"index_select": 2, "copy_": 1, "fill_": 1, "add": 1, "clamp_min": 1},
        ),
        # The store's lengths on top.
        (
            "hybrid:5,3,12",
            64,
            {"index_select": 2, "copy_": 1, "fill_": 1, "add": 1, "index_copy_": 1},
        ),
    ],
)
def test_a_pass_is_made_of_ops(strategy, few_rows, wanted):
    """At any depth: a level consists of ops only, and features are recorded without a copy."""
    assert torch_calls(strategy, few_rows) == wanted


def test_a_pass_with_rejection_has_the_launches_of_the_plan():
    """They compute the probabilities of a chain, whatever its depth."""
    words = "engine.verify=rejection", "engine.strategies=off learned:5,1,6"
    more = torch_calls("learned:5,1,6", 64, *words) - torch_calls("learned:5,1,6", 64)
    assert sum(more.values()) == CHAIN_LAUNCHES, more


def torch_calls(strategy, few_rows, *words):
    """Counts of the last pass."""
    rollout = make_rollout(random_model("llama-tied-llama3"), *words)
    runner, engine = rollout.spot.runner, rollout.engine
    runner.load(Drafter(runner.spec).state_dict(), 1)
    runner.few_rows = few_rows
    engine.bandit = Choose(strategy)
    run, seen = engine.program.run, []

    def counted(batch, chosen):
        with TorchCalls() as calls:
            rows = run(batch, chosen)
        seen.append((str(chosen), +calls.counts))
        return rows

    engine.program.run = counted
    engine.generate([Request(0, 0, (1, 2, 3), SamplingParams(max_new_tokens=12))])
    assert seen[-1][0] == strategy
    return seen[-1][1]


def step_launches(spec, requests, slots):
    """Nodes of a captured decode step, one row a request, of tables with room for `slots`."""
    weights = {
        name: torch.zeros(shape, dtype=spec.dtype, device="cuda")
        for name, shape in spec.shapes().items()
    }
    model = TargetModel(spec, weights, device="cuda", max_rows=requests)
    pages = slots // 16
    kv = KvCache(spec, num_pages=requests * pages, page_size=16, device="cuda")
    ints = {"dtype": torch.int32, "device": "cuda"}
    batch = tlt_ext.Rows(
        row_start=torch.arange(requests + 1, **ints),
        context_len=torch.full((requests,), 40, **ints),
        position=torch.full((requests,), 40, **ints),
        block_table=torch.arange(requests * pages, **ints).view(requests, pages),
        status=torch.zeros(requests, **ints),
    )
    ids = torch.zeros(requests, **ints)
    model.forward(ids, batch, kv)  # loads kernels and grows scratch memory
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        model.forward(ids, batch, kv)
    pool = tlt_ext.GraphPool()
    pool.add("step", [graph.raw_cuda_graph()], torch.zeros(8, **ints), loop=False)
    return pool.usage()["step"].nodes


@kit.gpu
@kit.needs_gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="counted on a card with clusters",
)
@pytest.mark.parametrize(
    ("shape", "requests", "slots", "launches"),
    [
        ("smollm2", 1, 1024, 5),
        ("smollm2", 16, 1024, 6),
        ("smollm3_3b", 1, 1024, 6),
        ("qwen2_7b", 1, 1024, 6),
        ("qwen2_7b", 1, 8192, 7),
        ("qwen2_7b", 16, 1024, 9),
    ],
)
def test_launches_of_a_layer(shape, requests, slots, launches):
    """Five for a request of a small model: norm, q, k, v and append; attention; output; norm, gate
    and up; down.

    Attention is one launch on a card with clusters, for few requests with short tables, and two
    otherwise. A norm before large weights is a separate launch. So are, above eight rows, the
    append of a large model's q, k and v, and the norm before them.
    """
    spec = ModelSpec.from_config({**SHAPES[shape], "vocab_size": 256})
    one, two = (step_launches(replace(spec, num_layers=n), requests, slots) for n in (1, 2))
    assert two - one == launches <= layer_launches(spec, requests)
