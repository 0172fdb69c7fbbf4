"""`python -m profiling.studies.simulate`: RL steps with and without speculation on many GPUs.

Replays response lengths on data-parallel ranks with a cost model of one pass by batch and strategy.
A rank is one GPU. Passes of the 7B shape are those of `results/<card>/decode.json`; other passes
are a roofline over the measured copy bandwidth. The output names the source of the passes and every
number that is not measured. Assumptions:

* The requests of a step are split evenly over the ranks. The simulator alone knows their lengths.
  Ranks do not help each other, and all wait for the slowest.
* In a pass every request of a rank emits one token, or `accept_length` tokens with speculation.
  Each pass runs the strategy that is fastest at its batch, as a bandit would find.
* Attention reads the cache at copy bandwidth on top of the time of a pass. Prompts take no time.
* Log-probs and update take 2 and 8 FLOPs a parameter and token, recomputation included, at a stated
  share of the peak over all GPUs. Nothing else takes time.
* The settings behind the published ratios are not known in full. They are shown beside the default
  lengths, 128 prompts with 16 responses of at most 32k tokens, and not beside others.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from driver.common.errors import UserError
from driver.config.strategy import OFF, Strategy
from profiling.rig.results import RESULTS, load, newest_first
from profiling.rig.workload import trace_lengths

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
# Step-time ratios of the published system on 1, 2, 4 and 8 nodes of 8 GPUs, 7B. Nothing is fitted
# to them.
PUBLISHED = {8: 1.21, 16: 1.45, 32: 1.62, 64: 1.76}
DEFAULT_LENGTHS = {"requests": 2048, "median": 4096, "sigma": 1.0, "cap": 32768, "lengths": None}
SHAPE_ROWS = "qwen2_7b_shape"


@dataclass(frozen=True)
class Machine:
    """The numbers of the roofline and of the update; `ASSUMED` names those that are not measured.

    Attributes:
        parameters: of the policy.
        kv_bytes: of the cache for a token.
        bytes_per_s: measured copy bandwidth of a GPU.
        flops: bf16 FLOP/s of a large product.
        update_share: part of `flops` that log-probs and update reach.
        overhead_s: of a pass, besides bytes and FLOPs.
        draft_share: time of a drafted level over a pass of the target, at one request.
        trained_tokens_per_s: drafter training of an idle GPU, 6 FLOPs for each of 290 M parameters
            and each of 3 unrolled steps at `update_share` of `flops`.
    """

    parameters: float = 7.6e9
    kv_bytes: float = 28 * 2 * 4 * 128 * 2
    bytes_per_s: float = 3.02e12
    flops: float = 6.0e14
    update_share: float = 0.4
    overhead_s: float = 3e-4
    draft_share: float = 0.04
    trained_tokens_per_s: float = 4.6e4


ASSUMED = ("flops", "update_share", "overhead_s", "draft_share", "trained_tokens_per_s")


@dataclass(frozen=True)
class Arm:
    """A strategy with the tokens that it emits in a pass."""

    strategy: Strategy
    accept_length: float


# Of a 7B model, assumed before anything was measured.
ASSUMED_ARMS = (
    Arm(Strategy.parse("learned:4,1,5"), 2.2),
    Arm(Strategy.parse("learned:6,4,24"), 3.2),
)


class CostModel:
    """Seconds of a pass, by batch and strategy.

    Args:
        machine: of the roofline.
        arms: besides `off`.
        measured: (batch, strategy) -> seconds, interpolated between batches; above the largest
            batch the roofline counts.
    """

    def __init__(
        self,
        machine: Machine,
        arms: Sequence[Arm],
        measured: dict[tuple[int, Strategy], float] | None = None,
    ) -> None:
        self.machine = machine
        self.arms = [Arm(OFF, 1.0), *arms]
        self._measured: dict[Strategy, list[tuple[int, float]]] = {}
        for (batch, strategy), seconds in sorted((measured or {}).items(), key=lambda i: i[0][0]):
            self._measured.setdefault(strategy, []).append((batch, seconds))

    def pass_s(self, batch: int, strategy: Strategy) -> float:
        """Seconds of a pass without the reads of the cache."""
        points = self._measured.get(strategy, [])
        for (low, below), (high, above) in zip(points, points[1:], strict=False):
            if low <= batch <= high:
                return below + (above - below) * (batch - low) / (high - low)
        if points and batch == points[0][0]:
            return points[0][1]
        machine = self.machine
        weights = 2 * machine.parameters / machine.bytes_per_s
        rows = batch * strategy.num_verify
        compute = 2 * machine.parameters * rows / machine.flops
        drafting = 0.0 if strategy == OFF else strategy.depth * machine.draft_share * weights
        return max(weights, compute) + machine.overhead_s + drafting

    def token_s(self, batch: int, context: float, speculate: bool) -> float:
        """Seconds in which every request emits one token with the best strategy."""
        cache = batch * context * self.machine.kv_bytes / self.machine.bytes_per_s
        arms = self.arms if speculate else self.arms[:1]
        return min((self.pass_s(batch, a.strategy) + cache) / a.accept_length for a in arms)


@dataclass(frozen=True)
class Step:
    """A simulated step."""

    gpus: int
    rollout_s: float
    update_s: float
    idle_share: float  # of the time of all ranks in the rollout
    idle_gpu_s: float

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.update_s


def rank_seconds(
    lengths: Sequence[int], model: CostModel, *, max_batch: int, prompt: int, speculate: bool
) -> float:
    """Rollout time of one rank that starts its requests in order, `max_batch` at once.

    All running requests have the same speed, so one clock of tokens counts for all.
    """
    waiting = list(reversed(lengths))
    ends: list[tuple[float, float]] = []  # clock at the end and at the start of a request
    clock = seconds = 0.0
    while waiting or ends:
        while waiting and len(ends) < max_batch:
            heapq.heappush(ends, (clock + waiting.pop(), clock))
        end, _ = ends[0]
        began = sum(begin for _, begin in ends) / len(ends)
        context = prompt + (clock + end) / 2 - began  # mean over the stretch
        seconds += (end - clock) * model.token_s(len(ends), context, speculate)
        clock = end
        heapq.heappop(ends)
    return seconds


def simulate(
    lengths: Sequence[int],
    model: CostModel,
    gpus: int,
    *,
    max_batch: int = 256,
    prompt: int = 256,
    speculate: bool = True,
) -> Step:
    """One step: rollouts of all ranks, the barrier, log-probs and update.

    Args:
        lengths: of the responses.
        model: costs of one rank.
        gpus: ranks, of one GPU each.
        max_batch: requests that a rank runs at once.
        prompt: tokens of each prompt.
        speculate: whether strategies other than `off` may run.
    """
    rank = partial(
        rank_seconds, model=model, max_batch=max_batch, prompt=prompt, speculate=speculate
    )
    times = [rank(lengths[index::gpus]) for index in range(gpus)]
    longest = max(times)
    idle = sum(longest - t for t in times)
    tokens = sum(lengths) + prompt * len(lengths)
    flops = 10 * model.machine.parameters * tokens  # 2 for log-probs, 8 for the update
    update_s = flops / (gpus * model.machine.flops * model.machine.update_share)
    return Step(gpus, longest, update_s, idle / max(longest * gpus, 1e-12), idle)


def load_model(machine: Machine) -> tuple[CostModel, str]:
    """The measured model where there is one, else the roofline; and a line about its source."""
    for path in newest_first(RESULTS, "decode"):
        measured, arms = {}, list[Arm]()
        for row in load(path)["rows"]:
            subject, batch, strategy = row["case"].split(" ", 2)
            if subject == SHAPE_ROWS:
                arm = Strategy.parse(strategy)
                measured[int(batch[1:]), arm] = row["median_us"] * 1e-6
                if arm != OFF and arm not in (known.strategy for known in arms):
                    arms.append(Arm(arm, row["accept_length"]))
        if measured:
            source = f"passes and a small policy's accept lengths as measured: {path}"
            return CostModel(machine, arms, measured), source
    source = "passes by roofline, accept lengths assumed (no decode.json)"
    return CostModel(machine, ASSUMED_ARMS), source


def read_lengths(path: Path) -> list[int]:
    """Response lengths of the last step in `rollouts.jsonl`, given by file or run folder."""
    file = path / "rollouts.jsonl" if path.is_dir() else path
    lines = file.read_text(encoding="utf-8").splitlines()
    return list(json.loads(lines[-1])["lengths"])


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Whole numbers from 1 on, separated by commas."""
    return [count(part) for part in text.split(",")]


