"""Arms of the GRPO benchmark: their settings, the records of their runs, ratios of two runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from driver.config.load import Config
from driver.config.strategy import LEARNED, parse_strategies
from driver.records.folder import read_jsonl
from driver.records.phases import PHASES, StepTimes

OTHER_START = "no ratios: another warm start, or speculation changed a token"
TRL, TRL_VLLM = "trl", "trl_vllm"
TRAINERS = {TRL: "over_trl_hf_x", TRL_VLLM: "over_trl_vllm_x"}  # of others -> target


def arm_words(config: Config) -> dict[str, list[str]]:
    """Arm -> its settings over those of the full system, which has this configuration."""
    arms = parse_strategies(config.engine.strategies)
    learned = [str(arm) for arm in arms if arm.drafting is LEARNED]
    static = learned[len(learned) // 2] if learned else str(arms[-1])
    ngrams = " ".join(str(arm) for arm in arms if not arm.needs_drafter)
    return {
        "off": ["engine.strategies=off", "spot.mode=off"],
        "ngram": [f"engine.strategies={ngrams}", "spot.mode=off"],
        "static": [f"engine.strategies=off {static}", f"bandit.policy={static}"],
        "frozen": ["spot.mode=off"],
        "full": [],
    }


@dataclass(frozen=True)
class ArmRun:
    arm: str
    seed: int
    records: list[dict[str, Any]]
    lengths: list[list[int]]  # of all responses of each step
    heldout: list[float]  # before the first step, after the last
    policy: str = ""  # fingerprint of the warm start's; "" before the run has ended
    commit: str = ""  # or several, of a run that was resumed; "" = not recorded
    checksums: list[list[int]] = field(default_factory=list)  # of responses; peers have none

    @staticmethod
    def read(arm: str, seed: int, folder: Path) -> ArmRun | None:
        """None before the first logged step."""
        lines = read_jsonl(folder / "metrics.jsonl")
        records = [line for line in lines if line["step"] > 0]
        if not records:
            return None
        rollouts = read_jsonl(folder / "rollouts.jsonl")
        heldout = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
        lengths = [line["lengths"] for line in rollouts]
        checksums = [line["checksums"] for line in rollouts if "checksums" in line]
        if len(checksums) < len(lengths):  # begun by an older version
            checksums = []
        commits = ", ".join(commits_of(folder))
        policy = warmed_policy(folder)
        return ArmRun(arm, seed, records, lengths, heldout, policy, commits, checksums)

    @property
    def times(self) -> list[StepTimes]:
        return [StepTimes.of(record) for record in self.records]

    @property
    def rewards(self) -> list[float]:
        return [record["critic/rewards/mean"] for record in self.records]

    def seconds(self, part: Callable[[StepTimes], float] = lambda t: t.total) -> float:
        """Of all steps."""
        return sum(part(times) for times in self.times)

    def parts(self) -> dict[str, float]:
        times = self.times
        return {name: sum(t.phases[name] for t in times) for name in PHASES}

    @property
    def unaccounted_share(self) -> float:
        return self.seconds(lambda t: t.unaccounted) / self.seconds()

    @property
    def heldout_gain_points(self) -> float | None:
        return 100 * (self.heldout[-1] - self.heldout[0]) if len(self.heldout) > 1 else None

    @property
    def hidden_share(self) -> float | None:
        """Of the tokens of the updates, those done during the rollouts; None = it was off."""
        shares = [
            share for r in self.records if (share := r.get("update/hidden_share")) is not None
        ]
        return statistics.median(shares) if shares else None

    def tokens(self) -> int:
        return sum(map(sum, self.lengths))

    def row(self) -> dict[str, Any]:
        """Means over the steps; accept length, cost of a pass and of drafter training."""
        count, totals = len(self.records), [t.total for t in self.times]
        parts = self.parts() | {"other": self.seconds(lambda t: t.other)}
        parts["unaccounted"] = self.seconds(lambda t: t.unaccounted)
        gen = parts["gen"]
        out: dict[str, Any] = {
            "steps": count,
            "spread": round((max(totals) - min(totals)) / statistics.median(totals), 4),
            "makespan_s": round(self.seconds(), 3),
            "tokens_per_s": round(self.tokens() / self.seconds(), 1),
            **{f"{name}_s": round(seconds / count, 4) for name, seconds in parts.items()},
            "gen_share": round(gen / self.seconds(), 4),
            "unaccounted_share": round(self.unaccounted_share, 5),
            "reward_first": self.rewards[0],
            "reward_last": self.rewards[-1],
        }
        if len(self.heldout) > 1:
            out |= {"heldout_before": self.heldout[0], "heldout_after": self.heldout[-1]}
        if self.hidden_share is not None:
            out["update_hidden_share"] = round(self.hidden_share, 4)
        own = {"policy": self.policy, "commit": self.commit}
        out |= {name: value for name, value in own.items() if value}
        passes = sum(record.get("spec/target_passes", 0) for record in self.records)
        accepts = [a for r in self.records if (a := r.get("spec/accept_length")) is not None]
        busy = sum(record.get("drafter/busy_s", 0.0) for record in self.records)
        if passes:
            out |= {"passes": round(passes / count, 1), "pass_ms": round(1e3 * gen / passes, 4)}
        if accepts:
            out["accept_length"] = round(statistics.mean(accepts), 3)
        if busy:
            out["drafter_busy_share"] = round(busy / self.seconds(), 4)
        return out


def identical_steps(one: ArmRun, other: ArmRun) -> int:
    """How many first steps have equal rewards and responses: tokens and log-probs, or lengths."""
    exact = bool(one.checksums and other.checksums)
    steps = [
        zip(r.rewards, r.checksums if exact else r.lengths, strict=False) for r in (one, other)
    ]
    pairs = zip(*steps, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def against_off(run: ArmRun, off: ArmRun) -> dict[str, float | int]:
    """Ratios to plain decoding with the same seed, over the steps that both runs have.

    Runs whose first steps already differ have no ratios. `step_over_off` is the median ratio of a
    step, since the first steps compile the update; `run_over_off` compares the sums. `amdahl` is
    the step ratio that follows from the rollout ratio s alone: 1 / (1 - g + g / s), with the
    median share g of generation in a step of `off`.
    """
    equal: dict[str, float | int] = {"identical_steps": identical_steps(run, off)}
    if not equal["identical_steps"]:
        return equal
    count = min(len(run.records), len(off.records))
    mine, plain = run.times[:count], off.times[:count]

    def ratio(part: Callable[[StepTimes], float]) -> float:
        return sum(map(part, plain)) / sum(map(part, mine))

    rollout = ratio(lambda t: t.phases["gen"])
    share = statistics.median(t.phases["gen"] / t.total for t in plain)
    return {
        "step_over_off": round(step_ratio(off, run), 4),
        "run_over_off": round(ratio(lambda t: t.total), 4),
        "rollout_over_off": round(rollout, 4),
        "amdahl": round(1 / (1 - share + share / rollout), 4),
        "amdahl_limit": round(1 / (1 - share), 4),
        **equal,
    }


def step_ratio(slow: ArmRun, fast: ArmRun) -> float:
    """The median ratio of the seconds of a step, over the steps that both runs have."""
    pairs = zip(slow.times, fast.times, strict=False)
    return statistics.median(one.total / other.total for one, other in pairs)


def over_peer(peer: ArmRun, ours: ArmRun) -> float:
    """A peer's seconds a token over ours, over the steps that both runs have."""
    count = min(len(peer.records), len(ours.records))

    def token_s(run: ArmRun) -> float:
        return sum(t.total for t in run.times[:count]) / sum(map(sum, run.lengths[:count]))

    return token_s(peer) / token_s(ours)


