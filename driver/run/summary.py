"""The summary of a finished run: summary.json, closing lines."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from ..common.memory import CARD_MEMORY, peak_memory_gb
from ..records.folder import read_jsonl
from ..records.phases import PHASES, StepTimes
from .run import Run
from .warm_start import start_fingerprints

ENDS = 5  # steps averaged at each end of the run


def summarize(run: Run) -> dict[str, Any]:
    """The numbers of `summary.json`: of the whole run, except the peak memory of this process."""
    assert run.folder is not None  # only the first rank has one
    records = read_jsonl(run.folder.path / "metrics.jsonl")
    steps = [r for r in records if r["step"] > 0]
    rewards = [r["critic/rewards/mean"] for r in steps]
    accepts = [a for r in records if (a := r.get("spec/accept_length")) is not None]
    heldout = [run.evaluations[step] for step in sorted(run.evaluations)]
    spot = run.rollout.spot
    return {
        "preset": run.config.preset,
        "warm_start": start_fingerprints(run.config),
        "steps": run.step,
        "reward": _ends(rewards),
        "heldout_accuracy": {
            "before": run.evaluations.get(0),
            "after": heldout[-1] if heldout else None,
        },
        "correct_length": {
            f"p{q}": float(np.percentile(run.correct, q)) if run.correct else None
            for q in (50, 75, 99, 100)
        },
        "clip_ratio": _over(statistics.mean, [r["response_length/clip_ratio"] for r in steps]),
        "tokens": run.tokens,
        "target_passes": run.target_passes,
        "accept_length": _ends(accepts),
        "drafter_version": spot.runner.version if spot else 0,
        "arms": run.rollout.bandit.metrics(),
        "reprefilled_tokens": sum(r.get("spec/reprefilled_tokens", 0) for r in records),
        "peak_memory_gb": peak_memory_gb(),
        "card_memory_gb": max((r[CARD_MEMORY] for r in records if CARD_MEMORY in r), default=None),
        "tokens_per_s": _over(statistics.median, [r["perf/throughput"] for r in steps]),
        "step_s": _step_seconds(steps),
        "wall_s": run.phases.summary(),
    }


def _over(statistic: Callable[[list[float]], float], values: list[float]) -> float | None:
    return statistic(values) if values else None


def _step_seconds(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each phase of a step, of what no phase covers, and of the step."""
    times = [StepTimes.of(record) for record in steps]
    if not times:
        return {}
    out = {name: statistics.median(t.phases[name] for t in times) for name in PHASES}
    out["unaccounted"] = statistics.median(t.unaccounted for t in times)
    return out | {"step": statistics.median(t.total for t in times)}


def _ends(values: list[float]) -> dict[str, float | None]:
    """First, last, and the means of the first and the last few."""
    parts = {"first": values[:1], "last": values[-1:]}
    parts |= {"first_mean": values[:ENDS], "last_mean": values[-ENDS:]}
    return {name: _over(statistics.mean, part) for name, part in parts.items()}


def summary_lines(run: Run) -> list[str]:
    assert run.folder is not None
    summary = summarize(run)
    reward, accept = summary["reward"], summary["accept_length"]
    held = summary["heldout_accuracy"]
    card_gb = summary["card_memory_gb"]
    lines = [
        f"reward {_show(reward['first_mean'])} -> {_show(reward['last_mean'])}"
        f" (means of {min(ENDS, run.step)} steps),"
        f" held-out {_show(held['before'])} -> {_show(held['after'])}",
        f"accept length {_show(accept['first_mean'])} -> {_show(accept['last_mean'])},"
        f" {summary['tokens']} tokens in {summary['target_passes']} target passes,"
        f" drafter version {summary['drafter_version']}",
        f"wall {summary['wall_s']['wall']:.0f} s, peak memory {summary['peak_memory_gb']:.2f} GB"
        + ("" if card_gb is None else f", of the card {card_gb:.2f} GB"),
        *_time_lines(summary["step_s"], summary["wall_s"]),
        "arm (bucket/strategy)          windows   tokens/s",
    ]
    arms = summary["arms"]
    for key in arms:
        if key.endswith("/pulls"):
            name = key.removeprefix("spec/arm/").removesuffix("/pulls")
            rate = arms[key.removesuffix("pulls") + "reward"]
            lines.append(f"  {name:<28} {arms[key]:>7}   {rate:>8.0f}")
    return [*lines, f"see {run.folder.path}/ (report.html, summary.json, samples.txt)"]


def _time_lines(step_s: dict[str, float], wall_s: dict[str, float]) -> list[str]:
    """The table of the time by phase: of a step, of the whole run."""
    wall = wall_s["wall"]
    lines = ["phase            median step, s    s in all   of wall"]
    rows = {name: seconds for name, seconds in wall_s.items() if name != "unaccounted_share"}
    del rows["wall"]
    rows["unaccounted"] = wall_s["unaccounted_share"] * wall
    for name, seconds in rows.items():
        each = f"{step_s[name]:.3f}" if name in step_s else "-"
        lines.append(f"  {name:<19}{each:>10}{seconds:>12.1f}{seconds / wall:>10.1%}")
    each = f"{step_s['step']:.3f}" if step_s else "-"
    lines.append(f"  {'together':<19}{each:>10}{wall:>12.1f}")
    return lines


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
