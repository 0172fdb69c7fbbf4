"""The data of a run folder for the report, and notes on what is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from ..common.errors import UserError
from ..config.strategy import Strategy

Record = dict[str, Any]


@dataclass
class RunData:
    """One run folder as read; `notes` name what is missing or damaged."""

    name: str
    path: Path
    records: list[Record] = field(default_factory=list)  # finite numbers or None
    rollouts: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def series(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) where the metric has a value."""
        values = [(record["step"], record.get(metric)) for record in self.records]
        return [(step, value) for step, value in values if value is not None]

    def seconds(self) -> dict[float, float]:
        """Step -> seconds of the run up to its end, the warm-up included."""
        clock, total = {}, 0.0
        for record in self.records:
            total += record.get("timing_s/step") or 0.0
            clock[record["step"]] = total
        return clock

    @property
    def finished(self) -> bool:
        """Whether the run made all of its steps and wrote its summary."""
        wanted = self.config.get("run.steps")
        done = self.records[-1]["step"] if self.records else 0
        return bool(self.summary) and (not is_number(wanted) or done >= wanted)

    def steps(self) -> list[Record]:
        """The records of training steps."""
        return [record for record in self.records if record["step"] > 0]


def read_run(path: Path) -> RunData:
    """Reads as much of a run folder as is there.

    Args:
        path: `runs/<name>`.

    Raises:
        UserError: the folder contains no run at all.
    """
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        raise UserError(f"{path}: contains no run; name a folder with metrics.jsonl")
    run = RunData(path.resolve().name, path)
    metrics = _lines(path / "metrics.jsonl", run.notes)
    run.records = [{k: v if is_number(v) else None for k, v in r.items()} for r in metrics]
    rollouts = map(_rollout, _lines(path / "rollouts.jsonl", run.notes))
    run.rollouts = [rollout for rollout in rollouts if rollout is not None]
    run.samples = _lines(path / "samples.jsonl", run.notes)
    for section, values in _mapping(path / "config.yaml", yaml.safe_load, run.notes).items():
        inner = values if isinstance(values, dict) else {"": values}
        run.config |= {f"{section}.{key}".rstrip("."): value for key, value in inner.items()}
    if (path / "summary.json").exists():
        run.summary = _mapping(path / "summary.json", json.loads, run.notes)
    else:
        run.notes.append("summary.json: missing; the run is still running or was stopped")
    if path.joinpath("metrics.jsonl").exists() and not run.steps():
        run.notes.append("metrics.jsonl: no finished training step yet")
    return run


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _lines(path: Path, notes: list[str]) -> list[Record]:
    """The objects with a step in a JSONL file; lines that are no objects are counted in a note."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name}: {error.strerror or error}")
        return []
    records, bad = [], 0
    for line in filter(str.strip, text.splitlines()):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            bad += 1
    if bad:
        notes.append(f"{path.name}: {bad} damaged or truncated line{'s' * (bad > 1)} left out")
    return [record for record in records if is_number(record.get("step"))]


def _rollout(record: Record) -> Record | None:
    """A record of a rollout, if it has the form that `RunFolder.log_rollout` gives it."""
    try:
        lengths = [float(length) for length in record["lengths"]]
        active = [
            (float(at), float(count), str(Strategy.parse(name)))
            for at, count, name in record["active"]
        ]
    except (LookupError, TypeError, ValueError, AttributeError, UserError):
        return None
    return {"step": record["step"], "lengths": lengths, "active": active}


def _mapping(path: Path, parse: Callable[[str], Any], notes: list[str]) -> dict[str, Any]:
    """The mapping in a file; if there is none, {} and a note."""
    try:
        whole = parse(path.read_text(encoding="utf-8"))
        if isinstance(whole, dict):
            return whole
        reason = "cannot be read"
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "cannot be read"
    notes.append(f"{path.name}: {reason}")
    return {}