def curves(runs: Sequence[ArmRun]) -> dict[str, Any]:
    """Arm -> seed -> reward and seconds of each step, mean seconds of each phase.

    The means are without the first step, which compiles the update, if there are others.
    """
    out: dict[str, Any] = {}
    for run in runs:
        later = run.times[1:] or run.times
        parts = [t.phases | {"other": t.other + t.unaccounted} for t in later]
        out.setdefault(run.arm, {})[str(run.seed)] = {
            "reward": run.rewards,
            "step_s": [round(t.total, 4) for t in run.times],
            "parts": {
                name: round(statistics.fmean(part[name] for part in parts), 4)
                for name in (*PHASES, "other")
            },
        }
    return out


def warmed_policy(folder: Path) -> str:
    """Fingerprint of the policy that a run began with; "" where its summary has none."""
    return _summary(folder).get("warm_start", {}).get("policy", "")


def commits_of(folder: Path, added: str = "") -> list[str]:
    """The commits that a run was made with; one that is `added` is written to the disk."""
    path = folder.with_name(f"{folder.name}.commits")
    known = path.read_text(encoding="utf-8").split() if path.exists() else []
    if added and added not in known:
        known.append(added)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(known), encoding="utf-8")
    return known


def finished_steps(folder: Path) -> int:
    """Steps of a run that has ended; 0 = it has not."""
    return _summary(folder).get("steps", 0)


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
