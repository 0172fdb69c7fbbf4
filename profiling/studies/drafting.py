"""A policy in its engine, responses to train drafters on, prompts to draft for, a log of passes."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from driver.config.load import load_config
from driver.config.sections import DrafterConfig
from driver.config.strategy import OFF, Strategy
from driver.drafter.loss import DraftBatch
from driver.drafter.trainer import SpotTrainer
from driver.model.drafter import Drafter
from driver.rollout.observer import RolloutObserver
from driver.rollout.request import Request
from driver.rollout.runner import Burst
from driver.rollout.tree import Tree
from driver.run.assemble import Rollout, build_drafter
from profiling.rig.bench import Bench
from profiling.rig.subjects import Subject, fix_bandit

SWAP_EVERY = 8  # steps, where a drafter is trained while it drafts
NEVER = 10**9  # passes between two steps of the spot trainer: the study calls them


@dataclass(frozen=True)
class Sizes:
    """Sizes of a study."""

    prompts: int = 1280
    held_out: int = 32  # one prompt in so many is drafted for and not trained on
    rounds: int = 4  # responses to each prompt that is trained on
    tokens: int = 256  # limit of a response
    batch: int = 32  # requests that are drafted for
    bin: int = 4096  # entries of a training step
    steps: int = 20_000  # limit; `seconds` ends a training earlier
    family_steps: int = 1000
    seconds: float = 90.0  # limit of a training: with its responses a warm start of two minutes
    unroll: int = 4
    strategies: tuple[str, ...] = ("learned:4,4,16", "learned:8,4,32", "learned:8,8,64")
    ways: tuple[tuple[float, float], ...] = (  # temperatures of drafts and of their ranks
        (1.0, 0.0), (1.0, 0.7), (1.0, 1.0), (1.0, 1.4), (1.0, 2.0), (0.75, 1.0), (0.6, 0.0),
        (0.6, 1.0),
    )  # fmt: skip
    tail: int = 2048  # tokens of the longest request of a rollout
    swap: int = 4 * SWAP_EVERY  # passes between two swaps of a drafter in training


class PassLog:
    """Wraps the engine's runner and logs what each request emitted in each speculative pass."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout, self.inner = rollout, rollout.engine.runner
        self.rows: list[tuple[int, int, int, int]] = []  # position, batch, since a swap, emitted
        self.seconds = 0.0
        self.passes = 0
        self._version, self._since = 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, count: int, strategy: Strategy, *how: Any) -> Burst:
        burst = self.inner.run(count, strategy, *how)
        # The engine has read the burst before by now, and not this one.
        at = [sequence.num_emitted for sequence in self.rollout.engine.state.running[:count]]
        version = self.rollout.spot.runner.version
        if version != self._version:
            self._version, self._since = version, 0
        for emitted in burst.emitted.tolist():
            for row, n in enumerate(emitted):
                if strategy != OFF and n:  # 0 after the request's end
                    self.rows.append((at[row], count, self._since, n))
                at[row] += n
            self._since += 1
        self.seconds += burst.elapsed_s
        self.passes += burst.passes
        return burst

    @property
    def accept_length(self) -> float:
        return statistics.fmean(row[3] for row in self.rows) if self.rows else 1.0

    def by(self, column: int, edges: Sequence[int]) -> dict[str, tuple[float, int]]:
        """Accept length and passes of requests between edges of a column."""
        groups: dict[str, list[int]] = defaultdict(list)
        for row in self.rows:
            low = max(edge for edge in edges if edge <= row[column])
            above = [edge for edge in edges if edge > row[column]]
            groups[f"{low}-{min(above) - 1}" if above else f"{low}-"].append(row[3])
        return {name: (statistics.fmean(n), len(n)) for name, n in groups.items()}


@contextmanager
def logged(rollout: Rollout) -> Iterator[PassLog]:
    log = PassLog(rollout)
    rollout.engine.runner = log  # type: ignore[assignment]
    try:
        yield log
    finally:
        rollout.engine.runner = log.inner


