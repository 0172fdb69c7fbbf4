"""Statistics of a rollout, from artificial bursts."""

from types import SimpleNamespace

import pytest

from driver.config.strategy import OFF, Strategy
from driver.rollout.stats import RolloutStats

LEARNED = Strategy.parse("learned:4,1,5")


def stats_of(bursts):
    """Statistics of bursts given as (strategy, passes, requests, emitted)."""
    stats = RolloutStats()
    for strategy, passes, requests, emitted in bursts:
        ends = [0.1 * (i + 1) for i in range(passes)]
        burst = SimpleNamespace(
            strategy=strategy,
            passes=passes,
            active=[requests] * passes,
            request_passes=passes * requests,
            total=emitted,
            rows=passes * requests * (1 if strategy == OFF else 5),
            elapsed_s=ends[-1],
            ends_s=ends,
        )
        stats.add_burst(burst, 0.0)
    return stats


def test_accept_length_by_quarter_of_the_request_passes():
    """32 of them: quarters of eight, of any requests; plain passes do not count."""
    bursts = [
        (LEARNED, 1, 8, 16),
        (OFF, 9, 8, 72),
        (LEARNED, 2, 4, 24),
        (LEARNED, 4, 2, 12),
        (LEARNED, 4, 1, 16),
        (LEARNED, 4, 1, 20),
    ]
    stats = stats_of(bursts)
    assert stats.accept_by_quarter() == [2.0, 3.0, 1.5, 4.5]
    assert stats.accept_length == pytest.approx(88 / 32)
    metrics = stats.metrics()
    assert [metrics[f"spec/accept_length_q{n}"] for n in range(1, 5)] == [2.0, 3.0, 1.5, 4.5]


def test_a_burst_counts_in_each_quarter_by_its_share():
    """3, 4, 4 and 5 of 16 request-passes: all but the first begin in the previous quarter."""
    bursts = [(LEARNED, n, 1, n * each) for n, each in ((3, 2), (4, 3), (4, 4), (5, 5))]
    assert stats_of(bursts).accept_by_quarter() == [9 / 4, 13 / 4, 17 / 4, 5.0]
    assert stats_of([(LEARNED, 60, 1, 300), (LEARNED, 20, 1, 20)]).accept_by_quarter() == [
        5,
        5,
        5,
        1,
    ]


def test_the_host_s_share_is_of_the_time_since_the_first_pass():
    stats = RolloutStats(elapsed_s=5.0, passes_s=3.0, trace=[(1.0, 2, "off"), (2.0, 1, "off")])
    assert stats.host_share == 0.25
    assert RolloutStats(elapsed_s=1.0, passes_s=2.0, trace=[(0.0, 1, "off")]).host_share == 0.0


def test_quarters_without_speculation():
    assert stats_of([(OFF, 5, 2, 10)]).accept_by_quarter() == []
    assert "spec/accept_length_q1" not in stats_of([(OFF, 5, 2, 10)]).metrics()


def test_refills_are_appended_and_ranks_are_concurrent():
    first, second = stats_of([(LEARNED, 2, 1, 4)] * 2), stats_of([(LEARNED, 2, 1, 6)] * 2)
    ranks = RolloutStats.side_by_side([first, second], own=1)
    assert ranks.accept_by_quarter() == [3.0] * 4 and ranks.spec_emitted == 20
    first.add(second)
    assert first.accept_by_quarter() == [2.0, 2.0, 3.0, 3.0]
