"""The engine's benchmarks without a card: trace, histogram, recording, regret."""

import math
import statistics

import pytest

from driver.config.sections import BanditConfig
from driver.config.strategy import Strategy
from driver.rollout.bandit import Bandit
from profiling.benches import bandit as bandit_bench
from profiling.rig.bench import Bench
from profiling.rig.workload import (
    Recorder,
    Recording,
    Window,
    accept_length,
    replay,
    trace_lengths,
    work_of,
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


@pytest.mark.parametrize(
    ("lengths", "max_batch"), [([5, 1, 3], 8), ([4, 4, 4], 2), ([7], 1), ([], 3)]
)
def test_work_emits_every_token_at_batches_that_fit(lengths, max_batch):
    work = work_of(lengths, max_batch)
    assert sum(tokens for _, tokens in work) == sum(lengths)
    assert all(1 <= batch <= max_batch for batch, _ in work)
    assert work_of([5, 1, 3], 8) == [(3, 3), (2, 4), (1, 2)]


def test_a_recorder_forwards_to_the_bandit_and_keeps_the_windows():
    inner = Bandit(ARMS, BanditConfig(window_passes=4), 16)
    recorder = Recorder(inner)
    chosen = recorder.choose(3, lambda arm: True)
    assert recorder.horizon == inner.horizon == 4
    recorder.record(12, 0.25, 4)
    assert recorder.windows == [Window(3, str(chosen), 4, 12, 0.25)]
    recorder.choose(3, lambda arm: True)
    assert recorder.metrics() == inner.metrics() != {}


def test_a_recording_survives_json(recording):
    again = Recording.from_json(recording.to_json())
    assert again.oracle() == recording.oracle() == {1: LARGE, 4: SMALL, 16: OFF}
    assert again.rate(1, LARGE) == pytest.approx(recording.rate(1, LARGE), rel=1e-5)
    assert again.bucket(3) == 4 and again.bucket(99) == 16
    assert set(again.strategies(4)) == {OFF, SMALL, LARGE}


def test_the_best_of_each_bucket_has_no_regret(recording):
    work = work_of([400, 300, 200, 100, 900] * 4 + [1000], 16)
    best = " ".join(f"{bucket}={strategy}" for bucket, strategy in recording.oracle().items())
    oracle = Bandit(ARMS, BanditConfig(buckets=[1, 4, 16], policy=best), 16)
    result = replay(oracle, recording, work)
    assert result.regret == pytest.approx(0, abs=0.02)
    assert {bucket: strategy for bucket, strategy in result.pulls} == recording.oracle()
    # The regret of a static choice follows from its rate.
    off = Bandit(ARMS, BanditConfig(policy=OFF), 16)
    alone = replay(off, recording, [(1, 1000)])
    assert alone.regret == pytest.approx(1 - 100 / 300, abs=0.02)
    assert alone.seconds == pytest.approx(10, rel=0.05)
    assert alone.oracle_seconds == pytest.approx(1000 / 300, rel=0.05)


def test_a_bandit_learns_the_buckets(recording):
    work = work_of([4000, 3000, 2000, 1000] * 4, 16)
    config = BanditConfig(buckets=[1, 4, 16], epsilon=0.05)
    learning = Bandit(ARMS, config, 16, seed=0)
    first, *_, last = [replay(learning, recording, work) for _ in range(4)]
    assert 0 <= last.regret < 0.1
    assert last.regret <= first.regret + 0.02
    random = Bandit(ARMS, BanditConfig(buckets=[1, 4, 16], epsilon=1.0), 16, seed=0)
    assert replay(random, recording, work).regret > 3 * last.regret
    # A strategy without a window in a bucket is not offered there.
    partial = Recording([1, 4])
    partial.add(windows(1, OFF, 100))
    partial.add(windows(1, SMALL, 50))
    partial.add(windows(4, OFF, 100))
    fixed = Bandit(ARMS, BanditConfig(policy=SMALL), 4)
    assert set(replay(fixed, partial, [(4, 500)]).pulls) == {(4, OFF)}


def test_the_bandit_bench_ranks_ways_of_choosing(recording, monkeypatch):
    bench = Bench("bandit", math.nan)
    monkeypatch.setattr(bandit_bench, "trace_lengths", lambda: [900, 500, 300, 100] * 4)
    bandit_bench.evaluate(bench, recording)
    regret = {row["case"]: row["regret"] for row in bench.rows}
    assert regret["map"] == min(regret.values())
    assert regret["map"] < regret["beg 0.1"] < regret[f"static {LARGE}"]
    assert set(bench.files["pulls"]) == set(regret)


def test_without_a_recording_the_bandit_bench_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(bandit_bench, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="run python -m profiling.bench rollout"):
        bandit_bench.run(Bench("bandit", math.nan))
