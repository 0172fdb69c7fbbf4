"""The report's charts as HTML; empty where no run has the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ..records import plots
from .data import Record, RunData, is_number

RUN_COLORS = ("#2f6fdb", "#d9661f", "#1f9d7a", "#8f5bd6")
MAX_PASSES = 600  # of a rollout
LAST_STEPS = 5  # whose responses make the histogram


def curves(
    runs: Sequence[RunData],
    metric: str,
    label: str,
    *,
    smooth: int = 1,
    dots: str = "",
    wall: bool = False,
) -> Markup:
    """A metric of all runs in one chart; a step without a value leaves a gap.

    Args:
        runs, metric, label: what is drawn.
        smooth: steps of the mean that is drawn over the faint curve.
        dots: a second metric, drawn as dots.
        wall: against the time of the run instead of its steps.
    """
    if not any(run.series(name) for run in runs for name in (metric, dots)):
        return Markup()
    x_label, unit = "step", 1.0
    if wall:
        x_label, unit = _time_unit(max(max(run.seconds().values(), default=0.0) for run in runs))
    figure, axes = plots.new_figure(f"{label} by {x_label}", x_label, "")
    for run, color in zip(runs, RUN_COLORS, strict=False):
        clock = run.seconds() if wall else {r["step"]: r["step"] for r in run.records}
        line = "-" if run is runs[0] else "--"  # dashes show an equal curve below
        steps, values = plots.with_gaps(run.records, metric)
        x = np.array([clock[step] / unit for step in steps])
        plots.draw_curve(axes, x, values, color, smooth=smooth, line=line)
        for step, value in run.series(dots):
            axes.plot(clock[step] / unit, value, "o", color=color)
    return _html(figure)


def _time_unit(seconds: float) -> tuple[str, float]:
    """The label of a time axis, and its unit in seconds."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 3 * size:
            return f"{unit} since the start", size
    return "seconds since the start", 1.0


def step_times(runs: Sequence[RunData]) -> list[Markup]:
    """Stacked bars of a step's phases, one chart a run, on one scale."""
    made = []
    for run in runs:
        timed = any(record.get("timing_s/step") is not None for record in run.steps())
        made.append(plots.plot_step_times(run.records) if timed else None)
    top = max((figure.axes[0].get_ylim()[1] for figure in made if figure), default=0.0)
    for figure in filter(None, made):
        figure.axes[0].set_ylim(0, top)
    return [_html(figure) if figure else Markup() for figure in made]


def lengths(runs: Sequence[RunData]) -> list[Markup]:
    """Histograms of the last steps' response lengths, one a run, on one scale."""
    values = [[n for r in run.rollouts[-LAST_STEPS:] for n in r["lengths"]] for run in runs]
    longest = max((max(some) for some in values if some), default=0)
    out = []
    for run, some in zip(runs, values, strict=True):
        limit = run.config.get("sampling.max_new_tokens")
        figure = plots.plot_lengths(some, int(limit) if is_number(limit) else None)
        figure.axes[0].set_xlim(0, 1.03 * longest + 1)
        out.append(_html(figure) if some else Markup())
    return out


def active_requests(runs: Sequence[RunData]) -> list[list[Markup]]:
    """Active requests over the time of the first and the last rollout of each run."""
    shown = [_ends([r for r in run.rollouts if len(r["active"]) > 1]) for run in runs]
    colors = plots.strategy_colors(e[2] for some in shown for r in some for e in r["active"])
    out = []
    for some in shown:
        charts = []
        for rollout in some:
            passes = rollout["active"]
            stride = -(-len(passes) // MAX_PASSES)
            figure = plots.plot_active([*passes[:-1:stride], passes[-1]], colors)
            figure.axes[0].set_xlim(0, max(r["active"][-1][0] for r in some) or None)
            title = Markup("<h3>Step {}</h3>").format(int(rollout["step"]))
            charts.append(title + _html(figure))
        out.append(charts)
    return out


def _ends(rollouts: list[Record]) -> list[Record]:
    return rollouts if len(rollouts) < 2 else [rollouts[0], rollouts[-1]]


def _html(figure: Figure) -> Markup:
    chart = Markup('<figure class="chart" role="img" aria-label="{}">{}</figure>')
    return chart.format(figure.axes[0].get_title(), Markup(plots.to_svg(figure)))
