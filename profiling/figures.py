"""`python -m profiling.figures [FOLDER]`: draws where a step's time goes (`grpo-curves.json`).

Rewards, strategies and accept lengths are in the report of a run.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from driver.report.figures import PHASE_COLORS, new_figure
from profiling.rig.results import RESULTS, TARGETS_CARD

SOURCE, FIGURE = "grpo-curves.json", "figures/grpo-parts.png"


def draw_parts(curves: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """Mean seconds of each phase of a step, a bar for each arm."""
    figure, axes = new_figure("Where a step's time goes", "seconds a step", "")
    names = list(next(iter(next(iter(curves.values())).values()))["parts"])
    left = np.zeros(len(curves))
    for name, color in zip(names, PHASE_COLORS, strict=True):
        width = [
            np.mean([run["parts"][name] for run in seeds.values()]) for seeds in curves.values()
        ]
        axes.barh(list(curves), width, left=left, color=color, label=name)
        left += width
    axes.invert_yaxis()
    figure.legend(frameon=False, loc="outside lower center", ncols=4)  # bars fill the axes
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.figures", description=__doc__)
    folder = RESULTS / TARGETS_CARD
    parser.add_argument("folder", nargs="?", type=Path, default=folder, help=f"default: {folder}")
    folder = parser.parse_args(argv).folder
    if not (folder / SOURCE).exists():
        sys.stderr.write(f"profiling.figures: {folder}: holds no {SOURCE}\n")
        return 1
    draw_parts(json.loads((folder / SOURCE).read_text(encoding="utf-8")), folder / FIGURE)
    sys.stdout.write(f"{folder / FIGURE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
