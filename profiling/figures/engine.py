"""`python -m profiling.figures.engine [FOLDER]`: figures of the engine from its results.

Reads `decode.json`, `rollout.json` with `rollout-trace.json`, and `bandit-pulls.json` of a results
folder, and draws what is there into `figures/` beside them: speed against batch, active requests
over time coloured by strategy, pulls of each arm by bucket.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driver.config.strategy import Strategy
from driver.records.plots import new_figure, plot_active, strategy_colors
from profiling.rig.results import CPU, RESULTS, TARGETS_CARD, tell_drawn

CASE = re.compile(r"(?P<subject>\S+) b(?P<batch>\d+) (?P<strategy>\S+)")
MARKERS = "os^Dv<>P"


def speeds(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Subject -> strategy -> (batch, tokens a second) by rising batch, of `decode` rows."""
    out: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if match := CASE.fullmatch(row["case"]):
            point = (int(match["batch"]), row["tokens_per_s"])
            out[match["subject"]][match["strategy"]].append(point)
    return {
        subject: {strategy: sorted(points) for strategy, points in of.items()}
        for subject, of in out.items()
    }


def plot_speeds(title: str, curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Tokens a second of a request against the batch, a line for each strategy."""
    figure, axes = new_figure(title, "batch", "tokens/s of a request")
    # Sweeps have one batch; a line needs two.
    shown = {s: points for s, points in curves.items() if len(points) > 1 or s == "off"}
    colors = strategy_colors(shown)
    for index, (strategy, points) in enumerate(shown.items()):
        batches, rates = zip(*points, strict=True)
        each = [rate / batch for batch, rate in points]
        how = {"color": colors[strategy], "marker": MARKERS[index % len(MARKERS)]}
        axes.plot(batches, each, markersize=5, label=strategy, **how)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend(frameon=False)
    figure.savefig(path)


def plot_pulls(name: str, pulls: Sequence[tuple[int, str, int]], path: Path) -> None:
    """Share of the windows of each bucket that went to each arm."""
    figure, axes = new_figure(f"Arms by bucket: {name}", "batch bucket", "share of windows")
    buckets = sorted({bucket for bucket, _, _ in pulls})
    total = {b: sum(n for bucket, _, n in pulls if bucket == b) for b in buckets}
    colors = strategy_colors({strategy for _, strategy, _ in pulls})
    below = dict.fromkeys(buckets, 0.0)
    for strategy in sorted(colors, key=lambda text: (text != "off", Strategy.parse(text))):
        share = dict.fromkeys(buckets, 0.0)
        for bucket, arm, count in pulls:
            if arm == strategy:
                share[bucket] = count / total[bucket]
        axes.bar(
            [str(b) for b in buckets],
            [share[b] for b in buckets],
            bottom=[below[b] for b in buckets],
            color=colors[strategy],
            label=strategy,
        )
        for bucket in buckets:
            below[bucket] += share[bucket]
    figure.legend(frameon=False, loc="outside right upper")  # bars fill the axes
    figure.savefig(path)


def draw(folder: Path, pulls_folder: Path) -> list[Path]:
    """Draws what the folders hold; returns the files."""
    figures, made = folder / "figures", []
    figures.mkdir(exist_ok=True)

    def read(path: Path) -> Any:
        return json.loads(path.read_text()) if path.exists() else None

    if decode := read(folder / "decode.json"):
        synthetic = {row["case"].split()[0] for row in decode["rows"] if "synthetic" in row}
        for subject, curves in speeds(decode["rows"]).items():
            made.append(figures / f"speed-{subject}.png")
            title = (
                f"{subject}, acceptance of the warmed policy" if subject in synthetic else subject
            )
            plot_speeds(title, curves, made[-1])
    for arm, trace in (read(folder / "rollout-trace.json") or {}).items():
        made.append(figures / f"active-{re.sub('[^a-z0-9]+', '-', arm)}.png")
        plot_active([(at, active, strategy) for at, active, strategy in trace], made[-1])
    for name, pulls in (read(pulls_folder / "bandit-pulls.json") or {}).items():
        if not name.startswith(("static", "map")):
            made.append(figures / f"arms-{re.sub('[^a-z0-9]+', '-', name)}.png")
            plot_pulls(name, [tuple(p) for p in pulls], made[-1])
    return made


def main(argv: Sequence[str]) -> None:
    folder = Path(argv[0]) if argv else RESULTS / TARGETS_CARD
    tell_drawn(draw(folder, RESULTS / CPU) if folder.is_dir() else [], folder)


if __name__ == "__main__":
    main(sys.argv[1:])
