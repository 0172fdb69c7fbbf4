"""Result files and the targets of `targets.toml`.

`results/<card>/<bench>.json` holds a whole benchmark, `results/<card>/quick/<bench>.json` one of
`--quick`. Of two figures the newer counts. Rows and targets to which several commands added have
their own `commit` and `date`; those of the others are in `meta`.
"""

import json
import re
import statistics
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
MACHINE = ("card", "driver", "cuda", "torch")  # of `meta`
CPU = "cpu"  # the table, and the folder of results, that need no card
QUICK = "quick"
WHOLE_ONLY = ("tail_host_share",)  # targets that `--quick` leaves cases out of
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
    """One result file: `meta`, `rows`, `targets`; ValueError, in one line, if it is none.

    Every row and target has its commit and date.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not isinstance(result, dict) or not {"meta", "rows", "targets"} <= set(result):
        raise ValueError(f"{path}: not a result; it must have meta, rows and targets")
    return stamped(result)


def stamped(result: dict[str, Any]) -> dict[str, Any]:
    """The result with commit and date in every row and target: its own, or those of `meta`."""
    stamp = {name: result["meta"][name] for name in ("commit", "date")}
    return result | {name: [stamp | item for item in result[name]] for name in ("rows", "targets")}


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
        for row in result["rows"]:
            if row["case"] not in rows or row["date"] >= rows[row["case"]]["date"]:
                rows[row["case"]] = {**row, "meta": result["meta"] | {"bench": bench}}
    return rows


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Two results of one benchmark on one card as one; rows of both are the new one's."""
    old, new = stamped(old), stamped(new)
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
    notes = [result["meta"]["note"] for result in (old, new) if "note" in result["meta"]]
    changed = [name for name in MACHINE if old["meta"].get(name) != new["meta"].get(name)]
    if changed:
        was = ", ".join(f"{name} {old['meta'].get(name)}" for name in changed)
        notes.append(f"earlier rows: {was}")
    if notes:
        both["note"] = "; ".join(dict.fromkeys(notes))
    return {"meta": new["meta"] | both, "rows": rows, "targets": targets}


@dataclass(frozen=True)
class Figure:
    value: float
    meta: dict[str, Any]  # of the file
    commit: str  # of the figure
    date: str


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
    def commit(self) -> str:
        return self.figure.commit if self.figure else ""

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
        if table == "grpo":
            measured |= taken(folder)
        found += [
            Target(table, name, wanted, measured.get(name)) for name, wanted in wanted_of.items()
        ]
    return found


def taken(folder: Path) -> dict[str, Figure]:
    """The targets of `bench grpo` that rows decide, most of them of other benchmarks."""
    rows = {target: newest(bench, folder).get(case) for target, (bench, case, _) in TAKEN.items()}
    found = {
        target: Figure(row[TAKEN[target][2]], row["meta"], row["commit"], row["date"])
        for target, row in rows.items()
        if row
    }
    if seeds := over_frozen(newest("grpo", folder)):
        row, over = seeds[0][0], statistics.median(ratio for _, ratio in seeds)
        made = row["meta"], row["commit"], row["date"]
        found["full_over_frozen_x"] = Figure(round(over, 3), *made)
    return found


def over_frozen(rows: Mapping[str, Row]) -> list[tuple[Row, float]]:
    """Runs of the full system, and the time of all steps with a frozen drafter over theirs.

    Both runs have the same seed, commit and number of steps.
    """
    found = []
    for case, row in rows.items():
        other = rows.get(case.replace("full", "frozen"), {})
        if re.fullmatch(r"full seed \d+", case) and other:
            if all(row[name] == other[name] for name in ("steps", "commit")):
                found.append((row, other["makespan_s"] / row["makespan_s"]))
    return found


def _newest(card: Path, table: str) -> dict[str, Figure]:
    """Target -> its newest figure in the folder of a card."""
    found: dict[str, Figure] = {}
    for part in ("", QUICK):
        if not (path := card / part / f"{table}.json").exists():
            continue
        result = load(path)
        for target in result["targets"]:
            name, got, date = target["name"], target["got"], target["date"]
            if got is None or (part == QUICK and name in WHOLE_ONLY):
                continue
            if name not in found or date >= found[name].date:
                found[name] = Figure(got, result["meta"], target["commit"], date)
    return found
