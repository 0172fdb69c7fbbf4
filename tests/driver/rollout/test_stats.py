"""Statistics of a rollout, from artificial bursts."""

from types import SimpleNamespace

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


def test_accept_length_leaves_plain_passes_out():
    bursts = [(LEARNED, 1, 8, 16), (OFF, 9, 8, 72), (LEARNED, 2, 4, 24), (LEARNED, 4, 1, 20)]
    assert stats_of(bursts).accept_length == 60 / 20
    assert stats_of([(OFF, 5, 2, 10)]).accept_length is None


def test_the_host_s_share_is_of_the_time_since_the_first_pass():
    stats = RolloutStats(elapsed_s=5.0, passes_s=3.0, trace=[(1.0, 2, "off"), (2.0, 1, "off")])
    assert stats.host_share == 0.25
    assert RolloutStats(elapsed_s=1.0, passes_s=2.0, trace=[(0.0, 1, "off")]).host_share == 0.0


def test_refills_are_appended_and_ranks_are_concurrent():
    first, second = stats_of([(LEARNED, 2, 1, 4)] * 2), stats_of([(LEARNED, 2, 1, 6)] * 2)
    ranks = RolloutStats.side_by_side([first, second], own=1)
    assert ranks.spec_emitted == 20 and ranks.accept_length == 2.5
    first.add(second)
    assert first.spec_emitted == 20
