"""A share of a GPU's multiprocessors for training beside the tail, and what it costs decoding.

A stream of low priority slows decoding to a multiple; a green context with a few multiprocessors
costs it some percent (`profiling/README.md`). How many it may have is measured where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from driver.draft_step import IN_FLIGHT

SIZES = (8, 16, 32)  # multiprocessors tried
STOP_S = 0.010  # a stop may take this long


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
