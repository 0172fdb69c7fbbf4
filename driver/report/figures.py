"""The report's charts as HTML; empty where no run has the data."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..config.strategy import KINDS, Strategy
from ..records.phases import PHASES, StepTimes
from .data import Record, RunData, is_number

Records = Sequence[Mapping[str, Any]]
Passes = Sequence[tuple[float, int, str]]  # seconds, active, strategy; the last one is the end

RUN_COLORS = ("#2f6fdb", "#d9661f", "#1f9d7a", "#8f5bd6")
MAX_PASSES = 600  # of a rollout
LAST_STEPS = 5  # whose responses make the histogram
MAX_BARS = 80  # of step times
MAX_MARKERS = 100  # of a curve
WHOLE = ("step", "responses", "active requests")  # axes of integers

_BLUE, _ORANGE, _GREY = "#2563ab", "#d1641b", "#8a8f98"
# Colours of the phases of a step, in order, and of the rest.
PHASE_COLORS = ("#2563ab", "#9cc9ea", "#f2c48d", "#d1641b", "#4f9d69", "#7a5ea8", "#c9ccd1")


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

    `smooth` is the number of steps of a mean that is drawn over the faint curve, `dots` a second
    metric. With `wall` the axis is the time of the run instead of its steps.
    """
    if not any(run.series(name) for run in runs for name in (metric, dots)):
        return Markup()
    x_label, unit = "step", 1.0
    if wall:
        x_label, unit = _time_unit(max(max(run.seconds().values(), default=0.0) for run in runs))
    figure, axes = new_figure(f"{label} by {x_label}", x_label, "")
    for run, color in zip(runs, RUN_COLORS, strict=False):
        clock = run.seconds() if wall else {r["step"]: r["step"] for r in run.records}
        line = "-" if run is runs[0] else "--"  # dashes show an equal curve below
        x = np.array([clock[record["step"]] / unit for record in run.records])
        absent_is_nan = [r[metric] if r.get(metric) is not None else np.nan for r in run.records]
        draw_curve(axes, x, np.array(absent_is_nan, float), color, line, smooth)
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
    timed = [[r for r in run.steps() if r.get("timing_s/step") is not None] for run in runs]
    made = [plot_step_times(records) if records else None for records in timed]
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
        if not some:
            out.append(Markup())
            continue
        limit = run.config.get("sampling.max_new_tokens")
        figure = plot_lengths(some, int(limit) if is_number(limit) else None)
        figure.axes[0].set_xlim(0, 1.03 * longest + 1)
        out.append(_html(figure))
    return out


