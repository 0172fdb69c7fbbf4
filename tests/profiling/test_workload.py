"""The engine's benchmarks without a card: trace and histogram."""

import math
import statistics

import pytest

from profiling.rig.workload import accept_length, trace_lengths


def test_the_trace_is_the_one_of_the_targets():
    lengths = trace_lengths()
    assert len(lengths) == 128 and lengths == trace_lengths()
    assert min(lengths) >= 1 and max(lengths) == 6144
    assert lengths != trace_lengths(seed=1)
    many = [math.log(n) for n in trace_lengths(20_000, cap=10**9)]
    assert math.exp(statistics.median(many)) == pytest.approx(512, rel=0.05)
    assert statistics.stdev(many) == pytest.approx(1.0, rel=0.03)


def test_accept_length_comes_from_counts():
    assert accept_length([2, 1, 3, 0]) == pytest.approx(13 / 6)
    assert accept_length([0, 0]) == 1.0
