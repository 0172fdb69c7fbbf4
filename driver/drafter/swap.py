"""Hands new drafter weights from training to the engine."""

import threading
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..rollout.draft_runner import DraftRunner


class WeightSwap:
    """A copy of the trained weights, loaded into the runner between passes under a new version.

    The training thread publishes and the rollout swaps. `swap` takes the newest copy if it is
    complete and never waits.
    """

    def __init__(self, weights: Callable[[], Mapping[str, Tensor]], runner: DraftRunner) -> None:
        self.weights, self.runner = weights, runner
        # Weights, whether all are finite, and when both are complete. A copy stays until a newer
        # one replaces it, so older weights never follow newer ones.
        self._ready: tuple[dict[str, Tensor], Tensor, torch.cuda.Event | None] | None = None
        self._lock = threading.Lock()

    def publish(self) -> None:
        """Copies the weights as they are after the steps enqueued so far."""
        state = {name: value.clone() for name, value in self.weights().items()}
        finite = torch.stack([value.isfinite().all() for value in state.values()]).all()
        event = None
        if finite.is_cuda:
            finite = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, True)
            event = torch.cuda.current_stream().record_event()
        with self._lock:
            self._ready = (state, finite, event)

    def drop(self) -> None:
        """Discards the copy; call when the runner gets other weights."""
        with self._lock:
            self._ready = None

    def swap(self) -> None:
        """Loads the copy if it is complete; one with a non-finite number is rejected."""
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