def active_requests(runs: Sequence[RunData]) -> list[list[Markup]]:
    """Active requests over the time of the first and the last rollout of each run."""
    shown = [_ends([r for r in run.rollouts if len(r["active"]) > 1]) for run in runs]
    colors = strategy_colors(e[2] for some in shown for r in some for e in r["active"])
    out = []
    for some in shown:
        charts = []
        for rollout in some:
            passes = rollout["active"]
            stride = -(-len(passes) // MAX_PASSES)
            figure = plot_active([*passes[:-1:stride], passes[-1]], colors)
            figure.axes[0].set_xlim(0, max(r["active"][-1][0] for r in some) or None)
            title = Markup("<h3>Step {}</h3>").format(int(rollout["step"]))
            charts.append(title + _html(figure))
        out.append(charts)
    return out


def _ends(rollouts: list[Record]) -> list[Record]:
    return rollouts if len(rollouts) < 2 else [rollouts[0], rollouts[-1]]


def _html(figure: Figure) -> Markup:
    chart = Markup('<figure class="chart" role="img" aria-label="{}">{}</figure>')
    return chart.format(figure.axes[0].get_title(), Markup(to_svg(figure)))


def plot_lengths(lengths: Sequence[float], limit: int | None = None) -> Figure:
    """Histogram of response lengths in tokens with p50, p75, the maximum, and those at `limit`."""
    title = f"Response lengths: {len(lengths)} responses"
    if limit is not None:
        title += f", {sum(n >= limit for n in lengths)} at the limit of {limit}"
    figure, axes = new_figure(title, "response length (tokens)", "responses")
    longest = round(max(lengths))
    axes.hist(lengths, bins=_bins(longest), color=_BLUE, alpha=0.7)
    p50, p75 = np.percentile(lengths, (50, 75))
    for name, value, style in (("p50", p50, "-"), ("p75", p75, "--"), ("max", longest, ":")):
        label = f"{name} = {value:.0f}"
        axes.axvline(value, color=_ORANGE, linestyle=style, linewidth=1.8, label=label)
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    return figure


def plot_active(passes: Passes, colors: Mapping[str, str]) -> Figure:
    """Active requests over the time of one rollout, coloured by strategy: the long tail."""
    figure, axes = new_figure("Active requests in one rollout", "time (s)", "active requests")
    times, active, names = zip(*passes, strict=True)
    seconds = dict.fromkeys(names[:-1], 0.0)
    for name, begin, end in zip(names, times, times[1:], strict=False):
        seconds[name] += end - begin
    for name, color in colors.items():
        if name in seconds:
            height = np.where(np.array(names) == name, active, 0)
            label = f"{name} ({seconds[name]:.1f} s)"
            axes.fill_between(times, height, step="post", color=color, linewidth=0, label=label)
    axes.step(times, active, where="post", color="#555b66", linewidth=0.8)
    axes.set_xlim(0, times[-1] or None)
    axes.set_ylim(bottom=0)
    _legend_below(figure)
    return figure


def plot_step_times(records: Records) -> Figure:
    """Seconds of each phase of each step, stacked; neighbouring steps of a long run share a bar."""
    figure, axes = new_figure("Where a step's time goes", "step", "seconds")
    times = [StepTimes.of(record) for record in records]
    parts = {name: [t.phases[name] for t in times] for name in PHASES}
    parts["other"] = [t.other + t.unaccounted for t in times]
    whole = sum(map(sum, parts.values())) or 1.0
    firsts = range(0, len(records), -(-len(records) // MAX_BARS))
    left = np.array([records[first]["step"] for first in firsts]) - 0.425
    widths = np.diff(left, append=records[-1]["step"] + 0.575) - 0.15
    below = np.zeros(len(firsts))
    for (name, seconds), color in zip(parts.items(), PHASE_COLORS, strict=True):
        height = np.array([np.mean(seconds[f : f + firsts.step]) for f in firsts])
        if height.any():
            label = f"{name} {sum(seconds) / whole:.0%}"
            axes.bar(left, height, widths, below, color=color, align="edge", label=label)
        below += height
    _legend_below(figure)
    return figure


def draw_curve(
    axes: Axes, x: np.ndarray, values: np.ndarray, color: str, line: str, smooth: int
) -> None:
    """Draws values, if any is finite; with `smooth` faintly, and the mean of so many over them."""
    if not np.isfinite(values).any():
        return
    marker = "." if len(values) <= MAX_MARKERS else ""
    smooth = smooth if len(values) >= smooth else 1
    look: dict[str, Any] = {"alpha": 0.35, "linewidth": 1} if smooth > 1 else {"linewidth": 1.8}
    axes.plot(x, values, line, color=color, marker=marker, **look)
    if smooth > 1:
        mean = np.convolve(values, np.ones(smooth) / smooth, mode="valid")
        axes.plot(x[smooth - 1 :], mean, line, color=color, linewidth=2)


def _bins(longest: int) -> list[float]:
    """At most 60 bins, each a whole number of tokens wide."""
    width = -(-longest // 60)
    return np.arange(0.5, longest + width + 0.5, width).tolist()


def strategy_colors(texts: Iterable[str]) -> dict[str, str]:
    """A colour for each strategy in `texts`, by kind, from light (small trees) to dark."""
    strategies, colors = sorted({Strategy.parse(text) for text in texts}), {}
    for kind in KINDS.values():
        of_kind = [strategy for strategy in strategies if strategy.drafting is kind]
        shades = LinearSegmentedColormap.from_list(kind.name, list(kind.colors))
        for position, strategy in enumerate(of_kind):
            share = position / (len(of_kind) - 1) if len(of_kind) > 1 else 0.6
            colors[str(strategy)] = to_hex(shades(share))
    return colors


def new_figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """An empty figure of one chart, in the common style, without the global state of pyplot."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(_GREY)  # visible on a dark page too
    axes.tick_params(color=_GREY)
    for axis, label in ((axes.xaxis, x_label), (axes.yaxis, y_label)):
        if label in WHOLE:
            axis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _legend_below(figure: Figure) -> None:
    """A legend below the axes, which the data fill."""
    sizes = {"ncols": 3, "columnspacing": 1, "handlelength": 1.4}  # fit `to_svg`
    figure.legend(loc="outside lower center", frameon=False, **sizes)


def to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element whose text is text and whose background is the page's."""
    figure.set_size_inches(5.6, 3.4)  # its text is readable on a phone
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    return text[text.index("<svg") :]
