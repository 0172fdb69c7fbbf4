"""The report as one self-contained HTML page: no script, no network."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from ..config.strategy import Strategy
from ..records.plots import strategy_colors
from . import figures
from .data import Record, RunData, is_number

ENDS = 5  # steps averaged at each end of a run
MAX_TEXT = 3000  # characters of a prompt or a response
MAX_SAMPLES = 6  # of a step
# Even a response that slipped through unescaped could load and run nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(runs: Sequence[RunData], refresh_s: int = 0) -> str:
    """The page.

    Args:
        runs: one, or several to compare.
        refresh_s: seconds after which a browser reads the page again; 0 = never.
    """
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    names = " · ".join(run.name for run in runs)
    sections = [
        _missing(runs),
        _tiles(runs),
        _reward(runs),
        _step_times(runs),
        _active(runs),
        _lengths(runs),
        _training(runs),
        _drafting(runs),
        _arms(runs),
        _memory(runs),
        _samples(runs),
        _settings(runs),
    ]
    written = datetime.datetime.now().isoformat(" ", timespec="minutes")
    places = ", ".join(str(run.path) for run in runs)
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"{refresh}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(names)}</title>'
        f'<style>\n{style}</style></head>\n<body><main class="{"several" * (len(runs) > 1)}">'
        f"{_header(runs)}\n{chr(10).join(filter(None, sections))}\n"
        f"<footer>Written {written} from {escape(places)}</footer></main></body></html>\n"
    )


def _header(runs: Sequence[RunData]) -> str:
    title = "Training run" if len(runs) == 1 else f"{len(runs)} training runs"
    lines = "".join(f"<p>{_named(run, i)} {_about(run)}</p>" for i, run in enumerate(runs))
    return f"<header><h1>{title}</h1>{lines}</header>"


def _named(run: RunData, index: int) -> str:
    return f"<b{_run_class(index)}>{escape(run.name)}</b>"


def _run_class(index: int) -> str:
    return f' class="run" style="--run:{figures.RUN_COLORS[index]}"'


def _about(run: RunData) -> str:
    seconds = max(run.seconds().values(), default=0.0)
    parts = [f"{len(run.steps())} steps in {seconds:.0f} s"]
    keys = ("preset", "model.path", "task.name", "run.device", "run.seed")
    parts += [f"{key} {run.config[key]}" for key in keys if key in run.config]
    return f'<span class="soft">{escape(" · ".join(parts))}</span>'


def _missing(runs: Sequence[RunData]) -> str:
    notes = [f"<li>{escape(run.name)}: {escape(n)}</li>" for run in runs for n in run.notes]
    if not notes:
        return ""
    return f'<section class="missing"><h2>Not shown</h2><ul>{"".join(notes)}</ul></section>'


def _section(title: str, about: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p class="soft">{about}</p>{body}</section>' if body else ""


def _columns(runs: Sequence[RunData], bodies: Sequence[str]) -> str:
    """One column a run; runs without a body say so."""
    if not any(bodies):
        return ""
    nothing = '<p class="soft">no data</p>'
    cells = [
        f"<div>{f'<h3>{_named(run, i)}</h3>' if len(runs) > 1 else ''}{body or nothing}</div>"
        for i, (run, body) in enumerate(zip(runs, bodies, strict=True))
    ]
    return f'<div class="columns">{"".join(cells)}</div>'


def _beside(parts: Iterable[str]) -> str:
    """Parts next to each other where there is room; those without data are left out."""
    cells = "".join(f"<div>{part}</div>" for part in parts if part)
    return f'<div class="columns">{cells}</div>' if cells else ""


# ---- sections -----------------------------------------------------------------------------------


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


def _tiles(runs: Sequence[RunData]) -> str:
    tiles = []
    for metric, (label, unit) in TILES.items():
        values = [_ends(run, metric) for run in runs]
        if any(values):
            lines = "".join(
                f"<b{_run_class(i) if len(runs) > 1 else ''}>{value or '-'} <i>{unit}</i></b>"
                for i, value in enumerate(values)
            )
            tiles.append(f'<div class="tile"><small>{label}</small>{lines}</div>')
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _ends(run: RunData, metric: str) -> str:
    """Means of the first and of the last few values, at most half of them."""
    values = [value for _, value in run.series(metric)]
    few = max(1, min(ENDS, len(values) // 2))
    ends = dict.fromkeys(
        short(statistics.mean(some)) for some in (values[:few], values[-few:]) if some
    )
    return " <i>→</i> ".join(ends)


def _reward(runs: Sequence[RunData]) -> str:
    metric, label, held_out = "critic/rewards/mean", "mean reward", "eval/accuracy"
    charts = [
        figures.curves(runs, metric, label, smooth=ENDS, dots=held_out, wall=wall)
        for wall in (False, True)
    ]
    about = f"Faint: each step; strong: mean of {ENDS} steps; dots: accuracy on held-out prompts."
    return _section("Reward", about, _beside(charts))


TRAINING = {
    "actor/pg_loss": "policy loss",
    "actor/entropy": "entropy (nats a token)",
    "actor/ppo_kl": "KL to the policy that sampled (nats a token)",
    "actor/ref_kl": "KL to the reference (nats a token)",
    "actor/grad_norm": "gradient norm before clipping",
    "actor/pg_clipfrac": "share of clipped tokens",
}


def _training(runs: Sequence[RunData]) -> str:
    charts = [figures.curves(runs, metric, label) for metric, label in TRAINING.items()]
    return _section("Policy update", "Means over the updates of each step.", _beside(charts))


def _step_times(runs: Sequence[RunData]) -> str:
    about = "Seconds of each step by phase, loading and the supervised warm-up left out."
    return _section("Step time", about, _columns(runs, figures.step_times(runs)))


def _active(runs: Sequence[RunData]) -> str:
    parts = [
        [f"<h3>Step {step}</h3>{chart}" for step, chart in charts]
        for charts in figures.active_requests(runs)
    ]
    body = _beside(parts[0]) if len(runs) == 1 else _columns(runs, ["".join(p) for p in parts])
    about = (
        "Requests still active over the time of a rollout, coloured by the strategy that decodes "
        "them: the first step and the last, on one time axis."
    )
    return _section("The long tail", about, body)


def _lengths(runs: Sequence[RunData]) -> str:
    about = f"Responses of the last {figures.LAST_STEPS} steps."
    return _section("Response lengths", about, _columns(runs, figures.lengths(runs)))


def _drafting(runs: Sequence[RunData]) -> str:
    charts = (
        figures.curves(runs, "spec/accept_length", "tokens emitted per speculative pass"),
        figures.curves(runs, "drafter/loss", "loss of the drafter"),
    )
    about = (
        "Accept length is of speculative passes, the target's own token included; at 1 drafting is "
        "useless. Steps without such passes, and steps without drafter training, leave gaps."
    )
    return _section("Drafting", about, _beside(charts))


def _arms(runs: Sequence[RunData]) -> str:
    about = (
        "How often the bandit chose each strategy with so many active requests, and the tokens per "
        "second that it measured. Bold: the fastest for that many requests."
    )
    return _section("Strategies", about, _columns(runs, [_arm_cells(run) for run in runs]))


def _arm_cells(run: RunData) -> str:
    arms: dict[tuple[int, str], tuple[float, float]] = {}
    for record in reversed(run.records):
        arms = _arms_of(record)
        if arms:
            break
    if not arms:
        return ""
    buckets = sorted({bucket for bucket, _ in arms})
    colors = strategy_colors(name for _, name in arms)
    pulled = {b: sum(pulls for (at, _), (pulls, _) in arms.items() if at == b) for b in buckets}
    fastest = {b: max(speed for (at, _), (_, speed) in arms.items() if at == b) for b in buckets}
    rows = []
    for name, color in colors.items():
        cells = []
        for bucket in buckets:
            if (bucket, name) not in arms:
                cells.append("<div></div>")
                continue
            pulls, speed = arms[bucket, name]
            tint = round(8 + 72 * pulls / (pulled[bucket] or 1))
            best = ' class="best"' if speed == fastest[bucket] else ""
            shade = f"background:color-mix(in srgb, {color} {tint}%, transparent)"
            cells.append(
                f'<div{best} style="{shade}"><small>≤ {bucket}</small>{short(pulls)}'
                f"<small>{short(speed)}/s</small></div>"
            )
        rows.append(f'<h3>{escape(name)}</h3><div class="cells">{"".join(cells)}</div>')
    return f'<div class="arms">{"".join(rows)}</div>'


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


def _memory(runs: Sequence[RunData]) -> str:
    charts = (
        figures.curves(runs, "perf/max_memory_resident_gb", "peak resident memory (GB)"),
        figures.curves(runs, "perf/max_memory_allocated_gb", "peak of the card, allocated (GB)"),
    )
    return _section("Memory", "Peaks up to each step, of the main process.", _beside(charts))


def _samples(runs: Sequence[RunData]) -> str:
    bodies = []
    for run in runs:
        steps = sorted({r["step"] for r in run.samples})
        parts = []
        for step in dict.fromkeys(steps[-1:] + steps[:1]):
            some = [_sample(r) for r in run.samples if r["step"] == step][:MAX_SAMPLES]
            parts.append(f"<h3>Step {step}</h3>{''.join(some)}")
        bodies.append(_beside(parts))
    about = "Responses of the last step and of the first, as they were sampled."
    body = _columns(runs, bodies) if len(runs) > 1 else bodies[0]
    return _section("Samples", about, body)


def _sample(record: Record) -> str:
    reward = record.get("reward")
    full = ' class="full"' if is_number(reward) and reward >= 1 else ""
    shown = f"{reward:.3g}" if is_number(reward) else "-"
    head = [
        escape(str(record.get("prompt_id", ""))),
        f"<b{full}>reward {shown}</b>",
        f"{escape(str(record.get('num_tokens', '-')))} tokens",
        f"ended by {escape(str(record.get('finish', '-')))}",
    ]
    return (
        f"<article><header>{''.join(f'<span>{part}</span>' for part in head)}</header>"
        f'<pre class="prompt">{_text(record.get("prompt", ""))}</pre>'
        f"<pre>{_response(record)}</pre></article>"
    )


def _response(record: Record) -> str:
    """The response, with the answers of tools marked."""
    parts = record.get("parts")
    if not isinstance(parts, list):
        return _text(record.get("response", ""))
    return "".join(f"<mark>{_text(p)}</mark>" if i % 2 else _text(p) for i, p in enumerate(parts))


def _text(value: Any) -> str:
    text = str(value)
    return escape(text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …")


def _settings(runs: Sequence[RunData]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return ""
    differ = {key for key in keys if len({str(run.config.get(key)) for run in runs}) > 1}
    head = "".join(f"<th>{_named(run, i)}</th>" for i, run in enumerate(runs))

    def table(some: Sequence[str]) -> str:
        rows = "".join(
            f"<tr{' class=changed' * (key in differ)}><td>{escape(key)}</td>"
            + "".join(f"<td>{_value(run.config.get(key))}</td>" for run in runs)
            + "</tr>"
            for key in some
        )
        return f"<table><tr><th>setting</th>{head}</tr>{rows}</table>"

    shown = table([key for key in keys if key in differ]) if differ else ""
    every = f"<details><summary>All {len(keys)} settings</summary>{table(keys)}</details>"
    about = "What differs between the runs, then everything." if len(runs) > 1 else ""
    return _section("Settings", about, shown + every)


def _value(value: Any) -> str:
    if value is None:
        return '<span class="soft">-</span>'
    return escape(" ".join(map(str, value)) if isinstance(value, list) else str(value))


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
