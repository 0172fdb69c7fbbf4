"""The data of a run folder for the report, and notes on what is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from ..common.errors import UserError
from ..config.strategy import Strategy

Record = dict[str, Any]
Point = tuple[float, float]

MAX_POINTS = 400  # of a curve
MAX_PASSES = 1500  # of a rollout's record


@dataclass
class RunData:
    """One run folder as read; `notes` name what is missing or damaged."""

    name: str
    path: Path
    records: list[Record] = field(default_factory=list)
    rollouts: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def series(self, metric: str) -> list[Point]:
        """(step, value) where the metric is a finite number, thinned to `MAX_POINTS` means."""
        return [point for line in self.lines(metric) for point in line]

    def lines(self, metric: str) -> list[list[Point]]:
        """The same in pieces: a step without a value ends one."""
        pieces: list[list[Point]] = [[]]
        for record in self.records:
            if is_number(record.get(metric)):
                pieces[-1].append((record["step"], record[metric]))
            elif pieces[-1]:
                pieces.append([])
        size = -(-sum(map(len, pieces)) // MAX_POINTS) or 1
        return [thin(piece, size) for piece in pieces if piece]

    def seconds(self) -> dict[float, float]:
        """Step -> seconds of the run up to its end, the warm-up included."""
        clock, total = {}, 0.0
        for record in self.records:
            seconds = record.get("timing_s/step")
            total += seconds if is_number(seconds) else 0.0
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
    """Reads a run folder as far as it goes.

    Args:
        path: `runs/<name>`.

    Returns:
        What is there.

    Raises:
        UserError: the folder holds no run at all.

    Example:
        >>> read_run(Path("runs/tiny")).name  # doctest: +SKIP
        'tiny'
    """
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        raise UserError(f"{path}: holds no run; name a folder with metrics.jsonl")
    run = RunData(path.resolve().name, path)
    run.records = _numbered(_lines(path / "metrics.jsonl", run.notes))
    rollouts = map(_rollout, _numbered(_lines(path / "rollouts.jsonl", run.notes)))
    run.rollouts = [rollout for rollout in rollouts if rollout is not None]
    run.samples = _numbered(_lines(path / "samples.jsonl", run.notes))
    run.config = _settings(path / "config.yaml", run.notes)
    run.summary = _summary(path / "summary.json", run.notes)
    if path.joinpath("metrics.jsonl").exists() and not run.steps():
        run.notes.append("metrics.jsonl: no finished training step yet")
    return run


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def thin(points: Sequence[Point], size: int) -> list[Point]:
    """A point for each `size` neighbours: the last step, the mean of the values."""
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(g[-1][0], sum(value for _, value in g) / len(g)) for g in groups]


def _lines(path: Path, notes: list[str]) -> list[Record]:
    """The objects of a JSONL file; lines that are none are counted in a note."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name}: {error.strerror or error}")
        return []
    records, bad = [], 0
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif line.strip():
            bad += 1
    if bad:
        notes.append(f"{path.name}: {bad} damaged or truncated line{'s' * (bad > 1)} left out")
    return records


def _numbered(records: list[Record]) -> list[Record]:
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


def _settings(path: Path, notes: list[str]) -> dict[str, Any]:
    """`section.key` -> value."""
    try:
        whole = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(whole, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name}: {getattr(error, 'strerror', None) or 'cannot be read'}")
        return {}
    flat: dict[str, Any] = {}
    for section, values in whole.items():
        if isinstance(values, dict):
            flat |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            flat[str(section)] = values
    return flat


def _summary(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(whole, dict):
            raise ValueError
    except FileNotFoundError:
        notes.append("summary.json: missing; the run is still running or was stopped")
        return {}
    except (OSError, ValueError):
        notes.append("summary.json: cannot be read")
        return {}
    return whole
