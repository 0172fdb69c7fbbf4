"""A share of a GPU's multiprocessors for training beside the tail, and what it costs decoding.

A stream of low priority slows decoding to a multiple; a green context with a few multiprocessors
costs it some percent (`profiling/README.md`). How many it may have is measured where it runs.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from driver.draft_step import IN_FLIGHT

if TYPE_CHECKING:
    from driver.spot_trainer import SpotTrainer

SIZES = (8, 16, 32)  # multiprocessors tried
STOP_S = 0.010  # a stop may take this long
TRIALS = 4  # steps and stretches of passes that are timed


@dataclass(frozen=True)
class Overlap:
    """What was measured of one partition.

    Attributes:
        sms: multiprocessors.
        slowdown: time of a decode pass beside training over that alone.
        step_s: seconds from one training step to the next, beside decoding.
        tokens_per_ms: tokens trained for each millisecond that the tail gets longer.
    """

    sms: int
    slowdown: float
    step_s: float
    tokens_per_ms: float

    @staticmethod
    def of(sms: int, alone_s: float, beside_s: float, step_s: float, tokens: int) -> Overlap:
        """From the times of a decode pass alone and beside training, and of a training step."""
        slowdown = beside_s / alone_s
        longer = max(slowdown - 1.0, 1e-3) / slowdown  # share of the tail that is delay
        return Overlap(sms, slowdown, step_s, tokens / step_s / longer / 1e3)


def choose_overlap(
    measured: Sequence[Overlap], serial_step_s: float, tokens: int, budget: float
) -> Overlap | None:
    """The partition to train on, or None where training between passes is better.

    Args:
        measured: one of each size.
        serial_step_s: a step on the whole card, all of which the tail gets longer by.
        tokens: of a step.
        budget: slowdown allowed, for example 1.06.

    Returns:
        Of those within the budget that stop in time and train more for the delay than serial steps
        do, the one that trains fastest.

    Example:
        >>> choose_overlap([Overlap.of(8, 1e-3, 1.05e-3, 4e-3, 256)], 1e-3, 256, 1.06).sms
        8
    """
    serial = tokens / serial_step_s / 1e3
    good = [
        o
        for o in measured
        if o.slowdown <= budget and IN_FLIGHT * o.step_s <= STOP_S and o.tokens_per_ms > serial
    ]
    return min(good, key=lambda o: o.step_s, default=None)


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


def measure_overlaps(
    spot: SpotTrainer, decode: Callable[[], float | None], alone_s: float
) -> tuple[float, dict[Overlap, Partition]]:
    """Trains beside decoding in partitions of each size, by steps that count.

    Args:
        spot: the trainer, with documents; no request may run.
        decode: makes plain passes; seconds of one.
        alone_s: of one with nothing beside.

    Returns:
        Seconds of a step on the whole card, and the partitions by what was measured of them.

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
    found: dict[Overlap, Partition] = {}
    for sms in SIZES:
        spot.partition = partition_of(sms, spot.target.device)
        spot.capture(0, spot.partition)
        spot.start()
        decode()  # until the queue is filled
        done, begin, passes = spot.steps, time.perf_counter(), []
        while len(passes) < TRIALS or spot.steps < done + TRIALS:
            passes.append(decode() or alone_s)
            if not spot.running:
                raise RuntimeError("training ended while it was measured")
        step_s = (time.perf_counter() - begin) / (spot.steps - done)
        spot.stop()
        beside_s = statistics.median(passes)
        found[Overlap.of(sms, alone_s, beside_s, step_s, spot.bin.tokens)] = spot.partition
    return serial_s, found
