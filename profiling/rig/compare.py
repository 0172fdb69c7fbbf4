"""`python -m profiling.rig.compare old.json new.json`: finds regressions between two results.

Prints new over old for the time of each case, and the loss of each target, both above 1 for worse.
Exits with 1 if a ratio is above the threshold, with 2 if the files cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from profiling.rig.results import load

THRESHOLD = 1.05


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, float, float, float]]:
    """Name, old, new and loss of the cases and targets that both results have.

    Raises:
        ValueError: the results cannot be compared; the message is one line.
    """
    cards = [result["meta"]["card"] for result in (old, new)]
    benches = [", ".join(sorted({row["bench"] for row in r["rows"]})) for r in (old, new)]
    for name, (one, other) in (("cards", cards), ("benchmarks", benches)):
        if one != other:
            raise ValueError(f"other {name}: {one} and {other}")
    before, after = ({row["case"]: row["median_us"] for row in r["rows"]} for r in (old, new))
    found = [
        (case, was, after[case], after[case] / was)
        for case, was in before.items()
        if case in after and was
    ]
    figures = {target["name"]: target["got"] for target in new["targets"]}
    for target in old["targets"]:
        was, now = target["got"], figures.get(target["name"])
        if was and now:
            loss = now / was if "at_most" in target["wanted"] else was / now
            found.append((target["name"], was, now, loss))
    if not found:
        raise ValueError("the two results have no case and no target in common")
    return found


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
    except (ValueError, KeyError) as error:
        reason = error if isinstance(error, ValueError) else f"other schema: no {error}"
        sys.stderr.write(f"profiling.rig.compare: {reason}\n")
        return 2
    worse = 0
    for name, old, new, loss in found:
        worse += loss > args.threshold
        mark = "WORSE" if loss > args.threshold else ""
        sys.stdout.write(f"{name:44} {old:10.4g} {new:10.4g} {loss:8.3f} {mark}\n")
    sys.stdout.write(f"{worse} of {len(found)} past {args.threshold:g}\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
