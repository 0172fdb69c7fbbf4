"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import nvtx


class Phases:
    """Seconds by phase, of the current step and of the whole run; each phase is an NVTX range.

    Example:
        >>> phases = Phases()
        >>> with phases("gen"):
        ...     pass
        >>> list(phases.end_step())
        ['timing_s/gen', 'timing_s/step']
    """

    def __init__(self) -> None:
        self.started = self._step_started = time.perf_counter()
        self.total: dict[str, float] = defaultdict(float)
        self._step: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        with nvtx.annotate(f"tlt/train/{name}"):
            yield
        self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        """Books time measured elsewhere."""
        self.total[name] += seconds
        self._step[name] += seconds

    def end_step(self) -> dict[str, float]:
        """`timing_s/<phase>` of the step that ends here, and `timing_s/step` itself."""
        now = time.perf_counter()
        out = {f"timing_s/{name}": seconds for name, seconds in self._step.items()}
        out["timing_s/step"] = now - self._step_started
        self._step.clear()
        self._step_started = now
        return out

    def summary(self) -> dict[str, float]:
        """Seconds by phase, the wall time, and the share of it that no phase covers."""
        wall = time.perf_counter() - self.started
        covered = sum(self.total.values())
        return {**self.total, "wall": wall, "unaccounted_share": max(0.0, 1 - covered / wall)}
