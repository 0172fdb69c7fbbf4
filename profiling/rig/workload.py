"""Workloads without a card: a trace of response lengths, recorded passes, a bandit's regret."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from driver.config.strategy import Strategy
from driver.rollout.bandit import Bandit, StepSeconds, unknown_step_s

# The trace of `targets.toml`.
REQUESTS, MEDIAN, SIGMA, SEED, CAP = 128, 512, 1.0, 0, 6144


def trace_lengths(
    count: int = REQUESTS,
    median: int = MEDIAN,
    sigma: float = SIGMA,
    seed: int = SEED,
    cap: int = CAP,
) -> list[int]:
    """Lognormal response lengths, the same on every machine.

    Args:
        count: requests.
        median: tokens.
        sigma: standard deviation of the logarithm.
        seed: of the generator.
        cap: tokens of the longest response.

    Returns:
        `count` lengths from 1 to `cap`.

    Example:
        >>> max(trace_lengths()), sorted(trace_lengths())[64]
        (6144, 632)
    """
    draw, normal = random.Random(seed), NormalDist(math.log(median), sigma)
    # The inverse distribution takes one uniform a length, independent of `random`'s own normal.
    uniforms = (min(max(draw.random(), 1e-12), 1 - 1e-12) for _ in range(count))
    return [min(cap, max(1, round(math.exp(normal.inv_cdf(u))))) for u in uniforms]


def accept_length(counts: Sequence[int]) -> float:
    """Mean tokens that a request emits in a speculative pass, the target's own token included.

    Args:
        counts: `counts[n - 1]` passes emitted n tokens; without passes the mean is 1.0.

    Example:
        >>> accept_length([1, 0, 1])
        2.0
    """
    total = sum(counts)
    return sum(n * count for n, count in enumerate(counts, 1)) / total if total else 1.0


@dataclass(frozen=True)
class Window:
    """Recorded passes with one strategy at one batch."""

    batch: int
    strategy: str
    passes: int
    emitted: int
    seconds: float
    request_passes: int = 0  # one for each request in each pass; 0 = `passes * batch`


class Recorder:
    """Wraps a bandit and keeps the windows that are recorded with it."""

    def __init__(self, bandit: Bandit) -> None:
        self.bandit = bandit
        self.windows: list[Window] = []
        self._chosen: tuple[int, Strategy] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bandit, name)

    def choose(
        self,
        batch: int,
        usable: Callable[[Strategy], bool],
        step_s: StepSeconds = unknown_step_s,
    ) -> Strategy:
        strategy = self.bandit.choose(batch, usable, step_s)
        self._chosen = (batch, strategy)
        return strategy

    def record(
        self, emitted: int, elapsed_s: float, passes: int = 1, request_passes: int = 0
    ) -> None:
        assert self._chosen is not None
        batch, strategy = self._chosen
        window = Window(batch, str(strategy), passes, emitted, elapsed_s, request_passes)
        self.windows.append(window)
        self.bandit.record(emitted, elapsed_s, passes, request_passes)


@dataclass
class Recording:
    """Windows of every strategy at every bucket, to replay choices with."""

    buckets: list[int]
    cells: dict[tuple[int, str], list[Window]] = field(default_factory=lambda: defaultdict(list))

    def add(self, windows: Iterable[Window]) -> None:
        for window in windows:
            if window.seconds > 0:
                self.cells[self.bucket(window.batch), window.strategy].append(window)

    def bucket(self, batch: int) -> int:
        return self.buckets[min(bisect_left(self.buckets, batch), len(self.buckets) - 1)]

    def rate(self, bucket: int, strategy: str) -> float:
        """Tokens a second over all windows of a cell."""
        cell = self.cells[bucket, strategy]
        return sum(w.emitted for w in cell) / sum(w.seconds for w in cell)

    def strategies(self, bucket: int) -> list[str]:
        return [strategy for b, strategy in self.cells if b == bucket and self.cells[b, strategy]]

    def oracle(self) -> dict[int, str]:
        """The fastest strategy of each bucket."""
        found = sorted({bucket for bucket, _ in self.cells})
        return {b: max(self.strategies(b), key=lambda s: self.rate(b, s)) for b in found}

    def to_json(self) -> dict[str, Any]:
        rows = [
            [w.batch, w.strategy, w.passes, w.emitted, round(w.seconds, 7), w.request_passes]
            for cell in self.cells.values()
            for w in cell
        ]
        return {"buckets": self.buckets, "windows": rows}

    @staticmethod
    def from_json(content: dict[str, Any]) -> Recording:
        recording = Recording(list(content["buckets"]))
        recording.add(Window(*row) for row in content["windows"])
        return recording


@dataclass
class Replay:
    """Time of a policy's choices on a recording."""

    seconds: float = 0.0
    oracle_seconds: float = 0.0
    pulls: Counter[tuple[int, str]] = field(default_factory=Counter)

    @property
    def regret(self) -> float:
        """Share of the time that the best strategy of each bucket would have saved."""
        return 1.0 - self.oracle_seconds / self.seconds if self.seconds else 0.0


def replay(bandit: Bandit, recording: Recording, work: Sequence[tuple[int, int]]) -> Replay:
    """Lets a bandit choose through a rollout whose passes come from a recording.

    Each choice gets the next recorded window of its cell. A strategy without a window at a bucket
    is not offered there. The oracle emits the same tokens at the best rate of the bucket.

    Args:
        bandit: chooses and learns.
        recording: windows of every strategy.
        work: (batch, tokens) to emit at each batch, in the order of the rollout.
    """
    out, turn = Replay(), Counter[tuple[int, str]]()
    oracle = recording.oracle()
    for batch, tokens in work:
        bucket = recording.bucket(batch)
        offered = set(recording.strategies(bucket))
        rate = recording.rate(bucket, oracle[bucket])
        left = float(tokens)
        while left > 0:
            strategy = str(bandit.choose(batch, lambda arm: str(arm) in offered))  # noqa: B023
            cell = recording.cells[bucket, strategy]
            window = cell[turn[bucket, strategy] % len(cell)]
            turn[bucket, strategy] += 1
            share = min(1.0, left / max(1, window.emitted))
            bandit.record(window.emitted, window.seconds, window.passes, window.request_passes)
            left -= max(1, window.emitted)
            out.seconds += share * window.seconds
            out.oracle_seconds += share * window.emitted / rate
            out.pulls[bucket, strategy] += 1
    return out


def work_of(lengths: Sequence[int], max_batch: int) -> list[tuple[int, int]]:
    """(batch, tokens) in the order of a rollout in which all requests emit at one pace.

    Args:
        lengths: of the requests.
        max_batch: requests at once; the others start when these finish.

    Example:
        >>> work_of([3, 1], 2), work_of([3, 1], 1)
        ([(2, 2), (1, 2)], [(1, 3), (1, 1)])
    """
    waiting, running, out = list(lengths), list[int](), list[tuple[int, int]]()
    while waiting or running:
        while waiting and len(running) < max_batch:
            running.append(waiting.pop(0))
        step = min(running)
        out.append((len(running), step * len(running)))
        running = [left - step for left in running if left > step]
    return out