def arms_of(text: str) -> list[Arm]:
    """Strategies with accept lengths: `learned:4,1,5=2.2 learned:4,4,16=3.2`."""
    arms = []
    for part in text.split():
        strategy, _, length = part.partition("=")
        try:
            arms.append(Arm(Strategy.parse(strategy), float(length)))
            if not arms[-1].accept_length >= 1:
                raise ValueError
        except (ValueError, UserError) as error:
            raise argparse.ArgumentTypeError(
                f"must be STRATEGY=LENGTH with a length from 1 on, got {part!r}"
            ) from error
    return arms


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.studies.simulate", description=__doc__
    )
    parser.add_argument("--gpus", type=counts, default=GPUS, help="numbers with commas")
    parser.set_defaults(**DEFAULT_LENGTHS)
    parser.add_argument("--requests", type=count, help="responses of a step")
    parser.add_argument("--median", type=count, help="tokens, of a lognormal distribution")
    parser.add_argument("--sigma", type=float, help="of the logarithm of the lengths")
    parser.add_argument("--cap", type=count, help="tokens of the longest response")
    parser.add_argument("--lengths", type=Path, help="a run, or its rollouts.jsonl")
    parser.add_argument("--accept", type=arms_of, help="STRATEGY=LENGTH .. instead")
    options = parser.parse_args(argv)
    lengths = trace_lengths(options.requests, options.median, options.sigma, 0, options.cap)
    if options.lengths:
        try:
            lengths = read_lengths(options.lengths)
        except (OSError, ValueError, LookupError, TypeError) as error:
            parser.error(f"{options.lengths}: holds no response lengths ({error})")
    machine = Machine()
    model, source = load_model(machine)
    if options.accept:
        model.arms = [model.arms[0], *options.accept]
    mean = sum(lengths) / len(lengths)
    arms = ", ".join(f"{a.strategy} {a.accept_length:.2f}" for a in model.arms)
    lines = [
        source,
        f"accept lengths{' as given' if options.accept else ''}: {arms}",
        f"assumed: {', '.join(f'{name} {getattr(machine, name):g}' for name in ASSUMED)}",
        f"{len(lengths)} responses, longest {max(lengths)}, mean {mean:.0f}",
        "   GPUs    off s  rollout    idle    spec s    idle       ratio  published  drafter tok",
    ]
    published_lengths = DEFAULT_LENGTHS.items() <= vars(options).items()
    for gpus in options.gpus:
        off, spec = (
            simulate(lengths, model, gpus, speculate=speculate) for speculate in (False, True)
        )
        ratio = off.seconds / spec.seconds
        trained = spec.idle_gpu_s * machine.trained_tokens_per_s
        published = PUBLISHED.get(gpus) if published_lengths else None
        lines.append(
            f"{gpus:7} {off.seconds:8.1f} {off.rollout_s / off.seconds:8.0%} {off.idle_share:7.0%}"
            f" {spec.seconds:9.1f} {spec.idle_share:7.0%} {ratio:9.2f} x"
            f" {f'{published:.2f} x' if published else '':>10} {trained:12.2e}"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
