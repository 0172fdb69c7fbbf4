"""Named spans of time: NVTX ranges for Nsight, and events of the run's timeline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

try:
    import nvtx
except ImportError:  # Nsight then sees the ranges of the native core only
    nvtx = None


# Stores a finished span, by part, name, begin and end; `driver.records.timeline.Timeline.add`.
Sink = Callable[..., None]


class Spans:
    """Spans of one part, each an NVTX range `tlt/<part>/<step>`; `sink` gets their times, too."""

    def __init__(self, part: str, sink: Sink | None = None) -> None:
        self.part, self.sink = part, sink

    def __call__(self, step: str, **args: object) -> Span:
        """A context manager around one step; the timeline shows `args` with its event."""
        return Span(self, step, args)


class Span:
    """One step while it runs; afterwards `seconds` is its length."""

    __slots__ = ("_spans", "_step", "_args", "_range", "_begin", "seconds")

    def __init__(self, spans: Spans, step: str, args: dict[str, object]) -> None:
        self._spans, self._step, self._args = spans, step, args
        self.seconds = 0.0

    def __enter__(self) -> Span:
        name = f"tlt/{self._spans.part}/{self._step}"
        self._range = contextlib.nullcontext() if nvtx is None else nvtx.annotate(name)
        self._range.__enter__()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        end = time.perf_counter()
        self._range.__exit__(*error)
        self.seconds = end - self._begin
        if self._spans.sink is not None:
            self._spans.sink(self._spans.part, self._step, self._begin, end, **self._args)
