"""Workloads without a card: a trace of response lengths, the mean of a histogram."""

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

# The trace of `targets.toml`.
REQUESTS, MEDIAN, SIGMA, SEED, CAP = 128, 512, 1.0, 0, 6144


def trace_lengths(
    count: int = REQUESTS,
    median: int = MEDIAN,
    sigma: float = SIGMA,
    seed: int = SEED,
    cap: int = CAP,
) -> list[int]:
    """Lognormal response lengths up to `cap`, the same on every machine.

    Example:
        >>> max(trace_lengths()), sorted(trace_lengths())[64]
        (6144, 632)
    """
    draw, normal = random.Random(seed), NormalDist(math.log(median), sigma)
    # The inverse distribution takes one uniform a length, independent of `random`'s own normal.
    uniforms = (min(max(draw.random(), 1e-12), 1 - 1e-12) for _ in range(count))
    return [min(cap, max(1, round(math.exp(normal.inv_cdf(u))))) for u in uniforms]


def accept_length(counts: Sequence[int]) -> float:
    """Mean tokens of a request in a pass, its own included; `counts[n - 1]` passes emitted n."""
    total = sum(counts)
    return sum(n * count for n, count in enumerate(counts, 1)) / total if total else 1.0
