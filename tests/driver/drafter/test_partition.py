"""Which partition trains beside the tail."""

from types import SimpleNamespace

import pytest
import torch

from driver.drafter import overlap as overlap_module
from driver.drafter import partition
from driver.drafter.overlap import LEAST_ROWS, SIZES, measure_overlaps
from driver.drafter.partition import MARGIN, STOP_S, Overlap, Placement, choose_overlap

ALONE = 1e-3
SERIAL = 512 / 1e-3  # tokens a second between passes


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
    assert choose_overlap(rows, SERIAL, budget=1.06).sms == 16
    assert choose_overlap(rows, SERIAL, budget=1.04).sms == 8
    assert choose_overlap(rows, SERIAL, budget=1.25).sms == 32
    # Steps of few entries are soon done: tokens count.
    short = Overlap.of(64, ALONE, 1.05 * ALONE, 1e-3, 64)
    assert choose_overlap([*rows, short], SERIAL, budget=1.06).sms == 16


def test_serial_stays_where_overlapping_is_worse_or_stops_too_late():
    assert choose_overlap([], SERIAL, 1.06) is None
    slow = measured((8, 1.05, 1.01 * STOP_S))
    assert choose_overlap(slow, SERIAL / 10, 1.06) is None
    # A rest may be left at once: what counts is the step.
    rested = Overlap.of(8, ALONE, 1.05 * ALONE, 1.01 * STOP_S, 512, duty=0.9)
    assert choose_overlap([rested], SERIAL / 10, 1.06) is rested
    # 1.05 of 4 ms steps delays a step by 0.2 ms: serial steps must cost more than that.
    row = measured((8, 1.05, 4e-3))
    assert choose_overlap(row, 512 / 0.15e-3, 1.06) is None
    assert choose_overlap(row, 512 / 0.25e-3, 1.06) is not None


class Card:
    """Stands for trainer, decoding and clock: so many percent slower while steps are made.

    A step takes 20 ms of one multiprocessor for 64 entries, and half a millisecond besides.
    """

    def __init__(self, monkeypatch, cost: float, tokens: int = 256) -> None:
        self.cost, self.now, self.steps, self.running = cost, 0.0, 0, False
        self.bin = SimpleNamespace(tokens=tokens)
        self.buffer = SimpleNamespace(kept=[])
        self.reports = SimpleNamespace(read=lambda most: None)
        self.target = SimpleNamespace(device=torch.device("cuda", 0))
        self.placement: Placement | None = None
        self.captured: list[tuple[int, int, int]] = []
        self._made = 0.0
        monkeypatch.setattr(
            overlap_module,
            "partition_of",
            lambda sms, device: SimpleNamespace(sms=sms, stream=None),
        )
        card = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
        monkeypatch.setattr(overlap_module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def step_s(self) -> float:
        where = self.placement
        sms, rows = (132, self.bin.tokens) if where is None else (where.sms, where.rows)
        return 0.5e-3 + 20e-3 * rows / 64 / sms

    def attempt(self) -> bool:
        self.now += self.step_s()
        return True

    def capture(self, split: int, placement: Placement) -> None:
        self.captured.append((split, placement.sms, placement.rows))

    def share(self, rows: int) -> int:
        return rows // 4

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def decode(self) -> float:
        """Thirty-two passes."""
        duty = self.placement.duty if self.running else 0.0
        pass_s = ALONE * (1 + self.cost * duty)
        self.now += 32 * pass_s
        self._made += 32 * pass_s * duty / self.step_s()
        self.steps = int(self._made)
        return pass_s

    def measure(self, budget: float) -> tuple[float, dict[Overlap, Placement]]:
        return measure_overlaps(self, self.decode, budget)


def test_training_rests_as_long_as_the_budget_asks(monkeypatch):
    """Decoding is as slow beside few multiprocessors as beside many: more of them, less often."""
    card = Card(monkeypatch, cost=0.08)
    serial_s, found = card.measure(1.06)
    assert serial_s == pytest.approx(0.5e-3 + 80e-3 / 132)
    full = [o for o in found if o.duty == 1]
    assert [o.sms for o in full] == list(SIZES)
    assert all(o.slowdown == pytest.approx(1.08) for o in full)
    best = choose_overlap(list(found), 256 / serial_s, 1.06)
    assert best.sms == 64 and best.duty == pytest.approx(MARGIN * 6 / 8)
    assert best.slowdown == pytest.approx(1 + MARGIN * 0.06) and found[best].duty == best.duty
    # What is trained for the delay stays as it was.
    (unpaced,) = (o for o in full if o.sms == 64)
    assert best.tokens_per_ms == pytest.approx(unpaced.tokens_per_ms, rel=0.1)
    assert best.stop_s == pytest.approx(card.step_s(), rel=0.1)


def test_a_small_card_is_not_halved(monkeypatch):
    card = Card(monkeypatch, cost=0.05)
    small = SimpleNamespace(multi_processor_count=46)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    assert {b.sms for b in card.measure(1.06)[1].values()} == {8, 16}


def test_a_budget_that_leaves_next_to_nothing_is_not_paced_for(monkeypatch):
    _, found = Card(monkeypatch, cost=1.5).measure(1.06)
    assert all(o.duty == 1 for o in found)


def test_training_within_the_budget_does_not_rest(monkeypatch):
    _, found = Card(monkeypatch, cost=0.05).measure(1.06)
    assert all(o.duty == 1 for o in found)


def test_steps_are_as_short_as_a_stop_asks(monkeypatch):
    card = Card(monkeypatch, cost=0.05)
    card.buffer.kept = ["a document of the step before"]
    _, found = card.measure(1.06)
    # Of 256 entries they take 10.5 ms on 8 multiprocessors, 5.5 on 16.
    assert {(b.sms, b.rows) for b in found.values()} == {(8, 128), (16, 256), (32, 256), (64, 256)}
    assert all(o.stop_s <= STOP_S for o in found)
    assert {(0, 8, 128), (32, 8, 128), (64, 16, 256)} <= set(card.captured)


def test_what_cannot_be_short_enough_is_not_tried_for_ever(monkeypatch):
    card = Card(monkeypatch, cost=0.05)
    monkeypatch.setattr(card, "step_s", lambda: 30e-3)
    serial_s, found = card.measure(1.06)
    assert all(b.rows == LEAST_ROWS for b in found.values()) and len(found) == len(SIZES)
    assert choose_overlap(list(found), 256 / serial_s, 1.06) is None


def test_a_partition_is_made_once_and_kept(monkeypatch):
    """Tensors that its stream used may be freed when every trainer of it is gone."""
    monkeypatch.setattr(partition, "Partition", lambda sms, device: [sms, device])
    partition.partition_of.cache_clear()
    card = torch.device("cuda", 0)
    first = partition.partition_of(8, card)
    assert partition.partition_of(8, torch.device("cuda", 0)) is first
    assert partition.partition_of(16, card) == [16, card]
    partition.partition_of.cache_clear()
