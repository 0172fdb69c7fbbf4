"""`python -m profiling.rig.targets`: every target of `targets.toml`, its figure and its state.

Figures are the newest of `results/` on the card that the targets are for; those of `[cpu]` need no
card. A target without a figure is missing and counts as unmet.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from profiling.rig.results import RESULTS, Target, known_targets


def wanted_text(wanted: dict[str, float]) -> str:
    """A bound in words: "at most 7"."""
    ((bound, value),) = wanted.items()
    return f"{bound.replace('_', ' ')} {value:g}"


def lines(targets: list[Target], unmet: bool = False) -> list[str]:
    """The listing, or what is not met of it, by table; the counts at the end are of all."""
    out = []
    shown = [target for target in targets if not unmet or target.state != "met"]
    for index, target in enumerate(shown):
        if index == 0 or target.table != shown[index - 1].table:
            out.append(f"[{target.table}]")
        got = "-" if target.got is None else f"{target.got:g}"
        mark = target.state if target.state == "met" else target.state.upper()
        text = f"  {mark:8}{target.name:40}{wanted_text(target.wanted):>16}  got {got:8}"
        if target.figure:
            text += f"  {target.figure.meta['date'][:10]} {target.figure.meta['commit']}"
        out.append(text.rstrip())
    count = Counter(target.state for target in targets)
    out.append(
        f"{count['met']} met, {count['unmet']} unmet, {count['missing']} missing of {len(targets)}"
    )
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.rig.targets", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--unmet", action="store_true", help="only what is not met")
    args = parser.parse_args(argv)
    if not any(args.results.glob("*/**/*.json")):
        sys.stderr.write(f"profiling.rig.targets: {args.results}: holds no results\n")
        return 2
    sys.stdout.write("\n".join(lines(known_targets(args.results), args.unmet)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
