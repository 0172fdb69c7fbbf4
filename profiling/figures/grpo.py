"""`python -m profiling.figures.grpo [FOLDER]`: figures of the GRPO benchmark from its results.

Reads `grpo-curves.json` of a results folder and draws into `figures/` beside it: reward against
step and against wall time, and where a step's time goes in each arm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from driver.records.plots import PHASE_COLORS, new_figure
from profiling.rig.results import RESULTS, TARGETS_CARD, tell_drawn

COLORS = {
    "off": "#8a8f98",
    "ngram": "#d1641b",
    "static": "#4f9d69",
    "frozen": "#7a5ea8",
    "full": "#2563ab",
    "trl": "#b03a48",
}

Curves = Mapping[str, Mapping[str, Mapping[str, Any]]]  # arm -> seed -> what is drawn


def plot_reward(curves: Curves, path: Path, *, wall: bool) -> None:
    """Reward of each arm, the mean of its seeds in bold.

    Args:
        curves: as `profiling.studies.grpo_arms.curves` makes them.
        path: the PNG to write.
        wall: against the seconds of the steps so far; else against steps.
    """
    label = "seconds of training" if wall else "step"
    figure, axes = new_figure("Reward, speculation on and off", label, "mean reward")
    for arm, seeds in curves.items():
        runs = list(seeds.values())
        count = min(len(run["reward"]) for run in runs)
        reward = np.array([run["reward"][:count] for run in runs])
        seconds = np.array([list(accumulate(run["step_s"][:count])) for run in runs])
        steps = np.arange(1, count + 1)
        color = COLORS[arm]
        for one, at in zip(reward, seconds, strict=True):
            axes.plot(at if wall else steps, one, color=color, alpha=0.25, linewidth=0.8)
        x = seconds.mean(0) if wall else steps
        # Equal curves would hide one another.
        style = "--" if arm == "off" else "-"
        axes.plot(x, reward.mean(0), style, color=color, linewidth=2, label=arm)
    axes.legend(frameon=False)
    figure.savefig(path)


def plot_parts(curves: Curves, path: Path) -> None:
    """Mean seconds of each phase of a step, an arm a bar."""
    figure, axes = new_figure("Where a step's time goes", "seconds a step", "")
    names = list(next(iter(next(iter(curves.values())).values()))["parts"])
    arms = list(curves)
    left = np.zeros(len(arms))
    for name, color in zip(names, PHASE_COLORS, strict=True):
        width = np.array(
            [np.mean([run["parts"][name] for run in curves[arm].values()]) for arm in arms]
        )
        axes.barh(arms, width, left=left, color=color, label=name)
        left += width
    axes.invert_yaxis()
    axes.legend(frameon=False, ncols=2, fontsize=8)
    figure.savefig(path)


def draw(folder: Path) -> list[Path]:
    """Draws what the folder holds; returns the files."""
    source = folder / "grpo-curves.json"
    if not source.exists():
        return []
    curves, figures = json.loads(source.read_text()), folder / "figures"
    figures.mkdir(exist_ok=True)
    paths = [figures / f"grpo-{name}.png" for name in ("reward", "reward-wall", "parts")]
    plot_reward(curves, paths[0], wall=False)
    plot_reward(curves, paths[1], wall=True)
    plot_parts(curves, paths[2])
    return paths


def main(argv: Sequence[str]) -> None:
    folder = Path(argv[0]) if argv else RESULTS / TARGETS_CARD
    tell_drawn(draw(folder), folder)


if __name__ == "__main__":
    main(sys.argv[1:])
