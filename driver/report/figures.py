"""The report's charts: each takes the runs and returns HTML, or "" where no run has the data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from ..records.plots import strategy_colors
from .chart import Chart, Point, legend, short
from .data import MAX_PASSES, Record, RunData, is_number

PHASES = {  # in the order of a step, bottom to top
    "gen": "#3f7fe0",
    "reward": "#e3b53a",
    "update_drafter": "#9a72d8",
    "old_log_prob": "#5fb8a5",
    "update_actor": "#df7a3c",
    "update_weights": "#cf5f86",
    "eval": "#7f8b9c",
    "other": "#b9c1cd",
}
START_UP = ("load", "warmup")  # in the first step's time, but no part of a step
MAX_BARS = 80
LAST_STEPS = 5  # whose responses make the histogram


def run_color(index: int) -> str:
    return f"var(--run-{index % 4})"


def curves(
    runs: Sequence[RunData],
    metric: str,
    label: str,
    *,
    smooth: int = 1,
    dots: str = "",
    wall: bool = False,
) -> str:
    """A metric of all runs in one chart; a step without a value leaves a gap.

    Args:
        runs: in their order.
        metric: its name in `metrics.jsonl`.
        label: of the axis.
        smooth: steps of the mean that is drawn over the faint curve.
        dots: a second metric, drawn as dots.
        wall: against the time of the run instead of its steps.
    """
    lines = [run.lines(metric) for run in runs]
    marks = [run.series(dots) if dots else [] for run in runs]
    x_label = "step"
    if wall:
        clocks = [run.seconds() for run in runs]
        x_label, unit = _time_unit(max((max(c.values(), default=0.0) for c in clocks), default=0.0))

        def at(points: Sequence[Point], index: int) -> list[Point]:
            return [(clocks[index][x] / unit, y) for x, y in points]

        lines = [[at(piece, i) for piece in pieces] for i, pieces in enumerate(lines)]
        marks = [at(points, i) for i, points in enumerate(marks)]
    points = [p for pieces in (*lines, marks) for piece in pieces for p in piece]
    if not points:
        return ""
    values = [value for _, value in points]
    room = 0.06 * (max(values) - min(values)) or 0.1
    low = 0.0 if 0 <= min(values) <= 0.4 * max(values) else min(values) - room
    title = f"{label} by {x_label}"
    first, last = _span(points)
    x = (0.0 if wall else first, last)
    chart = Chart(x, (low, max(values) + room), x_label, label, title)
    for index, (pieces, dotted) in enumerate(zip(lines, marks, strict=True)):
        color = run_color(index)
        for piece in pieces:
            width = 2.0
            if smooth > 1 and len(piece) > smooth:
                chart.line(piece, color, width=1.2, opacity=0.35)
                piece, width = _moving_mean(piece, smooth), 2.4
            if len(piece) > 1:  # dashes show an equal curve below
                chart.line(piece, color, width=width, dashed=index > 0)
            else:
                chart.dots(piece, color, label)
        chart.dots(dotted, color, dots, size=8)
    names = [(run_color(index), run.name) for index, run in enumerate(runs)]
    return chart.html() + (legend(names) if len(runs) > 1 else "")


def _time_unit(seconds: float) -> tuple[str, float]:
    """The label of a time axis, and its unit in seconds."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 3 * size:
            return f"{unit} since the start", size
    return "seconds since the start", 1.0


def step_times(runs: Sequence[RunData]) -> list[str]:
    """Stacked bars of a step's phases, one chart a run, on one scale."""
    bars = [_grouped([_phase_seconds(record) for record in run.steps()]) for run in runs]
    tallest = max((sum(bar[1].values()) for some in bars for bar in some), default=0.0)
    return [_step_chart(some, tallest) if some else "" for some in bars]


def _phase_seconds(record: Record) -> tuple[float, dict[str, float]]:
    """Step and seconds by phase; what no phase covers is `other`."""
    times = {
        name.removeprefix("timing_s/"): value
        for name, value in record.items()
        if name.startswith("timing_s/") and is_number(value)
    }
    whole = times.pop("step", 0.0) - sum(times.pop(name, 0.0) for name in START_UP)
    shown = {name: times.pop(name, 0.0) for name in PHASES if name != "other"}
    return record["step"], shown | {"other": max(0.0, whole - sum(shown.values()))}


