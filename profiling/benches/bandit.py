"""Offline replay of a recorded rollout: the regret of each policy of choosing strategies.

Needs no card: each choice is answered by measured passes of `rollout-recording.json` (`bench
rollout`). `median_us` is the replayed time of the trace's tail, `regret` the share of it that the
best strategy of each bucket would have saved, in the first rollout and after `LATER` of them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from driver.config.sections import BanditConfig
from driver.config.strategy import Strategy
from driver.rollout.bandit import Bandit
from profiling.rig.bench import Bench
from profiling.rig.results import RESULTS, newest_first
from profiling.rig.workload import Recording, Replay, replay, trace_lengths, work_of

NEEDS_CUDA = False
LATER = 5
EPSILONS = [0.05, 0.1, 0.2]
SEEDS = 5


def recording_path() -> Path | None:
    """The newest recording; None where there is none."""
    return next(iter(newest_first(RESULTS, "rollout", "rollout-recording.json")), None)


def policies(recording: Recording) -> dict[str, BanditConfig]:
    """Name -> settings of the bandit."""
    base = BanditConfig(buckets=recording.buckets)
    out = {f"beg {e}": replace(base, epsilon=e) for e in EPSILONS}
    out["ucb"] = replace(base, policy="ucb")
    best = " ".join(f"{bucket}={strategy}" for bucket, strategy in recording.oracle().items())
    out["map"] = replace(base, policy=best)
    for strategy in sorted({strategy for _, strategy in recording.cells}):
        out[f"static {strategy}"] = replace(base, policy=strategy)
    return out


def rollouts(
    recording: Recording, config: BanditConfig, work: list[tuple[int, int]], seed: int
) -> list[Replay]:
    """`LATER` rollouts with one bandit."""
    arms = [Strategy.parse(s) for s in sorted({s for _, s in recording.cells})]
    bandit = Bandit(arms, config, max(recording.buckets), seed)
    return [replay(bandit, recording, work) for _ in range(LATER)]


def lacks() -> str:
    if recording_path() is None:
        return "no rollout-recording.json: run python -m profiling.bench rollout on a card"
    return ""


def run(bench: Bench) -> None:
    path = recording_path()
    if path is None:
        raise SystemExit(lacks())
    evaluate(bench, Recording.from_json(json.loads(path.read_text())))


def evaluate(bench: Bench, recording: Recording) -> None:
    """A row and the pulls of each policy."""
    most = max(recording.buckets)
    work = [w for w in work_of(trace_lengths(), len(trace_lengths())) if w[0] <= most]
    work = [w for w in work if recording.strategies(recording.bucket(w[0]))]
    pulls = {}
    for name, config in policies(recording).items():
        if not bench.wanted(name):
            continue
        seeds = range(1 if config.fixed() is not None else SEEDS)
        runs = [rollouts(recording, config, work, seed) for seed in seeds]
        bench.add_row(
            name,
            1e6 * sum(r[-1].seconds for r in runs) / len(runs),
            regret_first=round(sum(r[0].regret for r in runs) / len(runs), 4),
            regret=round(sum(r[-1].regret for r in runs) / len(runs), 4),
        )
        counted = sum((one.pulls for one in runs[0]), start=Counter())
        pulls[name] = [[b, s, n] for (b, s), n in sorted(counted.items())]
    bench.files["pulls"] = pulls
