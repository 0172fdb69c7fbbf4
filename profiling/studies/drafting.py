"""A policy in its engine, responses to train drafters on, and prompts to draft for."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from driver.config.load import load_config
from driver.config.strategy import Strategy
from driver.drafter.trainer import SpotTrainer
from driver.rollout.request import Request
from driver.rollout.stats import RolloutStats
from driver.rollout.tree import Tree
from driver.session.parts import Rollout, build_drafter
from profiling.rig.bench import Bench
from profiling.rig.subjects import Subject, fix_bandit, spot_of

NEVER = 10**9  # passes between two steps of the spot trainer: the study calls them


@dataclass(frozen=True)
class Sizes:
    prompts: int = 1280
    held_out: int = 32  # one prompt in so many is drafted for and not trained on
    rounds: int = 4  # responses to each prompt that is trained on
    tokens: int = 256  # limit of a response
    batch: int = 32  # requests that are drafted for
    bin: int = 4096  # entries of a training step
    steps: int = 20_000  # limit; `seconds` ends a training earlier
    seconds: float = 90.0  # limit of a training: with its responses a warm start of two minutes
    unroll: int = 4
    strategies: tuple[str, ...] = ("learned:4,4,16", "learned:8,4,32", "learned:8,8,64")
    tail: int = 2048  # tokens of the longest request of a rollout


class TargetOnly:
    """Drafts the likeliest tokens without the target's noise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, batch: Any, strategy: Strategy, store: Any) -> Tree:
        greedy = replace(batch, draft_temperature=torch.zeros_like(batch.temperature))
        return self.inner.propose(greedy, strategy, store)


@dataclass
class Study:
    """A policy in its engine, documents to train on and prompts to draft for."""

    bench: Bench
    subject: Subject
    sizes: Sizes
    rollout: Rollout = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.drafter_config = load_config(self.subject.words).drafter
        shown = sizes.prompts - len(range(0, sizes.prompts, sizes.held_out))
        self.rollout = self.subject.rollout(
            f"engine.strategies={' '.join(['off', *sizes.strategies])}",
            f"engine.max_batch={max(sizes.batch, min(256, shown))}",
            f"engine.spec_max_batch={sizes.batch}",
            "engine.num_pages=0",
            "bandit.buckets=[1]",
            "spot.mode=serial",
            f"spot.every={NEVER}",
            "spot.keep_long=0",
            "spot.average=0",  # the rate falls to zero
            f"spot.tokens_per_step={sizes.bin}",
            f"spot.buffer_tokens={2 * sizes.rounds * shown * sizes.tokens}",
            longest=sizes.tokens + 512,
        )

    def requests(self, held_out: bool, round: int = 0) -> list[Request]:
        limits = [self.sizes.tokens] * self.sizes.prompts
        requests = self.subject.requests(limits, stop=True, round=round)
        every = self.sizes.held_out
        return [r for i, r in enumerate(requests) if (i % every == 0) == held_out]

    def collect(self) -> float:
        """Samples the responses to train on in one batch, with graphs; returns the seconds."""
        begin, engine = time.perf_counter(), self.rollout.engine
        runner = spot_of(self.rollout).runner
        version, runner.version = runner.version, 0  # no graph of a drafter
        fix_bandit(self.rollout, policy="off")
        rounds = range(self.sizes.rounds)
        engine.generate([r for round in rounds for r in self.requests(False, round)])
        engine.runner.graphs, runner.version = None, version
        return time.perf_counter() - begin

    def learner(self, unroll: int) -> SpotTrainer:
        """A trainer of a new drafter on the same documents."""
        spot = spot_of(self.rollout)
        config = replace(self.drafter_config, unroll=unroll)
        drafter = build_drafter(spot.drafter.spec, spot.target, seed=0)
        new = SpotTrainer(drafter, spot.runner, spot.target, spot.cache, spot.config, config, 0)
        new.buffer = spot.buffer
        return new

    def train(self, spot: SpotTrainer, steps: int) -> float:
        """Trains until steps or time are used up, and swaps the drafter in; seconds of a step."""
        warm, made = min(5, steps // 2), 0
        began = begin = time.perf_counter()
        for step in range(steps):
            if step == warm:
                spot.stop()
                begin = time.perf_counter()
            # The rate falls to zero with the steps or the time, whichever ends first.
            done = max(step / steps, (time.perf_counter() - began) / self.sizes.seconds)
            if done >= 1.0 and step > warm:
                break
            spot.set_lr(self.drafter_config.lr * min(1.0, step / 50, 2 * max(0.0, 1 - done)))
            spot.micro_step()
            made = step + 1
        spot.stop()
        seconds = time.perf_counter() - begin
        spot.swap()
        return seconds / (made - warm)

    def draft(self, case: str, strategy: str) -> float:
        """Drafts for the held-out prompts and adds a row; returns its accept length."""
        fix_bandit(self.rollout, policy=strategy)
        requests, batch = self.requests(True), self.sizes.batch
        engine, stats = self.rollout.engine, RolloutStats()
        for first in range(0, len(requests), batch):
            engine.generate(requests[first : first + batch], record=False)
            stats.add(engine.stats)
        return accept_row(self.bench, case, stats)


def accept_row(bench: Bench, case: str, stats: RolloutStats) -> float:
    """Adds the row of a rollout with one strategy; returns its accept length."""
    length = stats.accept_length or 1.0
    bench.add_row(
        case,
        1e6 * stats.passes_s / max(1, stats.target_passes),
        accept_length=round(length, 4),
        passes=stats.spec_request_passes,
    )
    return length
