"""`python -m profiling.rig.compare old.json new.json`: finds regressions between two results.

Prints new over old for the time of each case, and the loss of each target, both above 1 for worse.
Exits with 1 if a ratio is above the threshold, with 2 if the files cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiling.rig.results import load

THRESHOLD = 1.05


@dataclass(frozen=True)
class Change:
    """One figure in both files; `ratio` above 1 is worse."""

    name: str
    old: float
    new: float
    ratio: float


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Cases and targets that both results have.

    Raises:
        ValueError: the results cannot be compared; the message is one line.
    """
    check_comparable(old, new)
    before, after = ({row["case"]: row["median_us"] for row in r["rows"]} for r in (old, new))
    found = [
        Change(case, was, after[case], after[case] / was)
        for case, was in before.items()
        if case in after and was
    ]
    figures = {target["name"]: target["got"] for target in new["targets"]}
    for target in old["targets"]:
        was, now = target["got"], figures.get(target["name"])
        if was and now:
            ratio = now / was if "at_most" in target["wanted"] else was / now
            found.append(Change(target["name"], was, now, ratio))
    if not found:
        raise ValueError("the two results have no case and no target in common")
    return found


def check_comparable(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises a ValueError if the cards, the benchmarks or the forms of the rows differ."""
    facts = {
        "cards": [result["meta"].get("card") for result in (old, new)],
        "benchmarks": [
            ", ".join(sorted({row.get("bench", "?") for row in result["rows"]}))
            for result in (old, new)
        ],
    }
    for name, (one, other) in facts.items():
        if one != other:
            raise ValueError(f"other {name}: {one} and {other}")
    for which, result in (("old", old), ("new", new)):
        times = [row.get("median_us") for row in result["rows"] if "case" in row]
        if len(times) < len(result["rows"]) or not all(isinstance(t, int | float) for t in times):
            raise ValueError(f"other schema: a row of the {which} file lacks case or median_us")
        if not all({"name", "wanted", "got"} <= target.keys() for target in result["targets"]):
            raise ValueError(f"other schema: a target of the {which} file lacks name or got")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.rig.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--threshold", type=float, default=THRESHOLD, help="ratio past which it is a regression"
    )
    args = parser.parse_args(argv)
    try:
        found = changes(load(args.old), load(args.new))
    except ValueError as error:
        sys.stderr.write(f"profiling.rig.compare: {error}\n")
        return 2
    worse = 0
    for change in found:
        slower = change.ratio > args.threshold
        worse += slower
        mark = "WORSE" if slower else ""
        sys.stdout.write(
            f"{change.name:44} {change.old:10.4g} {change.new:10.4g} {change.ratio:8.3f} {mark}\n"
        )
    sys.stdout.write(f"{worse} of {len(found)} past {args.threshold:g}\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
