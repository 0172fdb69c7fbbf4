"""What a pass asks of torch, each a kernel launch of its own where passes are graphs."""

import collections

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from driver.drafter import Drafter
from driver.rollout.draft_runner import DraftRunner
from driver.rollout.request import Request, SamplingParams
from tests.driver.hugging_face import random_model
from tests.driver.test_engine import Choose, make_rollout

# Calls that compute nothing: views, and memory that a graph's pool hands out while it is captured.
FREE = {"view", "slice", "select", "split", "split_with_sizes", "unbind", "expand", "as_strided",
        "unsqueeze", "squeeze", "_unsafe_view", "detach", "t", "alias", "empty", "new_empty",
        "empty_like", "_local_scalar_dense"}  # fmt: skip


class TorchCalls(TorchDispatchMode):
    """Counts the calls that compute something, by name."""

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
        # The store's lengths on top.
        (
            "hybrid:5,3,12",
            64,
            {"index_select": 2, "copy_": 1, "fill_": 1, "add": 1, "index_copy_": 1},
        ),
    ],
)
def test_a_pass_is_made_of_ops(strategy, few_rows, wanted):
    """Whatever the depth: a level is ops alone, and features are recorded without a copy."""
    engine = make_rollout(random_model("llama-tied-llama3")).engine
    for proposer in engine.proposers.values():
        if isinstance(proposer, DraftRunner):
            proposer.load(Drafter(proposer.spec).state_dict(), 1)
            proposer.few_rows = few_rows
    engine.bandit = Choose(strategy)
    run, seen = engine.program.run, []

    def counted(batch, chosen):
        with TorchCalls() as calls:
            rows = run(batch, chosen)
        seen.append((str(chosen), +calls.counts))
        return rows

    engine.program.run = counted
    engine.generate([Request(0, 0, (1, 2, 3), SamplingParams(max_new_tokens=12))])
    assert seen[-1] == (strategy, wanted)
