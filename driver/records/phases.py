"""The time of a step by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..common.spans import Spans
from .timeline import Timeline

# Phases of a step, by their names in the records; the rest is `other` and `unaccounted`.
PHASES = ("gen", "reward", "old_log_prob", "update_actor", "update_weights", "update_drafter")
# In a step's record, but not part of its training time.
OUTSIDE_STEP = ("load", "warmup", "eval", "checkpoint", "checkpoint_end", "plots")


class Phases:
    """Seconds by phase, of the current step and of the whole run; each is a span of `train`."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.timeline = Timeline(rank, ranks)
        self.started = self._step_started = time.perf_counter()
        self.total: dict[str, float] = defaultdict(float)
        self._earlier_s = 0.0  # wall time of the earlier processes of a resumed run
        self._step: dict[str, float] = defaultdict(float)
        self._spans = Spans("train", self.timeline.add)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with self._spans(name) as span:
            yield
        self.add(name, span.seconds)

    def add(self, name: str, seconds: float) -> None:
        self.total[name] += seconds
        self._step[name] += seconds

    def end_step(self, step: int) -> dict[str, float]:
        """`timing_s/<phase>` of the step that ends here, and `timing_s/step` itself."""
        now = time.perf_counter()
        out = {f"timing_s/{name}": seconds for name, seconds in self._step.items()}
        out["timing_s/step"] = now - self._step_started
        self._step.clear()
        self._step_started = now
        self.timeline.end_step(step)
        return out

    def state_dict(self) -> dict[str, Any]:
        """Seconds of the run so far, for a checkpoint."""
        return {"wall": self._wall(), "total": dict(self.total)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds the seconds of the run before it was resumed."""
        self._earlier_s += state["wall"]
        for name, seconds in state["total"].items():
            self.total[name] += seconds

    def _wall(self) -> float:
        return self._earlier_s + time.perf_counter() - self.started

    def summary(self) -> dict[str, float]:
        """Seconds by phase, the wall time, and the share of it that no phase covers."""
        wall = self._wall()
        covered = sum(self.total.values())
        return {**self.total, "wall": wall, "unaccounted_share": max(0.0, 1 - covered / wall)}


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step: each phase, other measured time, and unaccounted time."""

    phases: dict[str, float]
    other: float
    unaccounted: float

    @staticmethod
    def of(record: Mapping[str, Any]) -> StepTimes:
        """From a line of `metrics.jsonl`."""
        booked = {
            name.removeprefix("timing_s/"): value
            for name, value in record.items()
            if name.startswith("timing_s/") and value is not None
        }
        step = booked.pop("step") - sum(booked.pop(name, 0.0) for name in OUTSIDE_STEP)
        phases = {name: booked.pop(name, 0.0) for name in PHASES}
        other = sum(booked.values())
        return StepTimes(phases, other, step - other - sum(phases.values()))

    @property
    def total(self) -> float:
        return sum(self.phases.values()) + self.other + self.unaccounted
