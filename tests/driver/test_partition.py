"""Which partition trains beside the tail."""

import pytest
import torch

from driver import partition
from driver.partition import STOP_S, Overlap, choose_overlap

ALONE = 1e-3


def measured(*rows: tuple[int, float, float]) -> list[Overlap]:
    return [Overlap.of(sms, ALONE, ALONE * x, step_s, 512) for sms, x, step_s in rows]


def test_tokens_are_counted_against_the_time_the_tail_gets_longer():
    overlap = Overlap.of(8, ALONE, 1.05 * ALONE, 5e-3, 500)
    assert overlap.slowdown == pytest.approx(1.05)
    # In 105 ms the tail is 5 ms longer, and 21 steps of 500 tokens are made.
    assert overlap.tokens_per_ms == pytest.approx(21 * 500 / 5)
    free = Overlap.of(8, ALONE, 0.99 * ALONE, 5e-3, 500)  # by the clock's noise
    assert 0 < free.tokens_per_ms < float("inf")


def test_the_fastest_within_the_budget_is_chosen():
    rows = measured((8, 1.03, 4e-3), (16, 1.05, 2.5e-3), (32, 1.2, 1e-3))
    assert choose_overlap(rows, 1e-3, 512, budget=1.06).sms == 16
    assert choose_overlap(rows, 1e-3, 512, budget=1.04).sms == 8
    assert choose_overlap(rows, 1e-3, 512, budget=1.25).sms == 32


def test_serial_stays_where_overlapping_is_worse_or_stops_too_late():
    assert choose_overlap([], 1e-3, 512, 1.06) is None
    slow = measured((8, 1.05, STOP_S))
    assert choose_overlap(slow, 1e-2, 512, 1.06) is None
    # 1.05 of 4 ms steps delays a step by 0.2 ms: serial steps must cost more than that.
    row = measured((8, 1.05, 4e-3))
    assert choose_overlap(row, 0.15e-3, 512, 1.06) is None
    assert choose_overlap(row, 0.25e-3, 512, 1.06) is not None


def test_a_partition_is_made_once_and_kept(monkeypatch):
    """Tensors that its stream used may be freed when every trainer of it is gone."""
    monkeypatch.setattr(partition, "Partition", lambda sms, device: [sms, device])
    partition.partition_of.cache_clear()
    card = torch.device("cuda", 0)
    first = partition.partition_of(8, card)
    assert partition.partition_of(8, torch.device("cuda", 0)) is first
    assert partition.partition_of(16, card) == [16, card]
    partition.partition_of.cache_clear()