def _grouped(
    bars: list[tuple[float, dict[str, float]]],
) -> list[tuple[Point, dict[str, float]]]:
    """At most `MAX_BARS` bars ((first, last step), mean seconds by phase)."""
    size = -(-len(bars) // MAX_BARS) or 1
    groups = [bars[i : i + size] for i in range(0, len(bars), size)]
    return [
        ((g[0][0], g[-1][0]), {name: statistics.mean(b[name] for _, b in g) for name in PHASES})
        for g in groups
    ]


def _step_chart(bars: list[tuple[Point, dict[str, float]]], tallest: float) -> str:
    first, last = bars[0][0][0], bars[-1][0][1]
    chart = Chart(
        (first - 0.5, last + 0.5), (0, tallest), "step", "seconds", "Seconds of each step by phase"
    )
    gap = 0.1 if len(bars) < MAX_BARS // 2 else 0.0
    for (begin, end), seconds in bars:
        height = 0.0
        for name, value in seconds.items():
            if value > 0.002 * tallest:
                across, up = (begin - 0.5 + gap, end + 0.5 - gap), (height, height + value)
                chart.bar(across, up, PHASES[name], f"step {short(begin)}, {name}: {value:.3g} s")
            height += value
    total = {name: sum(seconds[name] for _, seconds in bars) for name in PHASES}
    whole = sum(total.values()) or 1.0
    entries = [
        (PHASES[name], f"{name} {value / whole:.0%}")
        for name, value in total.items()
        if value / whole >= 0.001
    ]
    return chart.html() + legend(entries)


def lengths(runs: Sequence[RunData]) -> list[str]:
    """Histograms of the last steps' response lengths, one a run, with the same bins."""
    values = [[n for r in run.rollouts[-LAST_STEPS:] for n in r["lengths"]] for run in runs]
    longest = max((max(some) for some in values if some), default=0)
    width = -(-longest // 40) or 1
    bins = np.arange(0.5, longest + width + 0.5, width)
    return [_histogram(some, bins, index) if some else "" for index, some in enumerate(values)]


def _histogram(values: list[float], bins: np.ndarray, index: int) -> str:
    counts, _ = np.histogram(values, bins)
    chart = Chart(
        (0, float(bins[-1])),
        (0, 1.25 * float(counts.max())),  # room for the marks' labels
        "response length (tokens)",
        "responses",
        "Histogram of response lengths",
    )
    for left, right, count in zip(bins, bins[1:], counts, strict=False):
        if count:
            tip = f"{left + 0.5:.0f} to {right - 0.5:.0f} tokens: {count} responses"
            chart.bar((float(left), float(right)), (0, float(count)), run_color(index), tip)
    for row, share in enumerate((50, 75, 99)):
        at = float(np.percentile(values, share))
        chart.mark(at, f"p{share} = {at:.0f}", row)
    return chart.html()


def active_requests(runs: Sequence[RunData]) -> list[list[tuple[int, str]]]:
    """Active requests over the time of the first and the last rollout of each run.

    Returns:
        For each run (step, chart); the time axes are one within a run, and over the runs unless
        one takes several times as long as another.
    """
    shown = [_ends([r for r in run.rollouts if len(r["active"]) > 1]) for run in runs]
    spans = [max((r["active"][-1][0] for r in some), default=0.0) for some in shown]
    known = [span for span in spans if span > 0]
    shared = known and max(known) <= 4 * min(known)
    names = [entry[2] for some in shown for r in some for entry in r["active"]]
    colors = report_colors(names)
    return [
        [
            (int(r["step"]), _active_chart(r["active"], max(known) if shared else span, colors))
            for r in some
        ]
        for some, span in zip(shown, spans, strict=True)
    ]


def _ends(rollouts: list[Record]) -> list[Record]:
    return rollouts if len(rollouts) < 2 else [rollouts[0], rollouts[-1]]


def _active_chart(active: list[list], span: float, colors: dict[str, str]) -> str:
    most = max(count for _, count, _ in active)
    chart = Chart(
        (0, span), (0, 1.04 * most), "seconds", "active requests", "Active requests over time"
    )
    stride = -(-len(active) // MAX_PASSES)
    active = [*active[:-1][::stride], active[-1]]
    seconds = dict.fromkeys((name for _, _, name in active[:-1]), 0.0)
    outline: list[Point] = []
    for (begin, count, name), (end, _, _) in zip(active, active[1:], strict=False):
        tip = f"{name}: {count} active, {begin:.3g} to {end:.3g} s"
        chart.bar((begin, end), (0, count), colors[name], tip)
        seconds[name] += end - begin
        outline += [(begin, count), (end, count)]
    chart.line([*outline, (active[-1][0], 0)], "var(--text)", width=1.1)
    order = [name for name in colors if name in seconds]
    return chart.html() + legend([(colors[n], f"{n} {seconds[n]:.2g} s") for n in order])


def _span(points: Sequence[Point]) -> Point:
    return min(x for x, _ in points), max(x for x, _ in points)


def _moving_mean(curve: Sequence[Point], size: int) -> list[Point]:
    ends = range(size, len(curve) + 1)
    return [(curve[e - 1][0], statistics.mean(v for _, v in curve[e - size : e])) for e in ends]


def report_colors(names: Iterable[str]) -> dict[str, str]:
    """The figures' colours of strategies; that of `off` follows the reader's light or dark."""
    colors = strategy_colors(names)
    return {name: "var(--off)" if name == "off" else color for name, color in colors.items()}
