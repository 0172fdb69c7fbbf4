"""The bandit chooses per bucket, tries every arm once, and keeps its state."""

import pytest

from driver.common.errors import UserError
from driver.config.sections import BanditConfig
from driver.config.strategy import OFF, Strategy
from driver.rollout.bandit import Bandit

NGRAM = Strategy.parse("ngram:4,1,5")
LEARNED = Strategy.parse("learned:4,2,8")


def no_graphs(batch, arm):
    """No step time is known."""


def make(epsilon=0.0, policy="beg", spec_max_batch=8, window_passes=4):
    config = BanditConfig(
        epsilon=epsilon,
        window_passes=window_passes,
        buckets=[1, 4, 8],
        policy=policy,
    )
    return Bandit([OFF, NGRAM, LEARNED], config, spec_max_batch, seed=1)


def play(bandit, speed, batch, passes, usable=lambda arm: True, step_s=no_graphs):
    """Runs passes whose arms emit `speed[arm]` tokens a second."""
    chosen = []
    for _ in range(passes):
        arm = bandit.choose(batch, usable, step_s)
        bandit.record(speed[arm], 1.0, 1, batch)
        chosen.append(arm)
    return chosen


def test_every_arm_is_tried_then_the_best_wins():
    bandit = make()
    speed = {OFF: 10, NGRAM: 15, LEARNED: 12}
    chosen = play(bandit, speed, batch=1, passes=40)
    assert set(chosen[:12]) == {OFF, NGRAM, LEARNED}
    assert set(chosen[12:]) == {NGRAM}


def test_buckets_learn_separately():
    bandit = make()
    play(bandit, {OFF: 10, NGRAM: 15, LEARNED: 12}, batch=1, passes=40)
    play(bandit, {OFF: 20, NGRAM: 15, LEARNED: 12}, batch=8, passes=40)
    assert bandit.choose(1, lambda arm: True, no_graphs) == NGRAM
    assert bandit.choose(7, lambda arm: True, no_graphs) == OFF


@pytest.mark.parametrize(("batch", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8), (99, 8)])
def test_bucket_is_the_smallest_that_holds_the_batch(batch, bucket):
    assert make().bucket(batch) == bucket


def test_large_batches_and_unusable_arms_run_off():
    bandit = make()
    assert bandit.choose(9, lambda arm: True, no_graphs) == OFF
    only_off = play(bandit, {OFF: 1}, batch=1, passes=30, usable=lambda arm: arm == OFF)
    assert set(only_off) == {OFF}


def test_an_arm_that_stops_being_usable_is_left_at_once():
    bandit = make()
    play(bandit, {OFF: 1, NGRAM: 1, LEARNED: 9}, batch=1, passes=40)
    assert bandit.choose(1, lambda arm: arm != LEARNED, no_graphs) != LEARNED


def test_it_adapts_when_an_arm_gets_worse():
    bandit = make(epsilon=0.2)
    play(bandit, {OFF: 10, NGRAM: 30, LEARNED: 12}, batch=1, passes=100)
    late = play(bandit, {OFF: 10, NGRAM: 5, LEARNED: 12}, batch=1, passes=600)[-200:]
    assert late.count(LEARNED) > 120


def windows(chosen, window_passes=4):
    """The arm of each window; the best arm may have two in a row."""
    return chosen[::window_passes]


def test_epsilon_explores_arms_close_to_the_best():
    """A share epsilon of explorations takes any arm: 0.04 / 3, and 0.16 / 2 + 0.04 / 3."""
    chosen = play(make(epsilon=0.2), {OFF: 10, NGRAM: 9, LEARNED: 1}, batch=1, passes=20_000)
    tried = windows(chosen)
    assert 0.003 < tried.count(LEARNED) / len(tried) < 0.02
    assert 0.03 < tried.count(NGRAM) / len(tried) < 0.1
    assert tried.count(OFF) / len(tried) > 0.88


def test_a_poor_arm_that_improves_is_found():
    bandit = make(epsilon=0.2)
    play(bandit, {OFF: 10, NGRAM: 8, LEARNED: 2}, batch=1, passes=400)
    late = play(bandit, {OFF: 10, NGRAM: 8, LEARNED: 30}, batch=1, passes=4000)
    assert late[-400:].count(LEARNED) > 320


