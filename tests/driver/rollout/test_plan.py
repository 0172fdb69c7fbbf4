"""Every batch maps to a graph, and nothing is planned that the buffers cannot hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.config.strategy import OFF, Strategy
from driver.model.drafter import DraftSpec
from driver.model.fetch import SMOLLM2_CONFIG
from driver.model.spec import ModelSpec
from driver.rollout.plan import (
    BucketPlan,
    Cell,
    GraphCost,
    draft_bytes,
    plain_buckets,
)

ARMS = [
    Strategy.parse(s) for s in ("ngram:4,1,5", "learned:4,2,8", "learned:8,4,32", "hybrid:4,4,16")
]
SPEC = ModelSpec.from_config(SMOLLM2_CONFIG)
COST = GraphCost(SPEC)


def make(max_batch=16, spec=8, buckets=(1, 2, 4, 8, 16), max_rows=10**6):
    return BucketPlan(max_batch, spec, ARMS, buckets, max_rows)


@given(max_batch=st.integers(1, 300), spec=st.integers(0, 300), data=st.data())
def test_every_batch_has_a_bucket_that_holds_it(max_batch, spec, data):
    plan = make(max_batch, spec)
    batch = data.draw(st.integers(1, max_batch))
    cell = plan.find(batch, OFF)
    assert cell in plan.cells and batch <= cell.batch <= max_batch
    assert cell.batch < 2 * batch  # fewer inert rows than requests
    for arm in ARMS:
        found = plan.find(batch, arm)
        assert (found is not None) == (batch <= min(spec, max_batch))
        assert found is None or (found in plan.cells and batch <= found.batch <= spec)


@given(size=st.integers(1, 1000))
def test_plain_buckets_rise_to_the_largest_batch(size):
    buckets = plain_buckets(size)
    assert buckets == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] == size


def test_speculation_s_buckets_are_cut_to_its_largest_batch():
    plan = make(spec=6)
    assert [plan.find(n, ARMS[0]).batch for n in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]
    assert plan.find(7, ARMS[0]) is None
    assert make(spec=0).find(1, ARMS[0]) is None


def test_a_pass_larger_than_the_buffers_is_not_planned():
    """fault 22: a tree of many nodes for a batch that has no room for it."""
    plan = make(max_rows=128)
    assert plan.find(4, ARMS[2]) == Cell(4, ARMS[2])
    assert plan.find(5, ARMS[2]) is None
    assert Cell(8, ARMS[2]) not in plan.cells


def test_drafts_take_arrays_of_their_own_and_share_temporaries():
    spec = DraftSpec.of(SPEC, draft_vocab=1000)
    plain, ngram = Cell(8, OFF), Cell(8, ARMS[0])
    assert draft_bytes([plain, ngram], spec, 2) == 0
    small, wide = Cell(2, ARMS[1]), Cell(2, Strategy.parse("learned:4,4,16"))
    features = 2 * 5 * 3 * 576 * 2  # requests x entries x width x bytes
    row = 2 * (7 * 576 + 2 * 576 + 1536) + 4 * 1000
    assert draft_bytes([small, plain], spec, 2) == features + 2 * 2 * row
    assert draft_bytes([small, wide], spec, 2) == features + 2 * 4 * row  # both of depth 4
    deep = Cell(2, ARMS[2])
    assert draft_bytes([deep, small], spec, 2) == features * (5 + 9) // 5 + 2 * 4 * row
    kept = draft_bytes([small], spec, 2, rejection=True) - draft_bytes([small], spec, 2)
    assert kept == 2 * 8 * 4 * (3 * 1000 + SPEC.vocab_size)  # rows x bytes x ids


def test_the_largest_is_captured_first():
    cells = make().cells
    assert [c.rows for c in cells] == sorted((c.rows for c in cells), reverse=True)


@pytest.mark.parametrize(
    ("batch", "strategy", "nodes"),
    [
        (1, "off", 188),
        (64, "off", 188),
        (65, "off", 308),  # a linear may be two launches
        (96, "off", 308),
        (97, "off", 368),
        (160, "off", 368),
        (161, "off", 398),
        (1, "ngram:4,1,5", 195),
        (1, "learned:4,2,8", 229),
        (1, "hybrid:4,2,8", 233),
        (13, "learned:4,1,5", 354),  # 65 new entries, and norms of the head
        (65, "learned:4,1,5", 447),  # and levels of as many
    ],
)
def test_the_memory_model_counts_launches(batch, strategy, nodes):
    """As docs/notes/graphs.md counts them, of 30 layers."""
    cell = Cell(batch, Strategy.parse(strategy))
    assert COST.nodes(cell) == nodes
    assert GraphCost(SPEC, shared=True).nodes(cell) == nodes + 122  # a fold and its gather
    assert COST.bytes_of(cell) - GraphCost(SPEC, loop=False).bytes_of(cell) == 128 << 10
    assert COST.bytes_of(cell, cell) == 2 * COST.bytes_of(cell)
