"""`python -m profiling.rig.compare old.json new.json`: what became slower on a card.

Prints new over old for the time of each case, and worse over better for each target; exits 1 where
one is past the threshold, 2 where the files cannot be compared.
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
        ValueError: other cards, other benchmarks, other forms of row, or nothing in common.
    """
    check_comparable(old, new)
    times = [{row["case"]: row["median_us"] for row in result["rows"]} for result in (old, new)]
    found = [
        Change(case, before, times[1][case], times[1][case] / before)
        for case, before in times[0].items()
        if case in times[1] and before
    ]
    after = {target["name"]: target for target in new["targets"]}
    for target in old["targets"]:
        name, before = target["name"], target["got"]
        now = after[name]["got"] if name in after else None
        if before and now:
            lower_is_better = "at_most" in target["wanted"]
            ratio = now / before if lower_is_better else before / now
            found.append(Change(name, before, now, ratio))
    if not found:
        raise ValueError("the two results have no case and no target in common")
    return found


def check_comparable(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises a ValueError of one line where a ratio would mean nothing."""
    cards = [result["meta"].get("card") for result in (old, new)]
    if cards[0] != cards[1]:
        raise ValueError(f"other cards: {cards[0]} and {cards[1]}")
    benches = [sorted({row.get("bench", "?") for row in result["rows"]}) for result in (old, new)]
    if benches[0] != benches[1]:
        raise ValueError(f"other benchmarks: {', '.join(benches[0])} and {', '.join(benches[1])}")
    for which, result in (("old", old), ("new", new)):
        for row in result["rows"]:
            if "case" not in row or not isinstance(row.get("median_us"), int | float):
                raise ValueError(f"other schema: a row of the {which} file lacks case or median_us")
        for target in result["targets"]:
            if not {"name", "wanted", "got"} <= set(target):
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
