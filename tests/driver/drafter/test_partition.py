"""How training during the tail is placed: the choice, its measurement, and the partition."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from driver.config.sections import SpotConfig
from driver.drafter import overlap as overlap_module
from driver.drafter import partition
from driver.drafter.overlap import LEAST_ROWS, SIZES, OverlapTuner
from driver.drafter.partition import MARGIN, STOP_S, Overlap, Placement, choose_overlap

ALONE = 1e-3
SERIAL = 512 / 1e-3  # tokens a second between passes


def measured(*rows: tuple[int, float, float]) -> list[Overlap]:
    return [Overlap.of(sms, ALONE, ALONE * x, step_s, 512) for sms, x, step_s in rows]


def test_tokens_are_counted_per_delay_of_the_tail():
    overlap = Overlap.of(8, ALONE, 1.05 * ALONE, 5e-3, 500)
    assert overlap.slowdown == pytest.approx(1.05)
    # In 105 ms the tail is 5 ms longer, and 21 steps of 500 tokens are made.
    assert overlap.tokens_per_ms == pytest.approx(21 * 500 / 5)
    free = Overlap.of(8, ALONE, 0.99 * ALONE, 5e-3, 500)  # faster, by noise
    assert 0 < free.tokens_per_ms < float("inf")


def test_the_fastest_within_the_budget_is_chosen():
    rows = measured((8, 1.03, 4e-3), (16, 1.05, 2.5e-3), (32, 1.2, 1e-3))
    assert choose_overlap(rows, SERIAL, budget=1.06).sms == 16
    assert choose_overlap(rows, SERIAL, budget=1.04).sms == 8
    assert choose_overlap(rows, SERIAL, budget=1.25).sms == 32
    # Short steps are done sooner; tokens per second decide.
    short = Overlap.of(64, ALONE, 1.05 * ALONE, 1e-3, 64)
    assert choose_overlap([*rows, short], SERIAL, budget=1.06).sms == 16


def test_serial_stays_where_overlapping_is_worse_or_stops_too_late():
    assert choose_overlap([], SERIAL, 1.06) is None
    slow = measured((8, 1.05, 1.01 * STOP_S))
    assert choose_overlap(slow, SERIAL / 10, 1.06) is None
    # A rest ends at once, so only the step counts.
    rested = Overlap.of(8, ALONE, 1.05 * ALONE, 1.01 * STOP_S, 512, duty=0.9)
    assert choose_overlap([rested], SERIAL / 10, 1.06) is rested
    # 1.05 of 4 ms steps delays a step by 0.2 ms: serial steps must cost more than that.
    row = measured((8, 1.05, 4e-3))
    assert choose_overlap(row, 512 / 0.15e-3, 1.06) is None
    assert choose_overlap(row, 512 / 0.25e-3, 1.06) is not None


class Card:
    """A stand-in for trainer, decoding and clock: decoding is slower by `cost` during steps.

    A step takes 20 ms of one multiprocessor for 64 entries, plus half a millisecond.
    """

    def __init__(self, monkeypatch, cost: float, tokens: int = 256, **config) -> None:
        self.cost, self.now, self.steps, self.running = cost, 0.0, 0, False
        self.config = SpotConfig(**{"mode": "auto", "slowdown": 1.06, **config})
        self.tokens_seen, self.payoff = 0, SimpleNamespace(delay_s=0.0)
        self.bin = SimpleNamespace(tokens=tokens, fixed=True)
        self.buffer = SimpleNamespace(kept=[], num_tokens=100)
        self.reports = SimpleNamespace(read=lambda most: None)
        self.step = SimpleNamespace(frozen=contextlib.nullcontext, capture=self.capture)
        self.target = SimpleNamespace(device=torch.device("cuda", 0))
        self.placement: Placement | None = None
        self.overlap: Overlap | None = None
        self.captured: list[tuple[int, int, int]] = []
        self._made = 0.0
        monkeypatch.setattr(
            overlap_module, "partition_of", lambda sms, device: SimpleNamespace(sms=sms)
        )
        card = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
        monkeypatch.setattr(overlap_module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def step_s(self) -> float:
        where = self.placement
        sms, rows = (132, self.bin.tokens) if where is None else (where.partition.sms, where.rows)
        return 0.5e-3 + 20e-3 * rows / 64 / sms

    def attempt(self) -> bool:
        self.now += self.step_s()
        self.steps += 1
        self.payoff.delay_s += self.step_s()
        return True

    def capture(self, split: int, placement: Placement) -> None:
        self.captured.append((split, placement.partition.sms, placement.rows))

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
        if self.running:
            self.steps = int(self._made)
        return pass_s

    def measure(self, budget: float) -> tuple[float, dict[Overlap, Placement]]:
        tuner = OverlapTuner(self, self.decode)
        tuner.measure(budget)
        return tuner.serial_step_s, tuner.measured


def test_training_rests_to_keep_the_budget(monkeypatch):
    """Decoding slows as much on few multiprocessors as on many: use more of them, less often."""
    card = Card(monkeypatch, cost=0.08)
    serial_s, found = card.measure(1.06)
    assert serial_s == pytest.approx(0.5e-3 + 80e-3 / 132)
    full = [o for o in found if o.duty == 1]
    assert [o.sms for o in full] == list(SIZES)
    assert all(o.slowdown == pytest.approx(1.08) for o in full)
    best = choose_overlap(list(found), 256 / serial_s, 1.06)
    assert best.sms == 64 and best.duty == pytest.approx(MARGIN * 6 / 8)
    assert best.slowdown == pytest.approx(1 + MARGIN * 0.06) and found[best].duty == best.duty
    # The tokens trained per delay do not change.
    (unpaced,) = (o for o in full if o.sms == 64)
    assert best.tokens_per_ms == pytest.approx(unpaced.tokens_per_ms, rel=0.1)
    assert best.stop_s == pytest.approx(card.step_s(), rel=0.1)


def test_at_most_half_of_a_small_card_is_used(monkeypatch):
    card = Card(monkeypatch, cost=0.05)
    small = SimpleNamespace(multi_processor_count=46)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    assert {p.partition.sms for p in card.measure(1.06)[1].values()} == {8, 16}


def test_a_budget_that_leaves_almost_no_duty_cycle_is_not_tried(monkeypatch):
    _, found = Card(monkeypatch, cost=1.5).measure(1.06)
    assert all(o.duty == 1 for o in found)


def test_training_within_the_budget_does_not_rest(monkeypatch):
    _, found = Card(monkeypatch, cost=0.05).measure(1.06)
    assert all(o.duty == 1 for o in found)


def test_steps_are_short_enough_for_a_stop(monkeypatch):
    card = Card(monkeypatch, cost=0.05)
    card.buffer.kept = ["a document of the previous step"]
    _, found = card.measure(1.06)
    # Steps of 256 entries take 10.5 ms on 8 multiprocessors, 5.5 on 16.
    sizes = {(p.partition.sms, p.rows) for p in found.values()}
    assert sizes == {(8, 128), (16, 256), (32, 256), (64, 256)}
    assert all(o.stop_s <= STOP_S for o in found)
    assert {(0, 8, 128), (32, 8, 128), (64, 16, 256)} <= set(card.captured)


def test_steps_that_cannot_be_short_enough_end_the_search(monkeypatch):
    card = Card(monkeypatch, cost=0.05)
    monkeypatch.setattr(card, "step_s", lambda: 30e-3)
    serial_s, found = card.measure(1.06)
    assert all(p.rows == LEAST_ROWS for p in found.values()) and len(found) == len(SIZES)
    assert choose_overlap(list(found), 256 / serial_s, 1.06) is None


# ---- the tuner ----------------------------------------------------------------------------------


def test_the_tuner_sets_the_placement_once_and_restores_the_counters(monkeypatch):
    card = Card(monkeypatch, cost=0.05)
    card.steps, card.tokens_seen, card.payoff.delay_s = 7, 700, 0.25
    tuner = OverlapTuner(card, card.decode)
    tuner.tune()
    assert card.overlap in tuner.measured and card.placement is tuner.measured[card.overlap]
    assert (card.steps, card.tokens_seen, card.payoff.delay_s) == (7, 700, 0.25)
    card.placement = card.overlap = None
    tuner.tune()
    assert card.placement is None and card.overlap is None


@pytest.mark.parametrize("missing", ["documents", "graphs"])
def test_the_tuner_waits_for_documents_and_graphs(monkeypatch, missing):
    card = Card(monkeypatch, cost=0.05)
    tuner = OverlapTuner(card, card.decode)
    if missing == "documents":
        card.buffer.num_tokens = 0
    else:
        tuner.decode = lambda: None
    tuner.tune()
    assert not tuner.measured and card.placement is None
    card.buffer.num_tokens, tuner.decode = 100, card.decode
    tuner.tune()
    assert tuner.measured and card.placement is not None


@pytest.mark.parametrize(("mode", "fixed"), [("serial", True), ("off", True), ("auto", False)])
def test_the_tuner_leaves_other_modes_and_the_cpu_alone(monkeypatch, mode, fixed):
    card = Card(monkeypatch, cost=0.05, mode=mode)
    card.bin.fixed = fixed
    tuner = OverlapTuner(card, card.decode)
    tuner.tune()
    assert not tuner.measured and card.now == 0.0


@pytest.mark.parametrize("mode", ["auto", "overlapped"])
def test_only_mode_overlapped_exceeds_the_budget(monkeypatch, mode):
    card = Card(monkeypatch, cost=1.5, mode=mode)
    tuner = OverlapTuner(card, card.decode)
    if mode == "auto":
        tuner.tune()
        assert card.placement is None and card.overlap is None
    else:
        with pytest.warns(UserWarning, match="no partition keeps to spot.slowdown=1.06"):
            tuner.tune()
        assert card.overlap.slowdown == min(o.slowdown for o in tuner.measured)
        assert card.placement is tuner.measured[card.overlap]


def test_without_partitions_it_trains_between_passes(monkeypatch):
    card = Card(monkeypatch, cost=0.05)

    def unsupported(sms, device):
        raise RuntimeError("no green contexts")

    monkeypatch.setattr(overlap_module, "partition_of", unsupported)
    tuner = OverlapTuner(card, card.decode)
    card.steps = 3
    with pytest.warns(UserWarning, match="no partition of the GPU .RuntimeError: no green"):
        tuner.tune()
    assert card.placement is None and card.steps == 3 and not tuner.measured


def test_a_partition_is_created_once_and_kept(monkeypatch):
    """Tensors that its stream used may be freed after every trainer of it is gone."""
    monkeypatch.setattr(partition, "Partition", lambda sms, device: [sms, device])
    partition.partition_of.cache_clear()
    card = torch.device("cuda", 0)
    first = partition.partition_of(8, card)
    assert partition.partition_of(8, torch.device("cuda", 0)) is first
    assert partition.partition_of(16, card) == [16, card]
    partition.partition_of.cache_clear()
