"""`trace.json`: the events of a run, for chrome://tracing and ui.perfetto.dev."""

import functools
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..common.storage import write_text

MAX_BYTES = 20_000_000
TRACKS = ("train", "rollout", "drafter")  # in this order; others follow
STEP = "step"

_json = functools.lru_cache(maxsize=4096, typed=True)(json.dumps)


class Event(NamedTuple):
    """An event on a track; times are seconds since the timeline's start."""

    part: str
    name: str
    begin_s: float
    length_s: float
    args: dict[str, Any]


class Timeline:
    """Events of a run in Chrome's trace format, with a bounded file size that the ranks share.

    When the steps exceed the limit, every second one is dropped, and from then on only every second
    step is recorded, as `otherData` reports. A step by itself may exceed it.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, max_bytes: int = MAX_BYTES) -> None:
        self.rank, self.max_bytes = rank, max_bytes // ranks
        self.started, self.started_unix_s = time.perf_counter(), time.time()
        self.every = 1  # distance between kept steps
        self._events: list[Event] = []  # of the current step; other threads append
        self._steps: list[tuple[int, str]] = []  # (step, its events as JSON)
        self._size = 0
        self._tracks = {part: tid for tid, part in enumerate(TRACKS)}

    def align(self, unix_s: float) -> None:
        """Uses the time origin of another rank, its `started_unix_s`; earlier events stay."""
        self.started += unix_s - self.started_unix_s
        self.started_unix_s = unix_s

    def add(self, part: str, name: str, begin: float, end: float, **args: object) -> None:
        """Adds an event of the current step, timed by `time.perf_counter`; for any thread."""
        self._events.append(Event(part, name, begin - self.started, end - begin, args))

    def end_step(self, step: int) -> None:
        """Ends the step with this number; later events belong to the next one."""
        events, self._events = self._events, []
        if step % self.every or not events:
            return
        begin = min(event.begin_s for event in events)
        length = max(event.begin_s + event.length_s for event in events) - begin
        whole = Event("train", f"{STEP} {step}", begin, length, {STEP: step})
        text = self._to_text([whole, *events])
        self._steps.append((step, text))
        self._size += len(text)
        while self._size > 0.98 * self.max_bytes and len(self._steps) > 1:
            self.every *= 2
            self._steps = [kept for kept in self._steps if kept[0] % self.every == 0]
            self._size = sum(len(text) for _, text in self._steps)

    def text(self) -> str:
        """This rank's part of the file: its events, and the names of its tracks."""
        names = [self._name("process_name", 0, f"rank {self.rank}")]
        names += [self._name("thread_name", tid, part) for part, tid in self._tracks.items()]
        return ",\n".join([*map(json.dumps, names), *(text for _, text in self._steps)])

    def write(self, path: Path, others: Sequence[str] = ()) -> None:
        """Replaces `trace.json`; `others` are the `text()` of the other ranks."""
        other = json.dumps({"every": self.every})
        body = ",\n".join([self.text(), *others])
        write_text(path, f'{{"otherData": {other}, "traceEvents": [\n{body}\n]}}\n')

    def _to_text(self, events: Iterable[Event]) -> str:
        """The events as JSON, formatted by hand: a step has thousands of events of a few names."""
        lines = []
        for part, name, begin, length, args in events:
            shown = ",".join(f"{_json(key)}:{_json(value)}" for key, value in args.items())
            tid = self._tracks.setdefault(part, len(self._tracks))
            lines.append(
                f'{{"name":{_json(name)},"cat":{_json(part)},"ph":"X","pid":{self.rank},'
                f'"tid":{tid},"ts":{1e6 * begin:.1f},"dur":{1e6 * length:.1f},'
                f'"args":{{{shown}}}}}'
            )
        return ",\n".join(lines)

    def _name(self, kind: str, tid: int, name: str) -> dict[str, Any]:
        args = {"name": name}
        return {"name": kind, "ph": "M", "pid": self.rank, "tid": tid, "args": args}
