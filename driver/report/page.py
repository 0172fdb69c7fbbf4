"""The report as one self-contained HTML page: no script, no network."""

import datetime
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from ..common.storage import write_text
from ..config.strategy import Strategy
from . import figures
from .data import Record, RunData, is_number, read_run

ENDS = 5  # steps averaged at each end of a run
MAX_TEXT = 3000  # characters of a prompt or a response
MAX_SAMPLES = 6  # of a step
ABOUT = ("preset", "model.path", "task.name", "run.device", "run.seed")  # settings in the header
TILES = {
    "critic/rewards/mean": ("Reward", ""),
    "eval/accuracy": ("Held-out accuracy", ""),
    "spec/accept_length": ("Accept length", ""),
    "response_length/max": ("Longest response", ""),
    "perf/throughput": ("Generation", "tok/s"),
    "timing_s/step": ("Step", "s"),
    "perf/max_memory_resident_gb": ("Peak memory", "GB"),
    "perf/max_memory_allocated_gb": ("Memory of the card", "GB"),
}
TRAINING = {
    "actor/pg_loss": "policy loss",
    "actor/entropy": "entropy (nats a token)",
    "actor/ppo_kl": "KL to the policy that sampled (nats a token)",
    "actor/ref_kl": "KL to the reference (nats a token)",
    "actor/grad_norm": "gradient norm before clipping",
    "actor/pg_clipfrac": "share of clipped tokens",
}
DRAFTING = {
    "spec/accept_length": "tokens emitted per speculative pass",
    "drafter/loss": "loss of the drafter",
}
MEMORY = {
    "perf/max_memory_resident_gb": "peak resident memory (GB)",
    "perf/max_memory_allocated_gb": "peak of the card, allocated (GB)",
}


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Writes the page of some run folders; UserError if one has no run, or it cannot be written."""
    # Half a surrogate pair, from a response cut in the middle, becomes a question mark.
    page = render(list(map(read_run, folders))).encode("utf-8", errors="replace")
    write_text(out, page.decode("utf-8"))


def render(runs: Sequence[RunData]) -> str:
    """The page of one run, or of several to compare."""
    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.filters.update(short=short, cut=_cut, value=_value, parts=_parts)
    templates.tests["finite"] = is_number

    def curves(metrics: dict[str, str]) -> list[Markup]:
        return [figures.curves(runs, metric, label) for metric, label in metrics.items()]

    reward = partial(figures.curves, runs, "critic/rewards/mean", "mean reward", smooth=ENDS)
    tails = figures.active_requests(runs)
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    ends = {metric: [_ends(run, metric) for run in runs] for metric in TILES}
    return templates.get_template("page.html").render(
        runs=runs,
        colors=figures.RUN_COLORS,
        about=ABOUT,
        nothing=Markup('<p class="soft">no data</p>'),
        tiles=[(*TILES[metric], values) for metric, values in ends.items() if any(values)],
        ends=ENDS,
        last_steps=figures.LAST_STEPS,
        reward=[reward(dots="eval/accuracy", wall=wall) for wall in (False, True)],
        step_times=figures.step_times(runs),
        tails=tails[0] if len(runs) == 1 else [Markup().join(charts) for charts in tails],
        lengths=figures.lengths(runs),
        training=curves(TRAINING),
        drafting=curves(DRAFTING),
        memory=curves(MEMORY),
        arms=[_arms(run) for run in runs],
        samples=[_samples(run) for run in runs],
        keys=keys,
        differ=[key for key in keys if len({str(run.config.get(key)) for run in runs}) > 1],
        now=datetime.datetime.now().isoformat(" ", timespec="minutes"),
    )


def _ends(run: RunData, metric: str) -> list[str]:
    """Means of the first and of the last few values, at most half of them."""
    values = [value for _, value in run.series(metric)]
    few = max(1, min(ENDS, len(values) // 2))
    means = [statistics.mean(some) for some in (values[:few], values[-few:]) if some]
    return list(dict.fromkeys(map(short, means)))


def _arms(run: RunData) -> list[tuple[str, str, list[dict[str, Any] | None]]]:
    """(strategy, colour, a cell for each batch size) of the last step with a bandit."""
    arms = next(filter(None, map(_arms_of, reversed(run.records))), {})
    buckets = sorted({bucket for bucket, _ in arms})
    pulled = {b: sum(pulls for (at, _), (pulls, _) in arms.items() if at == b) for b in buckets}
    fastest = {b: max(speed for (at, _), (_, speed) in arms.items() if at == b) for b in buckets}

    def cell(bucket: int, name: str) -> dict[str, Any] | None:
        if (bucket, name) not in arms:
            return None
        pulls, speed = arms[bucket, name]
        tint = round(8 + 72 * pulls / (pulled[bucket] or 1))  # percent
        best = speed == fastest[bucket]
        return {"bucket": bucket, "pulls": pulls, "speed": speed, "tint": tint, "best": best}

    colors = figures.strategy_colors(name for _, name in arms)
    return [(name, color, [cell(b, name) for b in buckets]) for name, color in colors.items()]


def _arms_of(record: Record) -> dict[tuple[int, str], tuple[float, float]]:
    """(bucket, strategy) -> (pulls, tokens per second), of `spec/arm/<bucket>/<strategy>/...`."""
    arms = {}
    for key, pulls in record.items():
        parts = key.split("/")
        if parts[:2] != ["spec", "arm"] or len(parts) != 5 or parts[4] != "pulls":
            continue
        speed = record.get("/".join([*parts[:4], "reward"]))
        if pulls is not None and speed is not None:
            arms[int(parts[2]), str(Strategy.parse(parts[3]))] = (pulls, speed)
    return arms


def _samples(run: RunData) -> dict[float, list[Record]]:
    """Step -> some of its responses, of the last step and of the first."""
    steps = sorted({r["step"] for r in run.samples})
    shown = dict.fromkeys(steps[-1:] + steps[:1])
    return {s: [r for r in run.samples if r["step"] == s][:MAX_SAMPLES] for s in shown}


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "-" if value is None else str(value)


def _parts(sample: Record) -> list[Any]:
    """The turns and the answers of tools in turn; without tools, the response."""
    parts = sample.get("parts")
    return parts if isinstance(parts, list) else [sample.get("response", "")]


def short(value: float) -> str:
    """A number in a few characters.

    Example:
        >>> short(12500), short(0.25), short(3.0)
        ('12.5k', '0.25', '3')
    """
    for limit, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
