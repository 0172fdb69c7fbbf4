"""RL with a frozen drafter, one trained between passes, and one trained during them.

All arms use one warm start and one seed. Speculation changes no token, so every step of every arm
has the same responses, and accept lengths of a step differ by the drafter alone.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from driver.records.phases import StepTimes
from profiling.rig.bench import Bench
from profiling.studies.grpo_arms import ArmRun, identical_steps
from profiling.studies.grpo_runs import folder_of

SEED = 0
STEPS, LEAST_STEPS, LAST_STEPS = 80, 30, 10  # of a run; for the target; that it compares
ARMS = {"frozen": "off", "serial": "serial", "overlapped": "overlapped"}  # -> spot.mode
STRATEGY = "learned:8,4,32"
# Every pass is speculative and the policy moves fast. With a quarter of the preset's requests and
# 768 tokens a response, the steps of an arm take about a minute.
RL_WORDS = [
    "run.eval_prompts=0",
    "run.checkpoint_every=40",
    "sampling.max_new_tokens=768",
    f"engine.strategies=off {STRATEGY}",
    "engine.max_batch=64",
    "engine.spec_max_batch=64",
    "engine.spec_max_rows=0",
    "engine.num_pages=0",
    f"bandit.policy={STRATEGY}",
    "bandit.buckets=[1,4,16,64]",
    "spot.every=8",
    "spot.tokens_per_step=2048",
    "grpo.prompts_per_step=16",
    "grpo.samples_per_prompt=4",
    "grpo.lr=5e-5",
]


def arm_words(settings: Sequence[str]) -> dict[str, list[str]]:
    """Arm -> its settings over those of the warm start, without the keys that `settings` name."""
    named = {word.partition("=")[0] for word in settings}
    small = [word for word in RL_WORDS if word.partition("=")[0] not in named]
    return {arm: [*small, f"spot.mode={mode}"] for arm, mode in ARMS.items()}


def read_arms(runs: Path) -> dict[str, ArmRun]:
    """Arm -> its run, as far as there is one."""
    found = {arm: ArmRun.read(arm, SEED, folder_of(runs, arm, SEED)) for arm in ARMS}
    return {arm: run for arm, run in found.items() if run is not None}


def adaptive_over_frozen(bench: Bench, runs: Path) -> None:
    """A row for each arm over the steps that all have, and the target where these are enough."""
    arms = read_arms(runs)
    if not arms:
        return
    count = min(len(run.records) for run in arms.values())
    lengths = {arm: _last_mean(run.records[:count]) for arm, run in arms.items()}
    for arm, run in arms.items():
        more: dict[str, Any] = {"commit": run.commit} if run.commit else {}
        if "frozen" in arms:
            more["equal_steps"] = identical_steps(run, arms["frozen"])
        bench.add_row(
            f"RL, {arm}",
            1e6 * statistics.median(times.total for times in run.times),
            accept_length=round(lengths[arm], 4),
            steps=count,
            gen_s=round(run.seconds(lambda t: t.phases["gen"]) / len(run.records), 4),
            reward_first=run.rewards[0],
            reward_last=run.rewards[count - 1],
            **more,
        )
    trained = [length for arm, length in lengths.items() if arm != "frozen"]
    if count >= LEAST_STEPS and trained and "frozen" in lengths:
        ratio = max(trained) / lengths["frozen"]
        bench.got["adaptive_over_frozen_accept_x"] = round(ratio, 4)
        spent = {arm: _last_gen_s(run.times[:count]) for arm, run in arms.items()}
        fastest = min(spent[arm] for arm in spent if arm != "frozen")
        bench.got["adaptive_over_frozen_time_x"] = round(spent["frozen"] / fastest, 4)
        rows = bench.rows[-len(arms) :]  # whose commits may be older
        bench.sources |= dict.fromkeys([t for t in bench.got if t.startswith("adaptive")], rows)


def _last_mean(records: Sequence[Mapping[str, Any]]) -> float:
    """Accept length of the last steps; 1 without speculation."""
    found = [a for r in records[-LAST_STEPS:] if (a := r.get("spec/accept_length")) is not None]
    return statistics.fmean(found) if found else 1.0


def _last_gen_s(times: Sequence[StepTimes]) -> float:
    return sum(step.phases["gen"] for step in times[-LAST_STEPS:])
