"""Result files and the targets of `targets.toml`.

`results/<card>/<bench>.json` holds a whole benchmark, `results/<card>/quick/<bench>.json` one of
`--quick`. Of two figures the newer counts.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
TARGETS_CARD = "h200"  # the card that the targets are for
Row = Mapping[str, Any]
CPU = "cpu"  # the table, and the folder of results, that need no card
# Target of `bench grpo` -> benchmark, case and field of the row that decides it.
TAKEN = {
    "checkpoint_blocked_s": ("big", "train 15b", "blocked_s"),
    "update_mfu_15b": ("update", "15b compiled", "mfu"),
    "update_hidden_share": ("tail", "64x32768x98304", "hidden_share"),  # off in the preset
}


def card_folder(card: str) -> str:
    """The folder of a card: "NVIDIA H100 80GB HBM3" -> "h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia")).strip("-")


def all_targets() -> dict[str, dict[str, dict[str, float]]]:
    """Table -> name -> `{"at_most": x}` or `{"at_least": x}`, in the order of the file."""
    return tomllib.loads((ROOT / "targets.toml").read_text())


def is_met(wanted: dict[str, float], got: float | None) -> bool:
    """Whether a figure reaches its target; without a figure it does not."""
    if got is None:
        return False
    return got <= wanted["at_most"] if "at_most" in wanted else got >= wanted["at_least"]


def targets_of(name: str, got: dict[str, float]) -> list[dict[str, Any]]:
    """The targets of a benchmark's table with their figures, in the order of the table."""
    table = all_targets().get(name, {})
    unknown = set(got) - set(table)
    if unknown:
        raise ValueError(f"no such target in [{name}]: {', '.join(sorted(unknown))}")
    return [
        {
            "name": target,
            "wanted": wanted,
            "got": got.get(target),
            "met": is_met(wanted, got.get(target)),
        }
        for target, wanted in table.items()
    ]


def load(path: Path) -> dict[str, Any]:
    """One result file: `meta`, `rows`, `targets`; ValueError, in one line, if it is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not isinstance(result, dict) or not {"meta", "rows", "targets"} <= set(result):
        raise ValueError(f"{path}: not a result; it must have meta, rows and targets")
    return result


def newest_first(results: Path, bench: str, file: str = "") -> list[Path]:
    """A benchmark's results on the card of the targets, newest first, or a file beside each."""
    own = f"{bench}.json"
    runs = [results / TARGETS_CARD / part for part in ("", "quick")]
    runs = [folder for folder in runs if (folder / own).exists()]
    runs.sort(key=lambda folder: load(folder / own)["meta"]["date"], reverse=True)
    return [path for folder in runs if (path := folder / (file or own)).exists()]


def newest(bench: str, results: Path) -> dict[str, Row]:
    """Case -> its newest row in the whole and the quick result of a benchmark, with its `meta`."""
    rows: dict[str, Row] = {}
    for path in reversed(newest_first(results, bench)):
        result = load(path)
        meta = result["meta"] | {"bench": bench}
        rows |= {row["case"]: {**row, "meta": meta} for row in result["rows"]}
    return rows


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Two results of one benchmark on one card as one; rows of both are the new one's."""
    cases = {row["case"] for row in new["rows"]}
    rows = [row for row in old["rows"] if row["case"] not in cases] + new["rows"]
    before = {target["name"]: target for target in old["targets"]}
    targets = [
        before[target["name"]] if target["got"] is None and target["name"] in before else target
        for target in new["targets"]
    ]
    both = {}
    for name, mark in (("command", " && "), ("commit", ", ")):
        last = new["meta"][name]
        both[name] = mark.join([*filter(last.__ne__, old["meta"][name].split(mark)), last])
    return {"meta": new["meta"] | both, "rows": rows, "targets": targets}


@dataclass(frozen=True)
class Figure:
    value: float
    meta: dict[str, Any]


@dataclass(frozen=True)
class Target:
    """One line of `targets.toml` with its newest figure; None: not measured."""

    table: str
    name: str
    wanted: dict[str, float]
    figure: Figure | None

    @property
    def got(self) -> float | None:
        return self.figure.value if self.figure else None

    @property
    def state(self) -> str:
        if self.figure is None:
            return "missing"
        return "met" if is_met(self.wanted, self.figure.value) else "unmet"


def known_targets(folder: Path = RESULTS) -> list[Target]:
    """Every target in the order of the file, with its newest figure of card or CPU."""
    found = []
    for table, wanted_of in all_targets().items():
        measured = _newest(folder / CPU, table) | _newest(folder / TARGETS_CARD, table)
        for name, figure in taken(folder).items() if table == "grpo" else ():
            if name not in measured or figure.meta["date"] > measured[name].meta["date"]:
                measured[name] = figure
        found += [
            Target(table, name, wanted, measured.get(name)) for name, wanted in wanted_of.items()
        ]
    return found


def taken(folder: Path) -> dict[str, Figure]:
    """The targets of `bench grpo` that rows of other benchmarks decide."""
    rows = {target: newest(bench, folder).get(case) for target, (bench, case, _) in TAKEN.items()}
    return {
        target: Figure(row[TAKEN[target][2]], row["meta"]) for target, row in rows.items() if row
    }


def _newest(card: Path, table: str) -> dict[str, Figure]:
    """Target -> its newest figure in the folder of a card."""
    paths = [card / part / f"{table}.json" for part in ("", "quick")]
    results = [load(path) for path in paths if path.exists()]
    results.sort(key=lambda result: result["meta"]["date"])
    return {
        target["name"]: Figure(target["got"], result["meta"])
        for result in results
        for target in result["targets"]
        if target["got"] is not None
    }
