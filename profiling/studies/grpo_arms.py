"""Arms of the GRPO benchmark as run folders: their settings, what their records say, ratios of two.

Pure but for reading files; `profiling.benches.grpo` makes the runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver.config.load import Config
from driver.config.strategy import parse_strategies
from driver.records.folder import read_jsonl
from driver.records.phases import PHASES, StepTimes

OTHER_START = "another warm start, or speculation changed a token: no ratios"
NO_DRAFTER = ("drafter.enabled=false", "spot.mode=off")
TRL = "trl"


def arm_words(config: Config, static: str = "") -> dict[str, list[str]]:
    """Arm -> the settings that make it, over those of the full system.

    Args:
        config: of the full system.
        static: the fixed strategy of `static`; empty = the middle one of its learned ones.

    Example:
        >>> arm_words(load_config(["preset=h100"]))["static"]
        ['engine.strategies=off learned:4,1,5', ...]
    """
    arms = parse_strategies(config.engine.strategies)
    learned = [str(arm) for arm in arms if arm.kind == "learned"]
    static = static or (learned[len(learned) // 2] if learned else str(arms[-1]))
    ngrams = " ".join(str(arm) for arm in arms if not arm.needs_drafter)
    return {
        "off": ["engine.strategies=off", *NO_DRAFTER],
        "ngram": [f"engine.strategies={ngrams}", *NO_DRAFTER],
        "static": [
            f"engine.strategies=off {static}",
            "bandit.policy=static",
            f"bandit.static={static}",
        ],
        "frozen": ["spot.mode=off"],
        "full": [],
    }


@dataclass(frozen=True)
class ArmRun:
    """What a run left of each step."""

    arm: str
    seed: int
    records: list[dict[str, Any]]
    lengths: list[list[int]]  # of all responses of each step
    heldout: list[float]  # before the first step, after the last
    policy: str = ""  # fingerprint of the warm start's, where the run came to its end

    @staticmethod
    def read(arm: str, seed: int, folder: Path) -> ArmRun | None:
        """None where nothing was logged yet."""
        lines = read_jsonl(folder / "metrics.jsonl")
        records = [line for line in lines if line["step"] > 0]
        if not records:
            return None
        rollouts = read_jsonl(folder / "rollouts.jsonl")
        heldout = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
        lengths = [line["lengths"] for line in rollouts]
        return ArmRun(arm, seed, records, lengths, heldout, warmed_policy(folder))

    @property
    def times(self) -> list[StepTimes]:
        return [StepTimes.of(record) for record in self.records]

    @property
    def rewards(self) -> list[float]:
        return [record["critic/rewards/mean"] for record in self.records]

    def seconds(self, part: Callable[[StepTimes], float] = lambda t: t.total) -> float:
        """Of all steps together."""
        return sum(part(times) for times in self.times)

    @property
    def gen_share(self) -> float:
        return self.seconds(lambda t: t.phases["gen"]) / self.seconds()

    @property
    def unaccounted_share(self) -> float:
        return self.seconds(lambda t: t.unaccounted) / self.seconds()

    @property
    def heldout_gain_points(self) -> float | None:
        return 100 * (self.heldout[-1] - self.heldout[0]) if len(self.heldout) > 1 else None

    def tokens(self) -> int:
        return sum(map(sum, self.lengths))

    def row(self) -> dict[str, Any]:
        """Means over the steps, and what explains them."""
        count, times = len(self.records), self.times
        totals = [t.total for t in times]
        out: dict[str, Any] = {
            "steps": count,
            "spread": round((max(totals) - min(totals)) / statistics.median(totals), 4),
            "makespan_s": round(self.seconds(), 3),
            "tokens_per_s": round(self.tokens() / self.seconds(), 1),
        }
        for name in PHASES:
            out[f"{name}_s"] = round(self.seconds(lambda t, n=name: t.phases[n]) / count, 4)
        out["other_s"] = round(self.seconds(lambda t: t.other) / count, 4)
        out["unaccounted_s"] = round(self.seconds(lambda t: t.unaccounted) / count, 4)
        out["gen_share"] = round(self.gen_share, 4)
        out["unaccounted_share"] = round(self.unaccounted_share, 5)
        out["reward_first"], out["reward_last"] = self.rewards[0], self.rewards[-1]
        if len(self.heldout) > 1:
            out["heldout_before"], out["heldout_after"] = self.heldout[0], self.heldout[-1]
        if self.policy:
            out["policy"] = self.policy
        return out | self._why(count)

    def _why(self, count: int) -> dict[str, float]:
        """Accept length, cost of a pass, cost of the drafter in the tail."""
        passes = sum(record.get("spec/target_passes", 0) for record in self.records)
        accepts = [a for r in self.records if (a := r.get("spec/accept_length")) is not None]
        busy = sum(record.get("drafter/busy_s", 0.0) for record in self.records)
        gen = self.seconds(lambda t: t.phases["gen"])
        out = {}
        if passes:
            out |= {"passes": round(passes / count, 1), "pass_ms": round(1e3 * gen / passes, 4)}
        if accepts:
            out["accept_length"] = round(statistics.mean(accepts), 3)
        if busy:
            out["drafter_busy_share"] = round(busy / self.seconds(), 4)
        return out


def identical_steps(one: ArmRun, other: ArmRun) -> int:
    """Steps from the first on with equal rewards and equal lengths of all responses."""
    same = 0
    mine = zip(one.rewards, one.lengths, strict=False)
    others = zip(other.rewards, other.lengths, strict=False)
    for a, b in zip(mine, others, strict=False):
        if a != b:
            break
        same += 1
    return same


def against_off(run: ArmRun, off: ArmRun) -> dict[str, float | int]:
    """A run over plain decoding with the same seed, over the steps that both have.

    There is no ratio of runs whose first steps already have other responses.

    `amdahl` is the step ratio that the rollout ratio makes when nothing else changes: with share g
    of generation in off's step and generation s times as fast, 1 / (1 - g + g / s).

    Args:
        run: any arm.
        off: the arm without speculation.
    """
    equal = {"identical_steps": identical_steps(run, off)}
    if not equal["identical_steps"]:
        return equal
    count = min(len(run.records), len(off.records))
    mine, plain = run.times[:count], off.times[:count]

    def ratio(part: Callable[[StepTimes], float]) -> float:
        return sum(map(part, plain)) / sum(map(part, mine))

    rollout = ratio(lambda t: t.phases["gen"])
    share = sum(t.phases["gen"] for t in plain) / sum(t.total for t in plain)
    return {
        "step_over_off": round(ratio(lambda t: t.total), 4),
        "rollout_over_off": round(rollout, 4),
        "amdahl": round(1 / (1 - share + share / rollout), 4),
        "amdahl_limit": round(1 / (1 - share), 4),
        **equal,
    }


def over_peer(peer: ArmRun, ours: ArmRun) -> float:
    """Seconds of a peer's token over those of ours, over the steps that both have."""
    count = min(len(peer.records), len(ours.records))

    def token_s(run: ArmRun) -> float:
        return sum(t.total for t in run.times[:count]) / sum(map(sum, run.lengths[:count]))

    return token_s(peer) / token_s(ours)


def curves(runs: Sequence[ArmRun]) -> dict[str, Any]:
    """What the figures show: reward and seconds of each step, mean seconds of each phase."""
    out: dict[str, Any] = {}
    for run in runs:
        count = len(run.records)
        parts = {n: run.seconds(lambda t, n=n: t.phases[n]) / count for n in PHASES}
        parts["other"] = run.seconds(lambda t: t.other + t.unaccounted) / count
        out.setdefault(run.arm, {})[str(run.seed)] = {
            "reward": run.rewards,
            "step_s": [round(t.total, 4) for t in run.times],
            "parts": {name: round(value, 4) for name, value in parts.items()},
        }
    return out


def warmed_policy(folder: Path) -> str:
    """Fingerprint of the policy that a run began with; empty where its summary has none."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    return summary.get("warm_start", {}).get("policy", "")


def finished_steps(folder: Path) -> int:
    """Steps of a run that came to its end; 0 = it did not."""
    path = folder / "summary.json"
    return json.loads(path.read_text())["steps"] if path.exists() else 0
