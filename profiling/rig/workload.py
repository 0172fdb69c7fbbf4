"""Workloads without a card: a trace of response lengths, recorded passes."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict
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