class TargetOnly:
    """Drafts the likeliest tokens without the target's noise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, batch: Any, strategy: Strategy, store: Any) -> Tree:
        greedy = replace(batch, draft_temperature=torch.zeros_like(batch.temperature))
        return self.inner.propose(greedy, strategy, store)


class _Trains(RolloutObserver):
    """Trains between passes and records nothing."""

    def __init__(self, spot: SpotTrainer) -> None:
        self.spot = spot

    def on_pass(self, active: int, passes: int = 1) -> None:
        self.spot.on_pass(active, passes)


@dataclass
class Study:
    """A policy in its engine, documents to learn from and prompts to draft for."""

    bench: Bench
    subject: Subject
    sizes: Sizes
    words: list[str] = field(default_factory=list)
    rollout: Rollout = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.sizes
        config = load_config([*self.subject.words, *self.words])
        self.drafter_config: DrafterConfig = config.drafter
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
            *self.words,
            longest=sizes.tokens + 512,
        )

    def requests(self, held_out: bool, round: int = 0) -> list[Request]:
        limits = [self.sizes.tokens] * self.sizes.prompts
        requests = self.subject.requests(limits, stop=True, round=round)
        every = self.sizes.held_out
        return [r for i, r in enumerate(requests) if (i % every == 0) == held_out]

    def collect(self) -> float:
        """Samples the responses to train on, in one batch; returns the seconds.

        Only these plain passes use graphs: settings of drafts change from row to row.
        """
        begin, engine = time.perf_counter(), self.rollout.engine
        runner = self.rollout.spot.runner
        version, runner.version = runner.version, 0  # no graph of a drafter
        fix_bandit(self.rollout, policy="static", static="off")
        rounds = range(self.sizes.rounds)
        engine.generate([r for round in rounds for r in self.requests(False, round)])
        engine.runner.graphs, runner.version = None, version
        return time.perf_counter() - begin

    def learner(self, unroll: int, drafter: Drafter | None = None, **settings: Any) -> SpotTrainer:
        """A trainer on the same documents, by default of a new drafter."""
        spot = self.rollout.spot
        config = replace(self.drafter_config, unroll=unroll, **settings)
        drafter = drafter or build_drafter(spot.drafter.spec, spot.target, seed=0)
        new = SpotTrainer(drafter, spot.runner, spot.target, spot.cache, spot.config, config, 0)
        new.buffer = spot.buffer
        return new

    def train(self, spot: SpotTrainer, steps: int) -> float:
        """Trains until the steps or the time are used up, and swaps the drafter into the engine.

        Returns:
            Seconds of a step, without the first few.
        """
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

    def draft(self, strategy: str, record: bool = False) -> PassLog:
        """Drafts for the held-out prompts."""
        fix_bandit(self.rollout, policy="static", static=strategy)
        requests, batch = self.requests(True), self.sizes.batch
        with logged(self.rollout) as log:
            for first in range(0, len(requests), batch):
                self.rollout.engine.generate(requests[first : first + batch], record=record)
        return log

    def draft_and_train(self, strategy: str, trained: SpotTrainer) -> PassLog:
        """Drafts while a copy of a trained drafter trains further and is swapped in.

        It trains on the same documents at a tenth of the rate. The engine keeps it until `trained`
        swaps again.
        """
        spot, engine = self.learner(self.sizes.unroll), self.rollout.engine
        spot.drafter.load_state_dict(trained.drafter.state_dict())
        spot.set_lr(self.drafter_config.lr / 10)
        spot.config = replace(
            spot.config,
            every=max(1, self.sizes.swap // SWAP_EVERY),
            swap_every=SWAP_EVERY,
            tail_batch=self.sizes.batch,
        )
        before, engine.observer = engine.observer, _Trains(spot)
        try:
            spot.swap()
            return self.draft(strategy, record=True)
        finally:
            engine.observer = before
            spot.stop()

    def groups(self, name: str, log: PassLog, column: int, edges: Sequence[int]) -> None:
        """A row for each group of passes."""
        for group, (length, passes) in log.by(column, edges).items():
            case = f"{name} {group}"
            self.bench.add_row(case, 0.0, accept_length=round(length, 4), passes=passes)

    def row(self, case: str, log: PassLog, **more: float | str) -> float:
        return log_row(self.bench, case, log, **more)


@contextmanager
def drafting_at(rollout: Rollout, way: tuple[float, float]) -> Iterator[str]:
    """Makes and ranks drafts at other temperatures; gives the name of the case."""
    state, runner = rollout.engine.state, rollout.spot.runner
    before = state.draft_temperature, runner.score_temperature
    state.draft_temperature, runner.score_temperature = way
    try:
        yield f"drafts at {way[0]:g}, ranks at {way[1]:g}"
    finally:
        state.draft_temperature, runner.score_temperature = before


def log_row(bench: Bench, case: str, log: PassLog, **more: float | str) -> float:
    """Adds the row of a log; returns its accept length."""
    bench.add_row(
        case,
        1e6 * log.seconds / max(1, log.passes),
        accept_length=round(log.accept_length, 4),
        passes=len(log.rows),
        **more,
    )
    return log.accept_length


def loaded_batch(spot: SpotTrainer, draw: int) -> tuple[DraftBatch, int] | None:
    """A batch of recorded positions and its count of real rows; None without documents."""
    pieces = spot.buffer.sample(min(256, spot.bin.tokens), draw)
    if not pieces:
        return None
    loaded = spot.bin.load(pieces, spot.target_version, 0)
    return spot.bin.batch(*loaded, *spot.current_teachers()), sum(piece.length for piece in pieces)


def first_acceptance(
    target: Tensor, draft: Tensor, ids: Tensor, top_k: int, generator: torch.Generator
) -> dict[str, float]:
    """Probability that the first drafted position is accepted, by rule.

    Args:
        target: float32 [N, V], log-probs.
        draft: float32 [N, draft_vocab], log-probs.
        ids: int64 [draft_vocab], target id of each draft id.
        top_k: children.
        generator: of the noise.

    Returns:
        `shared_noise`, `target_only` and `multi_round` (rejection sampling of children drawn
        without replacement; Miao et al., "SpecInfer").
    """

    def gumbel(like: Tensor) -> Tensor:
        uniform = torch.rand(like.shape, generator=generator, device=like.device)
        return -(-uniform.clamp(1e-20, 1 - 1e-7).log()).log()

    noise = gumbel(target)
    token = (target + noise).argmax(-1, keepdim=True)  # [N, 1]
    shared = ids[(draft + noise[:, ids]).topk(top_k).indices]
    greedy = ids[draft.topk(top_k).indices]
    children = (draft + gumbel(draft)).topk(top_k).indices  # in the order they are drawn
    q = draft.exp()
    p = target.exp()
    accepted = torch.zeros(len(target), dtype=torch.bool, device=target.device)
    for k in range(top_k):
        child = children[:, k : k + 1]
        chance = p.gather(1, ids[child]) / q.gather(1, child).clamp_min(1e-30)
        draw = torch.rand(chance.shape, generator=generator, device=chance.device)
        accepted |= (draw < chance)[:, 0]
        p = p.index_add(1, ids, -q).clamp_min_(0)
        p /= p.sum(-1, keepdim=True).clamp_min(1e-30)
        q = q.scatter(1, child, 0.0)
        q /= q.sum(-1, keepdim=True).clamp_min(1e-30)
    return {
        "shared_noise": float((shared == token).any(-1).float().mean()),
        "target_only": float((greedy == token).any(-1).float().mean()),
        "multi_round": float(accepted.float().mean()),
    }
