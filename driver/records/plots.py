"""Figures of a run, drawn from `metrics.jsonl` and from records of one rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

TRAIN_REWARD = "critic/rewards/mean"
HELD_OUT = "eval/accuracy"
ACCEPT_LENGTH = "spec/accept_length"

_BLUE, _ORANGE, _GREY = "#2563ab", "#d1641b", "#8a8f98"
# States of a rank (driver/drafter/coordinator.py).
RANK_COLORS = {"busy": _BLUE, "idle": "#dfe2e6", "training": _ORANGE, "update": "#9db0a3"}
RANK_NAMES = {"busy": "rollout", "idle": "idle", "training": "drafter training", "update": "update"}
# The legend is below the axes if the data fills them.
_BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "columnspacing": 1.2}

# Colours of the phases of a step, in order, and of the rest.
PHASE_COLORS = ("#2563ab", "#9cc9ea", "#f2c48d", "#d1641b", "#4f9d69", "#7a5ea8", "#c9ccd1")


def plot_rewards(records: Records, path: Path) -> None:
    """Training reward and held-out accuracy by step.

    Args:
        records: lines of `metrics.jsonl`; absent and null values are left out.
        path: the PNG to write.

    Raises:
        UserError: the file cannot be written.

    Example:
        >>> plot_rewards([{"step": 1, "critic/rewards/mean": 0.5}], Path("r.png"))  # doctest: +SKIP
    """
    figure, axes = new_figure("Reward by step", "step", "mean reward, share correct")
    steps, train = _series(records, TRAIN_REWARD)
    if train:
        axes.plot(steps, train, color=_BLUE, alpha=0.35, linewidth=1, marker=".", label="train")
    if len(train) >= 5:
        smooth = np.convolve(train, np.ones(5) / 5, mode="valid")
        axes.plot(steps[4:], smooth, color=_BLUE, linewidth=2, label="train, mean of last 5")
    steps, held_out = _series(records, HELD_OUT)
    if held_out:
        axes.plot(steps, held_out, color=_ORANGE, linewidth=1.5, marker="o", label="held out")
    _finish(figure, axes, path, empty=not (train or held_out))


def plot_lengths(lengths: Sequence[int], limit: int, path: Path) -> None:
    """Histogram of response lengths with p50, p75 and the maximum marked.

    Args:
        lengths: tokens of each response, EOS included.
        limit: `sampling.max_new_tokens`.
        path: the PNG to write.

    Raises:
        UserError: the file cannot be written.

    Example:
        >>> plot_lengths([3, 5, 40], 64, Path("lengths.png"))  # doctest: +SKIP
    """
    figure, axes = new_figure("Response lengths", "response length (tokens)", "responses")
    if lengths:
        longest = max(lengths)
        axes.hist(lengths, bins=_bins(longest), color=_BLUE, alpha=0.7)
        at_limit = sum(length >= limit for length in lengths)
        marks = [
            (f"p50 = {np.percentile(lengths, 50):.0f}", np.percentile(lengths, 50), "-"),
            (f"p75 = {np.percentile(lengths, 75):.0f}", np.percentile(lengths, 75), "--"),
            (f"max = {longest}", longest, ":"),
        ]
        for label, value, style in marks:
            axes.axvline(value, color=_ORANGE, linestyle=style, linewidth=1.8, label=label)
        axes.set_title(
            f"Response lengths: {len(lengths)} responses, {at_limit} at the limit of {limit}"
        )
        axes.set_xlim(left=0)
    _finish(figure, axes, path, empty=not lengths)


def plot_active(passes: Sequence[tuple[float, int, str]], path: Path) -> None:
    """Active requests over the time of one rollout, coloured by strategy: the long tail.

    Args:
        passes: (seconds since the rollout's start, active requests, strategy), by rising time; each
            holds until the next. The last entry is the end of the rollout.
        path: the PNG to write.

    Raises:
        UserError: the file cannot be written.

    Example:
        >>> plot_active([(0.0, 8, "off"), (1.5, 2, "ngram:4,1,5"), (2.0, 0, "off")],
        ...             Path("active.png"))  # doctest: +SKIP
    """
    figure, axes = new_figure("Active requests in one rollout", "time (s)", "active requests")
    shown = [text for _, _, text in passes[:-1]]
    colors = strategy_colors(shown)
    for text, color in colors.items():
        start = [here[0] for here in passes[:-1] if here[2] == text]
        width = [
            after[0] - here[0]
            for here, after in zip(passes, passes[1:], strict=False)
            if here[2] == text
        ]
        height = [here[1] for here in passes[:-1] if here[2] == text]
        label = f"{text} ({sum(width):.1f} s)"
        axes.bar(start, height, width, align="edge", color=color, linewidth=0, label=label)
    if passes:
        times, active = [p[0] for p in passes], [p[1] for p in passes]
        axes.step(times, active, where="post", color="black", linewidth=0.8)
        axes.set_xlim(0, times[-1] or None)
        axes.set_ylim(bottom=0)
    _finish(figure, axes, path, empty=not shown, legend=_BELOW | {"ncols": 4})


def plot_accept_length(records: Records, path: Path) -> None:
    """Mean tokens emitted per speculative pass, by step.

    Args:
        records: lines of `metrics.jsonl`.
        path: the PNG to write.

    Raises:
        UserError: the file cannot be written.

    Example:
        >>> plot_accept_length([{"step": 1, "spec/accept_length": 2.1}], Path("a.png"))
        ... # doctest: +SKIP
    """
    figure, axes = new_figure(
        "Accept length by step", "step", "tokens emitted per speculative pass"
    )
    _, values = _series(records, ACCEPT_LENGTH)
    if values:
        steps = [record["step"] for record in records]
        # A step without speculation is a gap.
        shown = [r[ACCEPT_LENGTH] if _present(r, ACCEPT_LENGTH) else np.nan for r in records]
        axes.plot(steps, shown, color=_BLUE, linewidth=1.8, marker=".", label="accept length")
        axes.axhline(1, color=_GREY, linestyle="--", linewidth=1, label="1: drafting is useless")
        axes.set_ylim(bottom=min(0.9, min(values)), top=max(values) * 1.08)
    _finish(figure, axes, path, empty=not values)


def plot_step_times(records: Records, path: Path) -> None:
    """Seconds of each phase of each step, stacked; evaluations and checkpoints are left out.

    Args:
        records: lines of `metrics.jsonl`.
        path: the PNG to write.

    Raises:
        UserError: the file cannot be written.

    Example:
        >>> plot_step_times([{"step": 1, "timing_s/gen": 2.0, "timing_s/step": 2.5}], Path("t.png"))
        ... # doctest: +SKIP
    """
    figure, axes = new_figure("Where a step's time goes", "step", "seconds")
    timed = [r for r in records if r["step"] > 0 and _present(r, "timing_s/step")]
    steps, times = [r["step"] for r in timed], [StepTimes.of(r) for r in timed]
    below = np.zeros(len(steps))
    for name, color in zip((*PHASES, "other"), PHASE_COLORS, strict=True):
        rest = name == "other"
        height = np.array([t.other + t.unaccounted if rest else t.phases[name] for t in times])
        if height.any():
            axes.bar(steps, height, bottom=below, width=0.85, color=color, label=name)
        below += height
    _finish(figure, axes, path, empty=not timed, legend=_BELOW | {"ncols": 7})


def plot_ranks(states: Mapping[str, Sequence[tuple[float, str]]], path: Path) -> None:
    """What each rank did, a row a rank: rollout, idle, drafter training, update.

    Args:
        states: of `ranks.json`: rank -> (seconds, state from then on).
        path: the PNG to write.

    Raises:
        UserError: the file cannot be written.

    Example:
        >>> plot_ranks({"0": [(0.0, "busy"), (2.0, "idle")]}, Path("r.png"))  # doctest: +SKIP
    """
    figure, axes = new_figure("What each rank did", "seconds since the first rollout", "rank")
    ends = [changes[-1][0] for changes in states.values() if changes]
    for rank, changes in states.items():
        for (begin, state), (end, _) in zip(changes, changes[1:], strict=False):
            axes.barh(int(rank), end - begin, left=begin, height=0.7, color=RANK_COLORS[state])
    seen = {state for changes in states.values() for _, state in changes[:-1]}
    for state, color in RANK_COLORS.items():
        if state in seen:
            axes.barh(0, 0, color=color, label=RANK_NAMES[state])
    if seen:
        axes.set_yticks([int(rank) for rank in states])
        axes.set_xlim(0, max(ends))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
    _finish(figure, axes, path, empty=not seen, legend=_BELOW | {"ncols": len(RANK_COLORS)})


def _series(records: Records, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, where it is present and not null."""
    found = [(record["step"], record[name]) for record in records if _present(record, name)]
    return [step for step, _ in found], [value for _, value in found]


def _present(record: Mapping[str, Any], name: str) -> bool:
    return name in record and record[name] is not None


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
    axes = styled(figure.add_subplot())
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    return figure, axes


def styled(axes: Axes) -> Axes:
    """Axes with a light grid behind the data and without the upper and right edges."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _finish(
    figure: Figure,
    axes: Axes,
    path: Path,
    *,
    empty: bool,
    legend: Mapping[str, Any] | None = None,
) -> None:
    if empty:
        axes.text(0.5, 0.5, "no data yet", ha="center", va="center", transform=axes.transAxes)
    else:
        axes.legend(frameon=False, **(legend or {}))
    if axes.get_xlabel() == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.get_ylabel() in ("responses", "active requests"):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
