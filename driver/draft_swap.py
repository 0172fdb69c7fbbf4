"""New weights of the drafter on their way to the engine."""

from __future__ import annotations

import warnings
from collections import deque

import torch
from torch import Tensor

from driver.drafter import Drafter
from driver.rollout.draft_runner import DraftRunner


class ReadyWeights:
    """A copy of what is trained, handed to the runner under a new version, between passes only.

    The training thread publishes, the rollout swaps: it takes what is complete by then and waits
    for nothing.

    Args:
        drafter: what is trained.
        runner: its twin at inference.
    """

    def __init__(self, drafter: Drafter, runner: DraftRunner) -> None:
        self.drafter, self.runner = drafter, runner
        # Weights, whether all are finite, when both are there. One thread appends, another pops:
        # both are atomic.
        self._ready: deque[tuple[dict[str, Tensor], Tensor, torch.cuda.Event | None]] = deque(
            maxlen=1
        )

    def publish(self) -> None:
        """Copies the weights as they are after what was queued so far."""
        state = {name: value.clone() for name, value in self.drafter.state_dict().items()}
        finite = torch.stack([value.isfinite().all() for value in state.values()]).all()
        event = None
        if finite.is_cuda:
            finite = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, True)
            event = torch.cuda.Event()
            event.record()
        self._ready.append((state, finite, event))

    def swap(self) -> None:
        """Loads what is ready, unless a number in it is not finite."""
        if not self._ready:
            return
        state, finite, event = self._ready.pop()
        if event is not None and not event.query():
            if not self._ready:  # nothing newer came meanwhile
                self._ready.append((state, finite, event))
            return
        if not finite:
            warnings.warn("spot trainer: weights are not finite: not swapped in", stacklevel=3)
            return
        self.runner.load(state, self.runner.version + 1)
        for value in state.values():
            if value.is_cuda:
                value.record_stream(torch.cuda.current_stream())
