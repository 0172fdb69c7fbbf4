"""The engine's benchmarks without a card: trace, histogram, recording."""

import math
import statistics

import pytest

from driver.config.sections import BanditConfig
from driver.config.strategy import Strategy
from driver.rollout.bandit import Bandit
from profiling.rig.workload import (
    Recorder,
    Recording,
    Window,
    accept_length,
    trace_lengths,
)

OFF, SMALL, LARGE = "off", "ngram:4,1,5", "learned:8,4,32"
ARMS = [Strategy.parse(s) for s in (OFF, SMALL, LARGE)]


def windows(batch: int, strategy: str, rate: float, count: int = 8) -> list[Window]:
    """`count` windows of 8 passes at about `rate` tokens a second."""
    return [
        Window(batch, strategy, 8, 100 + i, (100 + i) / rate * (1 + 0.02 * (-1) ** i))
        for i in range(count)
    ]


@pytest.fixture
def recording():
    """The large tree is best at 1 request, the small one at 4, `off` at 16."""
    out = Recording([1, 4, 16])
    for batch, rates in {1: (100, 150, 300), 4: (400, 600, 500), 16: (1600, 900, 400)}.items():
        for strategy, rate in zip((OFF, SMALL, LARGE), rates, strict=True):
            out.add(windows(batch, strategy, rate))
    return out


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


def test_a_recorder_forwards_to_the_bandit_and_keeps_the_windows():
    inner = Bandit(ARMS, BanditConfig(window_passes=4), 16)
    recorder = Recorder(inner)
    chosen = recorder.choose(3, lambda arm: True)
    assert recorder.horizon == inner.horizon == 4
    recorder.record(12, 0.25, 4)
    assert recorder.windows == [Window(3, str(chosen), 4, 12, 0.25)]
    recorder.choose(3, lambda arm: True)
    assert recorder.metrics() == inner.metrics() != {}


def test_a_recording_knows_the_best_of_each_bucket(recording):
    assert recording.oracle() == {1: LARGE, 4: SMALL, 16: OFF}
    assert recording.rate(1, LARGE) == pytest.approx(300, rel=0.05)
    assert recording.bucket(3) == 4 and recording.bucket(99) == 16
    assert set(recording.strategies(4)) == {OFF, SMALL, LARGE}
