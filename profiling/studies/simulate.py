"""`python -m profiling.studies.simulate`: RL steps on 8 to 1,024 GPUs.

Compares steps with and without speculation.

Replays response lengths on data-parallel ranks with a cost model of one pass by batch and strategy.
The model is measured where `results/<card>/decode.json` has the 7B shape, for ranks of one GPU;
what it lacks is a roofline over the measured copy bandwidth, and the output says which, and what
the numbers are that nothing measured. What else is assumed:

* a step's requests are split evenly, longest last known only to the simulator; ranks do not help
  each other, so the slowest decides the rollout, and all wait;
* every request of a rank makes a token, or `accept_length` of them, in a pass; each pass runs the
  strategy that is fastest at that batch, as a bandit would find;
* attention reads the cache at copy bandwidth on top of a pass's time; prompts are free;
* the settings behind the published ratios are not known in full. The defaults are a step of 128
  prompts with 16 responses of up to 32k tokens; other lengths give other ratios (with `--requests
  512 --median 2048` half as much again), so the two columns side by side say that the trend and
  its size are explained, not that the numbers are predicted;
* log-probs and update take 2 and 8 FLOPs a parameter and token (recomputation counted) at a stated
  share of the peak, spread over all GPUs; nothing else takes time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from driver.common.errors import UserError
from driver.config.strategy import OFF, Strategy
from profiling.rig.results import RESULTS, load, newest_first
from profiling.rig.workload import trace_lengths

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
# Step-time ratios of the published system on 1, 2, 4 and 8 nodes of 8 GPUs, 7B; nothing is fitted
# to them. They are shown beside the default lengths only.
PUBLISHED = {8: 1.21, 16: 1.45, 32: 1.62, 64: 1.76}
DEFAULT_LENGTHS = {"requests": 2048, "median": 4096, "sigma": 1.0, "cap": 32768, "lengths": None}
SHAPE_ROWS = "qwen2_7b_shape"


@dataclass(frozen=True)
class Machine:
    """What the roofline and the update are made of; `ASSUMED` names what was not measured.

    Attributes:
        parameters: of the policy.
        kv_bytes: of the cache, a token.
        bytes_per_s: copy bandwidth of a GPU, as measured.
        flops: bf16 FLOP/s that a large product reaches.
        update_share: of `flops`, reached by log-probs and update.
        overhead_s: of a pass by roofline, beside bytes and FLOPs.
        draft_share: a drafted level's time over the target's own pass, at one request, by roofline.
        trained_tokens_per_s: drafter training of one idle GPU: 6 FLOPs for each of the drafter's
            290 M numbers and each of 3 unroll steps, at `update_share` of `flops`.
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
    """A strategy with the tokens it emits in a pass."""

    strategy: Strategy
    accept_length: float


# What a 7B might have, as said before anything was measured.
ASSUMED_ARMS = (
    Arm(Strategy.parse("learned:4,1,5"), 2.2),
    Arm(Strategy.parse("learned:6,4,24"), 3.2),
)


class CostModel:
    """Seconds of a pass, by batch and strategy.

    Args:
        machine: of the roofline.
        arms: besides `off`.
        measured: (batch, strategy) -> seconds; between batches it is interpolated, past the largest
            the roofline takes over.
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
        """A pass without the reads of the cache."""
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
        """Seconds in which every request makes one token, by the best strategy."""
        cache = batch * context * self.machine.kv_bytes / self.machine.bytes_per_s
        arms = self.arms if speculate else self.arms[:1]
        return min((self.pass_s(batch, a.strategy) + cache) / a.accept_length for a in arms)


@dataclass(frozen=True)
class Step:
    """A simulated step."""

    gpus: int
    rollout_s: float
    update_s: float
    idle_share: float  # of all ranks' time in the rollout
    idle_gpu_s: float

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.update_s


def rank_seconds(
    lengths: Sequence[int], model: CostModel, *, max_batch: int, prompt: int, speculate: bool
) -> float:
    """Rollout time of one rank that starts its requests in order, `max_batch` at a time.

    Every running request is at the same speed, so one clock of tokens serves them all.
    """
    waiting = list(reversed(lengths))
    ends: list[tuple[float, float]] = []  # (clock when it ends, clock when it began)
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
    gpus_per_rank: int = 1,
    max_batch: int = 256,
    prompt: int = 256,
    speculate: bool = True,
) -> Step:
    """One step: rollouts of all ranks, the barrier, log-probs and update.

    Args:
        lengths: of the step's responses.
        model: costs of one rank.
        gpus: in all.
        gpus_per_rank: that share one rank's passes (tensor parallel, taken as perfect).
        max_batch: requests that a rank runs at once.
        prompt: tokens of each.
        speculate: whether strategies other than `off` may run.
    """
    ranks = max(1, gpus // gpus_per_rank)
    shared = replace(
        model.machine,
        bytes_per_s=model.machine.bytes_per_s * gpus_per_rank,
        flops=model.machine.flops * gpus_per_rank,
    )
    model = model if gpus_per_rank == 1 else CostModel(shared, model.arms[1:])
    times = [
        rank_seconds(
            lengths[rank::ranks], model, max_batch=max_batch, prompt=prompt, speculate=speculate
        )
        for rank in range(ranks)
    ]
    longest = max(times)
    idle = sum(longest - t for t in times)
    tokens = sum(lengths) + prompt * len(lengths)
    flops = 10 * model.machine.parameters * tokens  # 2 for log-probs, 8 for the update
    reached = model.machine.flops / gpus_per_rank * model.machine.update_share
    return Step(
        gpus,
        longest,
        flops / (gpus * reached),
        idle / max(longest * ranks, 1e-12),
        idle * gpus_per_rank,
    )


def load_model(machine: Machine, gpus_per_rank: int = 1) -> tuple[CostModel, str]:
    """The measured model where there is one, else the roofline; and a line that says which.

    Args:
        machine: of the roofline.
        gpus_per_rank: more than one leave of what was measured the accept lengths.
    """
    for path in newest_first(RESULTS, "decode"):
        measured, arms = {}, {}
        for row in load(path)["rows"]:
            subject, batch, strategy = row["case"].split(" ", 2)
            if subject == SHAPE_ROWS:
                arm = Strategy.parse(strategy)
                measured[int(batch[1:]), arm] = row["median_us"] * 1e-6
                if arm != OFF:
                    arms[arm] = Arm(arm, row["accept_length"])
        if measured and gpus_per_rank == 1:
            source = f"passes and a small policy's accept lengths as measured: {path}"
            return CostModel(machine, list(arms.values()), measured), source
        if measured:
            source = f"passes by roofline: those measured are of ranks of one GPU ({path})"
            return CostModel(machine, list(arms.values())), source
    source = "passes by roofline, accept lengths assumed (no decode.json)"
    return CostModel(machine, ASSUMED_ARMS), source


def read_lengths(path: Path) -> list[int]:
    """Lengths of the last step of a run's `rollouts.jsonl`, or of the run's folder."""
    file = path / "rollouts.jsonl" if path.is_dir() else path
    lines = file.read_text(encoding="utf-8").splitlines()
    return list(json.loads(lines[-1])["lengths"])


def count(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a number from 1 on, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Numbers from 1 on, by commas."""
    return [count(part) for part in text.split(",")]


