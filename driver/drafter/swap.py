"""New weights of the drafter on their way to the engine."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..rollout.draft_runner import DraftRunner


class ReadyWeights:
    """A copy of what was learned, handed to the runner under a new version, between passes only.

    The training thread publishes, the rollout swaps: it takes the newest if that is complete by
    then, and waits for nothing.

    Args:
        weights: gives a drafter's state as it is by now.
        runner: what drafts.
    """

    def __init__(self, weights: Callable[[], Mapping[str, Tensor]], runner: DraftRunner) -> None:
        self.weights, self.runner = weights, runner
        # Weights, whether all are finite, when both are there. What is not taken stays until
        # something newer takes its place: older weights never follow newer ones.
        self._ready: tuple[dict[str, Tensor], Tensor, torch.cuda.Event | None] | None = None
        self._lock = threading.Lock()

    def publish(self) -> None:
        """Copies the weights as they are after what was queued so far."""
        state = {name: value.clone() for name, value in self.weights().items()}
        finite = torch.stack([value.isfinite().all() for value in state.values()]).all()
        event = None
        if finite.is_cuda:
            finite = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, True)
            event = torch.cuda.Event()
            event.record()
        with self._lock:
            self._ready = (state, finite, event)

    def drop(self) -> None:
        """Forgets what is ready: the runner got other weights meanwhile."""
        with self._lock:
            self._ready = None

    def swap(self) -> None:
        """Loads what is ready, unless a number in it is not finite."""
        with self._lock:
            if self._ready is None:
                return
            state, finite, event = self._ready
            if event is not None and not event.query():
                return
            self._ready = None
        if not finite:
            warnings.warn("spot trainer: weights are not finite: not swapped in", stacklevel=3)
            return
        self.runner.load(state, self.runner.version + 1)
        for value in state.values():
            if value.is_cuda:
                value.record_stream(torch.cuda.current_stream())
