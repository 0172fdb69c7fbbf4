"""Figures of a run: PNG files in its folder, and SVG in its report."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..common.storage import storage_errors
from ..config.strategy import KINDS, Strategy
from .phases import PHASES, StepTimes

Records = Sequence[Mapping[str, Any]]
Passes = Sequence[tuple[float, int, str]]

TRAIN_REWARD = "critic/rewards/mean"
HELD_OUT = "eval/accuracy"
ACCEPT_LENGTH = "spec/accept_length"
SMOOTH = 5  # steps of a moving mean
MAX_BARS = 80  # of step times
MAX_MARKERS = 100  # of a curve
WHOLE = ("step", "responses", "active requests")  # axes of integers

_BLUE, _ORANGE, _GREY = "#2563ab", "#d1641b", "#8a8f98"
# Colours of the phases of a step, in order, and of the rest.
PHASE_COLORS = ("#2563ab", "#9cc9ea", "#f2c48d", "#d1641b", "#4f9d69", "#7a5ea8", "#c9ccd1")


def plot_rewards(records: Records) -> Figure:
    """Training reward and held-out accuracy by step, from lines of `metrics.jsonl`."""
    figure, axes = new_figure("Reward by step", "step", "mean reward, share correct")
    draw_curve(axes, *with_gaps(records, TRAIN_REWARD), label="train", smooth=SMOOTH)
    found = [(r["step"], r[HELD_OUT]) for r in records if r.get(HELD_OUT) is not None]
    if found:
        axes.plot(*zip(*found, strict=True), color=_ORANGE, marker="o", label="held out")
    return _finished(figure, axes)


def plot_lengths(lengths: Sequence[float], limit: int | None = None) -> Figure:
    """Histogram of response lengths in tokens with p50, p75, the maximum, and those at `limit`."""
    figure, axes = new_figure("Response lengths", "response length (tokens)", "responses")
    if lengths:
        longest = round(max(lengths))
        axes.hist(lengths, bins=_bins(longest), color=_BLUE, alpha=0.7)
        p50, p75 = np.percentile(lengths, (50, 75))
        for name, value, style in (("p50", p50, "-"), ("p75", p75, "--"), ("max", longest, ":")):
            label = f"{name} = {value:.0f}"
            axes.axvline(value, color=_ORANGE, linestyle=style, linewidth=1.8, label=label)
        title = f"Response lengths: {len(lengths)} responses"
        if limit is not None:
            title += f", {sum(n >= limit for n in lengths)} at the limit of {limit}"
        axes.set_title(title)
        axes.set_xlim(left=0)
    return _finished(figure, axes)


def plot_active(passes: Passes, colors: Mapping[str, str] | None = None) -> Figure:
    """Active requests over the time of one rollout, coloured by strategy: the long tail.

    Args:
        passes: (seconds since the rollout's start, active requests, strategy), by rising time; the
            last entry is the end of the rollout.
        colors: of the strategies; None = those of `strategy_colors`.
    """
    figure, axes = new_figure("Active requests in one rollout", "time (s)", "active requests")
    if len(passes) > 1:
        times, active, names = zip(*passes, strict=True)
        seconds = dict.fromkeys(names[:-1], 0.0)
        for name, begin, end in zip(names, times, times[1:], strict=False):
            seconds[name] += end - begin
        for name, color in (colors or strategy_colors(seconds)).items():
            if name in seconds:
                height = np.where(np.array(names) == name, active, 0)
                label = f"{name} ({seconds[name]:.1f} s)"
                axes.fill_between(times, height, step="post", color=color, linewidth=0, label=label)
        axes.step(times, active, where="post", color="#555b66", linewidth=0.8)
        axes.set_xlim(0, times[-1] or None)
        axes.set_ylim(bottom=0)
    return _finished(figure, axes, below=True)


def plot_accept_length(records: Records) -> Figure:
    """Mean tokens emitted per speculative pass, from lines of `metrics.jsonl`."""
    title = "Accept length by step"
    figure, axes = new_figure(title, "step", "tokens emitted per speculative pass")
    draw_curve(axes, *with_gaps(records, ACCEPT_LENGTH), label="accept length")
    return _finished(figure, axes)


def plot_step_times(records: Records) -> Figure:
    """Seconds of each phase of each step, stacked; neighbouring steps of a long run share a bar."""
    figure, axes = new_figure("Where a step's time goes", "step", "seconds")
    timed = [r for r in records if r["step"] > 0 and r.get("timing_s/step") is not None]
    if timed:
        times = [StepTimes.of(r) for r in timed]
        parts = {name: [t.phases[name] for t in times] for name in PHASES}
        parts["other"] = [t.other + t.unaccounted for t in times]
        whole = sum(map(sum, parts.values())) or 1.0
        firsts = range(0, len(timed), -(-len(timed) // MAX_BARS))
        left = np.array([timed[first]["step"] for first in firsts]) - 0.425
        widths = np.diff(left, append=timed[-1]["step"] + 0.575) - 0.15
        below = np.zeros(len(firsts))
        for (name, seconds), color in zip(parts.items(), PHASE_COLORS, strict=True):
            height = np.array([np.mean(seconds[f : f + firsts.step]) for f in firsts])
            if height.any():
                label = f"{name} {sum(seconds) / whole:.0%}"
                axes.bar(left, height, widths, below, color=color, align="edge", label=label)
            below += height
    return _finished(figure, axes, below=True)


def with_gaps(records: Records, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric; an absent value is NaN, which leaves a gap in a curve."""
    values = [r[name] if r.get(name) is not None else np.nan for r in records]
    return np.array([r["step"] for r in records], float), np.array(values, float)


def draw_curve(
    axes: Axes,
    x: np.ndarray,
    values: np.ndarray,
    color: str = _BLUE,
    label: str = "",
    smooth: int = 1,
    line: str = "-",
) -> None:
    """Draws values, if any is finite; with `smooth` faintly, and the mean of so many over them."""
    if not np.isfinite(values).any():
        return
    marker = "." if len(values) <= MAX_MARKERS else ""
    smooth = smooth if len(values) >= smooth else 1
    look: dict[str, Any] = {"alpha": 0.35, "linewidth": 1} if smooth > 1 else {"linewidth": 1.8}
    axes.plot(x, values, line, color=color, marker=marker, label=label, **look)
    if smooth > 1:
        mean = np.convolve(values, np.ones(smooth) / smooth, mode="valid")
        text = f"{label}, mean of last {smooth}"
        axes.plot(x[smooth - 1 :], mean, line, color=color, linewidth=2, label=text)


def _bins(longest: int) -> list[float]:
    """At most 60 bins, each a whole number of tokens wide."""
    width = -(-longest // 60)
    return np.arange(0.5, longest + width + 0.5, width).tolist()


def strategy_colors(texts: Iterable[str]) -> dict[str, str]:
    """A colour for each strategy in `texts`, by kind, from light (small trees) to dark."""
    strategies, colors = sorted({Strategy.parse(text) for text in texts}), {}
    for kind in KINDS.values():
        of_kind = [strategy for strategy in strategies if strategy.drafting is kind]
        shades = LinearSegmentedColormap.from_list(kind.name, kind.colors)
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


def _finished(figure: Figure, axes: Axes, *, below: bool = False) -> Figure:
    """Adds a legend, below the axes if the data fill them; without data, a text."""
    if not axes.get_legend_handles_labels()[0]:
        axes.text(0.5, 0.5, "no data yet", ha="center", va="center", transform=axes.transAxes)
    elif below:
        sizes = {"ncols": 3, "columnspacing": 1, "handlelength": 1.4}  # fit `to_svg`
        figure.legend(loc="outside lower center", frameon=False, **sizes)
    else:
        axes.legend(frameon=False)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG; raises UserError if it cannot be written."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element whose text is text and whose background is the page's."""
    figure.set_size_inches(5.6, 3.4)  # its text is readable on a phone
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    return text[text.index("<svg") :]
