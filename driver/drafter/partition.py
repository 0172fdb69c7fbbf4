"""A share of a GPU's multiprocessors for training beside the tail, and what it costs decoding.

A stream of low priority slows decoding to a multiple; a green context with a few multiprocessors
costs it some percent (`docs/notes/drafter.md`), nearly as much with few of them as with many: a
kernel of the tail ends with its slowest block, on however many multiprocessors blocks are slow. So
what keeps training to its budget is the share of the time that it runs, and on how many
multiprocessors it then trains most is measured where it runs.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .trainer import SpotTrainer

SIZES = (8, 16, 32, 64)  # multiprocessors tried
STOP_S = 0.010  # a stop may take this long
TRIALS = 4  # steps and stretches of passes that are timed
LEAST_ROWS = 32  # of a step: fewer entries have too little of their document before them
MARGIN = 0.85  # share of the budget aimed at: what is measured next may be a little more
PACES = 3  # shares of the time tried
LEAST_DUTY = 0.05  # share of the time below which nothing worth while is trained


@dataclass(frozen=True)
class Overlap:
    """What was measured of training beside the tail in one way.

    Attributes:
        sms: multiprocessors.
        slowdown: time of a decode pass beside training over that alone.
        step_s: seconds from one training step to the next, beside decoding, rests and all.
        tokens_per_ms: tokens trained for each millisecond that the tail gets longer.
        rows: entries of a step.
        duty: share of the time that steps are made in.
    """

    sms: int
    slowdown: float
    step_s: float
    tokens_per_ms: float
    rows: int
    duty: float = 1.0

    @staticmethod
    def of(
        sms: int, alone_s: float, beside_s: float, step_s: float, rows: int, duty: float = 1.0
    ) -> Overlap:
        """From the times of a decode pass alone and beside training, and of a training step."""
        slowdown = beside_s / alone_s
        longer = max(slowdown - 1.0, 1e-3) / slowdown  # share of the tail that is delay
        return Overlap(sms, slowdown, step_s, rows / step_s / longer / 1e3, rows, duty)

    @property
    def tokens_per_s(self) -> float:
        return self.rows / self.step_s

    @property
    def stop_s(self) -> float:
        """What a stop waits for: the step that is in flight, without the rest behind it."""
        return self.step_s * self.duty

    def within(self, budget: float) -> float:
        """The share of the time in which it would keep to a slowdown."""
        return min(1.0, self.duty * MARGIN * (budget - 1.0) / max(self.slowdown - 1.0, 1e-6))


def choose_overlap(
    measured: Sequence[Overlap], serial_per_s: float, budget: float
) -> Overlap | None:
    """The way to train beside the tail, or None where training between passes is better.

    Args:
        measured: what was tried.
        serial_per_s: tokens a second of steps on the whole card, for all of whose time the tail
            waits.
        budget: slowdown allowed, for example 1.06.

    Returns:
        Of those within the budget that stop in time and train more for the delay than serial steps
        do, the one that trains fastest.

    Example:
        >>> choose_overlap([Overlap.of(8, 1e-3, 1.05e-3, 4e-3, 256)], 256e3, 1.06).sms
        8
    """
    good = [
        o
        for o in measured
        if o.slowdown <= budget and o.stop_s <= STOP_S and o.tokens_per_ms > serial_per_s / 1e3
    ]
    return max(good, key=lambda o: o.tokens_per_s, default=None)


class Partition:
    """Multiprocessors set apart, with a stream that runs on them only.

    Args:
        sms: how many; the driver may round up.
        device: the card.

    Raises:
        RuntimeError: torch or the driver has no green contexts.

    Source: CUDA green contexts.
    """

    def __init__(self, sms: int, device: torch.device) -> None:
        from torch.cuda.green_contexts import GreenContext  # asks for a recent torch

        self.sms, self.device = sms, device
        self._context = GreenContext.create(num_sms=sms, device_id=device.index or 0)
        self.stream = self._context.Stream()  # others would not be in the context


@functools.cache
def partition_of(sms: int, device: torch.device) -> Partition:
    """The partition of a size, made once and never given back.

    Torch's allocator records an event on every stream that used a tensor when the tensor is freed;
    were the context gone by then, that would fail in whatever freed it.

    Args:
        sms, device: as of `Partition`.
    """
    return Partition(sms, device)


@dataclass(frozen=True)
class Beside:
    """How steps are made beside the tail.

    Attributes:
        partition: where.
        rows: entries of a step.
        duty: share of the time that steps are made in.
    """

    partition: Partition
    rows: int
    duty: float = 1.0

    @property
    def sms(self) -> int:
        return self.partition.sms

    @property
    def stream(self) -> torch.cuda.Stream:
        return self.partition.stream


def sizes_of(device: torch.device) -> list[int]:
    """The sizes worth trying on a card: what is left to the tail alone is at least as much."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return [sms for sms in SIZES if 2 * sms <= count]


