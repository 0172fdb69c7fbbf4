"""`python -m profiling.figures.drafter [FOLDER]`: RL with drafters that are trained, and one that
is not.

Reads `drafter-rl.json` of a results folder and draws `figures/drafter-rl.png` beside it: accept
length by step, and within each step as a ratio to the frozen drafter's, which falls where the
policy was updated and rises while the drafter follows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from driver.rollout.stats import QUARTERS
from profiling.rig.results import RESULTS, TARGETS_CARD, tell_drawn

COLORS = {"frozen": "#8a8f98", "serial": "#2563ab", "overlapped": "#d1641b"}


def plot_accept(curves: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Accept length of each arm by step, and by quarter of a step over the frozen drafter's.

    Args:
        curves: as `profiling.studies.drafter_runs.curves` makes them.
        path: the PNG to write.
    """
    figure = Figure(figsize=(8, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    whole, within = figure.subplots(2, 1, sharex=True)
    whole.set(title="Accept length through RL", ylabel="tokens emitted per speculative pass")
    within.set(ylabel="the same over the frozen drafter's,\nby quarter of a step's passes")
    within.set_xlabel("policy updates so far")
    base = _by_quarter(curves["frozen"]) if "frozen" in curves else None
    for arm, of in curves.items():
        values = np.array(of["accept_length"], dtype=float)  # null becomes nan
        whole.plot(np.arange(len(values)) + 0.5, values, marker=".", color=COLORS[arm], label=arm)
        if base is None or arm == "frozen":
            continue
        mine = _by_quarter(of)
        count = min(len(base), len(mine))
        ratio = mine[:count] / base[:count]
        # A gap at each update, so that what changed there shows as a step.
        at = np.arange(count)[:, None] + (np.arange(QUARTERS + 1) + 0.5) / QUARTERS
        ratio = np.hstack([ratio, np.full((count, 1), np.nan)])
        within.plot(at.ravel(), ratio.ravel(), color=COLORS[arm], linewidth=1.4, label=arm)
    within.axhline(1, color=COLORS["frozen"], linestyle="--", linewidth=1)
    for axes in (whole, within):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines and axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _by_quarter(curve: Mapping[str, Any]) -> np.ndarray:
    """[steps, QUARTERS]; nan where a step has none."""
    none = [np.nan] * QUARTERS
    rows = [quarters or none for quarters in curve["quarters"]]
    return np.array(rows, dtype=float).reshape(-1, QUARTERS)


def draw(folder: Path) -> list[Path]:
    """Draws what the folder holds; returns the files."""
    source = folder / "drafter-rl.json"
    if not source.exists():
        return []
    path = folder / "figures" / "drafter-rl.png"
    plot_accept(json.loads(source.read_text()), path)
    return [path]


def main(argv: Sequence[str]) -> None:
    folder = Path(argv[0]) if argv else RESULTS / TARGETS_CARD
    tell_drawn(draw(folder), folder)


if __name__ == "__main__":
    main(sys.argv[1:])
