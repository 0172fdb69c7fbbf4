"""What the drafter's micro-steps report, read without waiting for the device."""

from __future__ import annotations

import warnings
from collections import deque

import torch
from torch import Tensor


class StepReports:
    """Reports of the steps in flight, and the last one that was read."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}  # under the names of the metrics file
        self._queued: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def note(self, report: Tensor) -> None:
        """Has the report of the step just queued copied to the host.

        Args:
            report: float32 [4]: loss, acceptance, top-1, whether the gradient was finite.
        """
        if report.is_cuda:
            copy = torch.empty(4, pin_memory=True)
            copy.copy_(report, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._queued.append((copy, event))
        else:
            self._queued.append((report.clone(), None))
            self.settle(0)

    def settle(self, most: int) -> None:
        """Waits until at most so many steps are in flight, and reads the reports of the others."""
        while len(self._queued) > most:
            report, event = self._queued.popleft()
            if event is not None:
                event.synchronize()
            loss, acceptance, top1, finite = report.tolist()
            if finite:
                self.last = {
                    "drafter/loss": loss,
                    "drafter/acceptance": acceptance,
                    "drafter/top1": top1,
                }
            else:
                warnings.warn("spot trainer: gradient is not finite: step skipped", stacklevel=2)