def measure_overlaps(
    spot: SpotTrainer, decode: Callable[[], float | None], budget: float
) -> tuple[float, dict[Overlap, Beside]]:
    """Times steps of training beside decoding, in partitions of each size.

    Each size has steps as long as a stop allows. The one that would train most within the budget is
    then held to it by rests between its steps, and measured again.

    Args:
        spot: the trainer, with documents; no request may run.
        decode: makes plain passes; seconds of one.
        budget: slowdown allowed.

    Returns:
        Seconds of a step on the whole card, and what was measured of each way.

    Raises:
        RuntimeError: there are no partitions here, or training failed.
    """
    spot.attempt()  # makes the graph
    spot.reports.settle(0)
    begin = time.perf_counter()
    for _ in range(TRIALS):
        spot.attempt()
    spot.reports.settle(0)
    serial_s = (time.perf_counter() - begin) / TRIALS
    found: dict[Overlap, Beside] = {}
    for sms in sizes_of(spot.target.device):
        beside = Beside(partition_of(sms, spot.target.device), spot.bin.tokens)
        overlap = _measure(spot, decode, beside)
        while overlap.stop_s > STOP_S and beside.rows >= 2 * LEAST_ROWS:
            beside = Beside(beside.partition, beside.rows // 2)
            overlap = _measure(spot, decode, beside)
        found[overlap] = beside
    in_time = [o for o in found if o.stop_s <= STOP_S] or list(found)
    best = max(in_time, key=lambda o: o.tokens_per_s * o.within(budget) / o.duty)
    for _ in range(PACES):
        duty = best.within(budget)
        if best.slowdown <= budget or duty < LEAST_DUTY:
            break
        beside = Beside(found[best].partition, best.rows, duty)
        best = _measure(spot, decode, beside)
        found[best] = beside
    return serial_s, found


def _measure(spot: SpotTrainer, decode: Callable[[], float | None], beside: Beside) -> Overlap:
    """Decoding alone, then beside steps made in this way."""
    spot.beside = beside
    for split in (0, spot.share(beside.rows)) if spot.buffer.kept else (0,):
        spot.capture(split, beside)
    decode()  # as warm as the others
    alone_s = statistics.median(decode() or 0.0 for _ in range(TRIALS))
    spot.start()
    passes = [decode() or alone_s]
    done, begin = spot.steps, time.perf_counter()
    while len(passes) <= TRIALS or spot.steps < done + TRIALS:
        passes.append(decode() or alone_s)
        if not spot.running:
            raise RuntimeError("training ended while it was measured")
    step_s = (time.perf_counter() - begin) / (spot.steps - done)
    spot.stop()
    # The first stretch may have begun before a step did.
    beside_s = statistics.median(passes[1:])
    return Overlap.of(beside.sms, alone_s, beside_s, step_s, beside.rows, beside.duty)