def test_the_best_arm_runs_for_two_windows_once_it_is_known():
    bandit = make()
    speed = {OFF: 10, NGRAM: 15, LEARNED: 12}
    play(bandit, speed, batch=1, passes=12)  # each tried once
    lengths = []
    for _ in range(6):
        bandit.choose(1, lambda arm: True, no_graphs)
        lengths.append(bandit.horizon)
        play(bandit, speed, batch=1, passes=bandit.horizon)
    assert lengths == [4, 4, 4, 8, 8, 8]
    assert len(bandit.state_dict()["rewards"]["1/ngram:4,1,5"]) == 6


def test_windows_of_the_next_bucket_move_an_arm_more_than_an_old_one_of_its_own():
    """Responses differ between rollouts; one bad window must not last for ever."""
    bandit = make()

    def step_s(batch, arm):
        return 1.0

    def run(speed, batch, passes, usable=lambda arm: True):
        return set(play(bandit, speed, batch, passes, usable, step_s))

    run({OFF: 8, NGRAM: 16, LEARNED: 24}, batch=8, passes=40)
    assert run({LEARNED: 24}, batch=8, passes=40) == {LEARNED}
    assert run({NGRAM: 40}, 4, passes=8, usable=lambda arm: arm == NGRAM) == {NGRAM}
    assert bandit.choose(8, lambda arm: True, step_s) == LEARNED  # not at once
    run({NGRAM: 40}, 4, passes=400, usable=lambda arm: arm == NGRAM)
    assert bandit.choose(8, lambda arm: True, step_s) == NGRAM


def test_an_arm_s_own_windows_age_while_no_other_runs():
    """Otherwise an arm that always runs would never forget old windows."""
    bandit = make()
    play(bandit, {NGRAM: 16}, batch=1, passes=4000, usable=lambda arm: arm == NGRAM)
    play(bandit, {NGRAM: 4}, batch=1, passes=1600, usable=lambda arm: arm == NGRAM)
    assert 4 < bandit._accept(1, NGRAM) < 7  # 200 windows: a quarter of the old is left


def test_ucb_gives_the_best_arm_two_windows_too():
    bandit = make(policy="ucb")
    play(bandit, {OFF: 1, NGRAM: 15, LEARNED: 1}, batch=1, passes=60)
    bandit.choose(9, lambda arm: True, no_graphs)  # closes the window
    assert bandit.choose(1, lambda arm: True, no_graphs) == NGRAM and bandit.horizon == 8


def test_static_policy():
    bandit = make(policy="ngram:4,1,5")
    assert bandit.choose(2, lambda arm: True, no_graphs) == NGRAM
    assert bandit.choose(9, lambda arm: True, no_graphs) == OFF
    assert bandit.choose(2, lambda arm: arm == OFF, no_graphs) == OFF


def test_known_step_times_spare_arms_a_trial():
    """Acceptance is learned in one bucket; the step time of another one was measured."""
    bandit = make()

    def step_s(batch, arm):
        return {OFF: 1.0, NGRAM: 1.0, LEARNED: 4.0}[arm]

    speed = {OFF: 1, NGRAM: 3, LEARNED: 2}
    first = play(bandit, speed, batch=1, passes=40, step_s=step_s)
    assert OFF not in first  # known in advance: one token per pass
    assert first.count(LEARNED) == 4 and first[-1] == NGRAM
    faster = {arm: 4 * tokens for arm, tokens in speed.items()}
    assert set(play(bandit, faster, 4, passes=40, step_s=step_s)) == {NGRAM}


def test_arms_that_can_never_pay_are_not_tried():
    """All drafts accepted, a pass emits levels + 1 tokens of a request."""
    speed = {OFF: 1, NGRAM: 1, LEARNED: 1}
    seconds = {OFF: 1.0, NGRAM: NGRAM.levels + 0.9, LEARNED: LEARNED.levels + 1.1}
    played = play(make(epsilon=1.0), speed, 4, 200, step_s=lambda batch, arm: seconds[arm])
    assert set(played) == {OFF, NGRAM}
    assert LEARNED in play(make(epsilon=1.0), speed, 4, 200)


