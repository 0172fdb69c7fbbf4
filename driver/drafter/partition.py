"""Partitions of a GPU for training during the tail, and what they cost decoding.

A low-priority stream slows decoding several times. A green context with a few multiprocessors slows
it by some percent (`docs/notes/drafter.md`), almost independent of their number, since a kernel of
the tail ends with its slowest block. So the training budget is kept by the duty cycle (the share of
the time in which steps run), and the best number of multiprocessors is measured on the GPU itself
(`driver/drafter/overlap.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

STOP_S = 0.010  # longest acceptable stop
MARGIN = 0.85  # share of the budget to aim at, since the next measurement may be a little higher


@dataclass(frozen=True)
class Overlap:
    """Measured cost of training during decoding, with one placement."""

    sms: int  # multiprocessors
    slowdown: float  # time of a decode pass during training over that alone
    step_s: float  # seconds between two training steps, rests included
    tokens_per_ms: float  # tokens trained for each millisecond that the tail gets longer
    rows: int  # entries of a step
    duty: float = 1.0  # share of the time in which steps run

    @staticmethod
    def of(
        sms: int, alone_s: float, during_s: float, step_s: float, rows: int, duty: float = 1.0
    ) -> Overlap:
        """The cost by the times of a decode pass, alone and during training, and of a step."""
        slowdown = during_s / alone_s
        delay = max(slowdown - 1.0, 1e-3) / slowdown  # share of the tail
        return Overlap(sms, slowdown, step_s, rows / step_s / delay / 1e3, rows, duty)

    @property
    def tokens_per_s(self) -> float:
        return self.rows / self.step_s

    @property
    def stop_s(self) -> float:
        """Seconds that a stop takes: those of the step in flight, without the pause after it."""
        return self.step_s * self.duty

    def duty_within(self, budget: float) -> float:
        """The largest duty cycle that keeps to a slowdown."""
        return min(1.0, self.duty * MARGIN * (budget - 1.0) / max(self.slowdown - 1.0, 1e-6))


def choose_overlap(
    measured: Sequence[Overlap], serial_per_s: float, budget: float
) -> Overlap | None:
    """The fastest way to train during the tail, or None if training between passes is better.

    It keeps to the `budget`, a slowdown such as 1.06, stops within `STOP_S`, and trains more tokens
    per delay than steps on the whole GPU, `serial_per_s` tokens a second while the tail waits.
    """
    good = [
        o
        for o in measured
        if o.slowdown <= budget and o.stop_s <= STOP_S and o.tokens_per_ms > serial_per_s / 1e3
    ]
    return max(good, key=lambda o: o.tokens_per_s, default=None)


class Partition:
    """A CUDA green context: multiprocessors and a stream on them; RuntimeError without support."""

    def __init__(self, sms: int, device: torch.device) -> None:
        from torch.cuda import green_contexts  # needs a recent torch

        kind: Any = green_contexts.GreenContext
        self._context = kind.create(num_sms=sms, device_id=device.index or 0)
        self.sms, self.stream = sms, self._context.Stream()  # other streams are outside of it


@functools.cache
def partition_of(sms: int, device: torch.device) -> Partition:
    """The partition of a size, created once and never destroyed.

    When a tensor is freed, torch's allocator records an event on every stream that used it, which
    fails if the context of such a stream is gone.
    """
    return Partition(sms, device)


@dataclass(frozen=True)
class Placement:
    partition: Partition
    rows: int  # entries of a step
    duty: float = 1.0  # share of the time in which steps run
