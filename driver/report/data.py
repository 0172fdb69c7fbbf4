"""The data of a run folder for the report."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from ..common.errors import UserError, library_errors
from ..records.folder import read_jsonl

Record = dict[str, Any]


@dataclass
class RunData:
    name: str
    path: Path
    records: list[Record] = field(default_factory=list)  # finite numbers or None
    rollouts: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

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

    def steps(self) -> list[Record]:
        return [record for record in self.records if record["step"] > 0]


def read_run(path: Path) -> RunData:
    """Reads `runs/<name>`, also while it goes on; UserError without a run or for damaged files."""
    settings = path / "config.yaml"
    if not settings.exists():
        raise UserError(f"{path}: contains no run; name a folder with config.yaml")
    with library_errors(settings):
        sections = yaml.safe_load(settings.read_text("utf-8"))
    if not isinstance(sections, dict):
        raise UserError(f"{settings}: must contain the sections of a run, got {sections!r}")
    records, rollouts, samples = (
        read_jsonl(path / f"{name}.jsonl") for name in ("metrics", "rollouts", "samples")
    )
    records = [{k: v if is_number(v) else None for k, v in r.items()} for r in records]
    run = RunData(path.resolve().name, path, records, rollouts, samples)
    for section, values in sections.items():
        inner = values if isinstance(values, dict) else {"": values}
        run.config |= {f"{section}.{key}".rstrip("."): value for key, value in inner.items()}
    return run


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