def test_arms_are_compared_as_if_the_bucket_were_full():
    """A graph of eight rows takes as long for five requests."""
    bandit = make()

    def step_s(batch, arm):
        return 0.5

    for batch in (5, 8):
        bandit.choose(batch, lambda arm: arm == NGRAM, step_s)
        bandit.record(4 * 3 * batch, 2.0, 4, 4 * batch)  # three tokens per request and pass
        bandit.choose(1, lambda arm: arm == OFF, step_s)  # closes the window
    rewards = bandit.state_dict()["rewards"]["8/ngram:4,1,5"]
    assert rewards == pytest.approx([48.0, 48.0])


def test_ucb_returns_to_the_least_known_arm():
    bandit = make(policy="ucb")
    close = play(bandit, {OFF: 10, NGRAM: 10.2, LEARNED: 10.1}, batch=1, passes=400)
    assert min(close.count(arm) for arm in (OFF, NGRAM, LEARNED)) >= 16
    far = play(make(policy="ucb"), {OFF: 2, NGRAM: 10, LEARNED: 1}, batch=1, passes=400)
    assert far.count(NGRAM) > 370


def test_a_map_chooses_by_batch():
    config = BanditConfig(policy="4=ngram:4,1,5, 1=learned:4,2,8")
    bandit = Bandit([OFF, NGRAM, LEARNED], config, spec_max_batch=8)
    chosen = [bandit.choose(batch, lambda arm: True, no_graphs) for batch in (1, 2, 4, 5, 9)]
    assert chosen == [LEARNED, NGRAM, NGRAM, OFF, OFF]
    for policy, message in (
        ("4=ngram:4,1,5 x=off", "'x=off' is not batch=strategy"),
        ("1=nope", "strategy 'nope': malformed"),
        ("1=off 1=ngram:4,1,5", "'1=ngram:4,1,5' is a second strategy for the same batches"),
        ("", "strategy '': malformed"),
    ):
        with pytest.raises(UserError, match=f"bandit.policy: must be beg, .*{message}"):
            BanditConfig(policy=policy)


def test_the_horizon_is_the_rest_of_the_window():
    bandit = make(window_passes=8)
    bandit.choose(1, lambda arm: True, no_graphs)
    assert bandit.horizon == 8
    bandit.record(3, 1.0, 5, 5)
    assert bandit.horizon == 3
    bandit.record(3, 1.0, 3, 3)
    assert bandit.choose(1, lambda arm: True, no_graphs) != OFF  # the next to try
    bandit.choose(9, lambda arm: True, no_graphs)
    assert bandit.horizon > 1000


def test_state_survives_a_checkpoint_through_json():
    import json

    bandit = make(epsilon=0.3)
    speed = {OFF: 10, NGRAM: 15, LEARNED: 12}
    play(bandit, speed, batch=1, passes=60)
    bandit.choose(9, lambda arm: True, no_graphs)  # closes the window
    other = make(epsilon=0.3)
    other.load_state_dict(json.loads(json.dumps(bandit.state_dict())))
    assert other.metrics() == bandit.metrics()
    assert play(other, speed, 1, 200) == play(bandit, speed, 1, 200)


def test_arms_that_differ_in_kind_only_learn_separately():
    import json

    hybrid = Strategy.parse("hybrid:4,2,8")
    config = BanditConfig(buckets=[1, 4, 16], window_passes=4, epsilon=0.0)
    bandits = [Bandit([OFF, LEARNED, hybrid], config, spec_max_batch=8) for _ in range(2)]
    play(bandits[0], {OFF: 10, LEARNED: 12, hybrid: 15}, batch=1, passes=60)
    bandits[1].load_state_dict(json.loads(json.dumps(bandits[0].state_dict())))
    assert [bandit.choose(1, lambda arm: True, no_graphs) for bandit in bandits] == [hybrid, hybrid]
    assert bandits[1].metrics()["spec/arm/1/hybrid:4,2,8/reward"] == pytest.approx(15.0)
    assert bandits[1].choose(1, lambda arm: not arm.needs_drafter, no_graphs) == OFF


def test_metrics_name_bucket_and_strategy():
    bandit = make()
    play(bandit, {OFF: 10, NGRAM: 15, LEARNED: 12}, batch=1, passes=13)
    metrics = bandit.metrics()
    assert metrics["spec/arm/1/off/pulls"] == 1
    assert metrics["spec/arm/1/ngram:4,1,5/reward"] == pytest.approx(15.0)
