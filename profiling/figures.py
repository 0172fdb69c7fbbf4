"""`python -m profiling.figures [FOLDER]`: draws what a folder of results holds, into `figures/`.

Speed against batch (`decode.json`), active requests over time (`rollout-trace.json`), where a
step's time goes (`grpo-curves.json`), accept length through RL (`drafter-rl.json`). Rewards and
strategies are in the plots and the report of a run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from driver.records.plots import (
    PHASE_COLORS,
    new_figure,
    plot_active,
    save,
    strategy_colors,
    styled,
)
from driver.rollout.stats import QUARTERS
from profiling.rig.results import RESULTS, TARGETS_CARD

CASE = re.compile(r"(?P<subject>\S+) b(?P<batch>\d+) (?P<strategy>\S+)")
MARKERS = "os^Dv<>P"
ACTIVE_ARMS = ("off", "bandit, adapted")
RL_COLORS = {"frozen": "#8a8f98", "serial": "#2563ab", "overlapped": "#d1641b"}

Points = dict[str, list[tuple[int, float]]]  # strategy -> (batch, tokens a second)


def speeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Subject -> its points by rising batch, of the rows of `decode`."""
    out: dict[str, Points] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if match := CASE.fullmatch(row["case"]):
            point = (int(match["batch"]), row["tokens_per_s"])
            out[match["subject"]][match["strategy"]].append(point)
    return {subject: {s: sorted(p) for s, p in of.items()} for subject, of in out.items()}


def draw_speeds(decode: Mapping[str, Any], folder: Path) -> list[Path]:
    """Tokens a second of a request against the batch, a figure for each subject."""
    made = []
    synthetic = {row["case"].split()[0] for row in decode["rows"] if "synthetic" in row}
    for subject, points in speeds(decode["rows"]).items():
        title = subject + ", acceptance of the warmed policy" * (subject in synthetic)
        figure, axes = new_figure(title, "batch", "tokens/s of a request")
        # A sweep has one batch; a line needs two.
        shown = {s: of for s, of in points.items() if len(of) > 1 or s == "off"}
        for marker, (strategy, color) in zip(
            cycle(MARKERS), strategy_colors(shown).items(), strict=False
        ):
            batches, rates = zip(*shown[strategy], strict=True)
            each = np.divide(rates, batches)
            axes.plot(batches, each, color=color, marker=marker, markersize=5, label=strategy)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        ticks = sorted({batch for of in shown.values() for batch, _ in of})
        axes.set_xticks(ticks, [str(batch) for batch in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(frameon=False)
        made.append(folder / f"speed-{subject}.png")
        figure.savefig(made[-1])
    return made


def draw_active(traces: Mapping[str, Sequence[Sequence]], folder: Path) -> list[Path]:
    """Active requests over the time of the trace, without speculation and with the bandit."""
    made = []
    for arm in filter(traces.__contains__, ACTIVE_ARMS):
        made.append(folder / f"active-{re.sub('[^a-z0-9]+', '-', arm)}.png")
        save(
            plot_active([(at, active, strategy) for at, active, strategy in traces[arm]]), made[-1]
        )
    return made


def draw_parts(curves: Mapping[str, Mapping[str, Mapping[str, Any]]], folder: Path) -> list[Path]:
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
    figure.savefig(folder / "grpo-parts.png")
    return [folder / "grpo-parts.png"]


def draw_rl(curves: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Accept length of each arm by step, and by quarter of a step over the frozen drafter's.

    The ratio falls where the policy was updated and rises while the drafter follows.
    """
    figure = Figure(figsize=(8, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    whole, within = map(styled, figure.subplots(2, 1, sharex=True))
    whole.set(title="Accept length through RL", ylabel="tokens emitted per speculative pass")
    within.set(ylabel="the same over the frozen drafter's,\nby quarter of a step's passes")
    within.set_xlabel("policy updates so far")
    base = _by_quarter(curves["frozen"]) if "frozen" in curves else None
    for arm, of in curves.items():
        color = RL_COLORS[arm]
        values = np.array(of["accept_length"], dtype=float)  # null becomes nan
        whole.plot(np.arange(len(values)) + 0.5, values, marker=".", color=color, label=arm)
        if base is None or arm == "frozen":
            continue
        mine = _by_quarter(of)
        count = min(len(base), len(mine))
        # A gap at each update, so that what changed there shows as a step.
        ratio = np.hstack([mine[:count] / base[:count], np.full((count, 1), np.nan)])
        at = np.arange(count)[:, None] + (np.arange(QUARTERS + 1) + 0.5) / QUARTERS
        within.plot(at.ravel(), ratio.ravel(), color=color, linewidth=1.4, label=arm)
    within.axhline(1, color=RL_COLORS["frozen"], linestyle="--", linewidth=1)
    within.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (whole, within):
        axes.legend(frameon=False)
    figure.savefig(folder / "drafter-rl.png")
    return [folder / "drafter-rl.png"]


def _by_quarter(curve: Mapping[str, Any]) -> np.ndarray:
    """[steps, QUARTERS]; nan where a step has none."""
    rows = [quarters or [np.nan] * QUARTERS for quarters in curve["quarters"]]
    return np.array(rows, dtype=float).reshape(-1, QUARTERS)


DRAW: dict[str, Callable[[Any, Path], list[Path]]] = {
    "decode.json": draw_speeds,
    "rollout-trace.json": draw_active,
    "grpo-curves.json": draw_parts,
    "drafter-rl.json": draw_rl,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.figures", description=__doc__)
    folder = RESULTS / TARGETS_CARD
    parser.add_argument("folder", nargs="?", type=Path, default=folder, help=f"default: {folder}")
    folder, made = parser.parse_args(argv).folder, []
    for name, draw in DRAW.items():
        if (source := folder / name).exists():
            (folder / "figures").mkdir(exist_ok=True)
            made += draw(json.loads(source.read_text(encoding="utf-8")), folder / "figures")
    if not made:
        sys.stderr.write(f"profiling.figures: {folder}: holds none of {', '.join(DRAW)}\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