def arms_of(text: str) -> list[Arm]:
    """Strategies with accept lengths, for example `learned:4,1,5=2.2 learned:4,4,16=3.2`."""
    arms = []
    for part in text.split():
        strategy, _, length = part.partition("=")
        try:
            arms.append(Arm(Strategy.parse(strategy), float(length)))
            if not arms[-1].accept_length >= 1:
                raise ValueError
        except (ValueError, UserError) as error:
            raise argparse.ArgumentTypeError(
                f"wanted STRATEGY=LENGTH, a length from 1 on, got {part!r}"
            ) from error
    return arms


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.studies.simulate", description=__doc__
    )
    parser.add_argument("--gpus", type=counts, default=GPUS, help="numbers, by commas")
    parser.set_defaults(**DEFAULT_LENGTHS)
    parser.add_argument("--requests", type=count, help="responses of a step")
    parser.add_argument("--median", type=count, help="tokens, of a lognormal distribution")
    parser.add_argument("--sigma", type=float, help="of the logarithm of the lengths")
    parser.add_argument("--cap", type=count, help="tokens of the longest response")
    parser.add_argument("--lengths", type=Path, help="a run, or its rollouts.jsonl, instead")
    parser.add_argument("--gpus-per-rank", type=count, default=1)
    parser.add_argument("--accept", type=arms_of, help="STRATEGY=LENGTH .., instead of those found")
    parser.add_argument("--json", type=Path, help="where to write the numbers too")
    options = parser.parse_args(argv)
    say = sys.stdout.write
    try:
        lengths = (
            read_lengths(options.lengths)
            if options.lengths
            else trace_lengths(options.requests, options.median, options.sigma, 0, options.cap)
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"{options.lengths}: holds no response lengths ({error})")
    machine = Machine()
    model, source = load_model(machine, options.gpus_per_rank)
    if options.accept:
        model.arms = [model.arms[0], *options.accept]
    say(f"{source}\n")
    arms = ", ".join(f"{a.strategy} {a.accept_length:.2f}" for a in model.arms)
    say(f"accept lengths{' as given' if options.accept else ''}: {arms}\n")
    say(f"assumed: {', '.join(f'{name} {getattr(machine, name):g}' for name in ASSUMED)}\n")
    mean = sum(lengths) / len(lengths)
    say(f"{len(lengths)} responses, longest {max(lengths)}, mean {mean:.0f}\n")
    say("   GPUs    off s  rollout    idle    spec s    idle       ratio  published  drafter tok\n")
    rows, published_lengths = [], DEFAULT_LENGTHS.items() <= vars(options).items()
    for gpus in options.gpus:
        off, spec = (
            simulate(lengths, model, gpus, gpus_per_rank=options.gpus_per_rank, speculate=speculate)
            for speculate in (False, True)
        )
        ratio = off.seconds / spec.seconds
        trained = spec.idle_gpu_s * machine.trained_tokens_per_s
        published = PUBLISHED.get(gpus) if published_lengths else None
        rows.append({"gpus": gpus, "off": asdict(off), "spec": asdict(spec), "ratio": ratio})
        shown = f"{published:.2f} x" if published else ""
        say(
            f"{gpus:7} {off.seconds:8.1f} {off.rollout_s / off.seconds:8.0%} {off.idle_share:7.0%}"
            f" {spec.seconds:9.1f} {spec.idle_share:7.0%} {ratio:9.2f} x {shown:>10}"
            f" {trained:12.2e}\n"
        )
    if options.json:
        result = {"source": source, "machine": asdict(machine), "assumed": ASSUMED, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
