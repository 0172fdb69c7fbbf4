"""Whether the drafter trains: decisions on made-up series, and a trainer at rest."""

import math
import operator
import random
import time
from types import SimpleNamespace

import pytest
import torch

from driver.drafter.payoff import PAYBACK, WINDOW, Measured, Payoff, change, decide, error
from driver.rollout.stats import RolloutStats
from tests.driver.drafter.test_trainer import fill
from tests.driver.drafting import build_parts, finish
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_engine import generate, make_rollout, requests

ARM = "learned:4,1,5"


def series(*lengths, seconds=0.3, cost_s=0.04, arm=ARM):
    """A rollout of 1,000 request-passes for each accept length."""
    return [Measured({arm: 1000}, {arm: 1000 * a}, seconds, cost_s) for a in lengths]


def run(*parts):
    """(rollout, trains) of each change, and the reasons."""
    payoff, changes, reasons = Payoff(), [], []
    for index, measured in enumerate(m for part in parts for m in part):
        if reason := payoff.add(measured):
            changes.append((index, payoff.trains))
            reasons.append(reason)
    return changes, reasons


def test_a_change_is_that_of_the_same_arms():
    """The bandit may choose other arms, whose accept length differs."""
    before = [Measured({"a": 100, "b": 100}, {"a": 200, "b": 500}, 1.0, 0.0)]
    after = [Measured({"a": 300, "b": 100}, {"a": 630, "b": 500}, 1.0, 0.0)]
    assert change(before, after) == pytest.approx(0.05 * 300 / 400)
    assert change(before, [Measured({"b": 9}, {"b": 45}, 1.0, 0.0)]) == 0.0
    assert change(before, [Measured({"c": 9}, {"c": 45}, 1.0, 0.0)]) is None
    assert change(before, [Measured({}, {}, 0.0, 0.0)]) is None


def test_a_drafter_that_does_not_learn_rests():
    changes, (reason,) = run(series(*[5.0] * 20))
    assert changes == [(2 * WINDOW - 1, False)]
    worth, cost = f"worth 0 ms in {PAYBACK} rollouts", "training costs 40 ms a rollout"
    assert reason == f"training rests: the accept length grows 0.0% a rollout, {worth}; {cost}"


def test_training_that_costs_nothing_never_rests():
    assert run(series(5.0, 5.1, 4.9, 5.0, 4.8, 4.7, 4.9, 4.6, 4.8, cost_s=0.0))[0] == []


def test_a_drafter_that_learns_fast_trains():
    """Also if its arms hardly run yet: the bandit waits for a better drafter."""
    growing = [1.2 * 1.03**i for i in range(20)]
    assert run(series(*growing))[0] == []
    assert run(series(*growing, seconds=0.001))[0] == []


@pytest.mark.parametrize(
    ("seconds", "cost_s", "trains"), [(0.3, 0.04, False), (3.0, 0.04, True), (0.3, 0.004, True)]
)
def test_slow_learning_must_be_worth_its_time(seconds, cost_s, trains):
    """0.3 % a rollout saves 9 ms of 0.3 s in ten rollouts."""
    slow = series(*[5.0 * 1.003**i for i in range(30)], seconds=seconds, cost_s=cost_s)
    assert (run(slow)[0] == []) is trains


def test_training_goes_on_when_the_accept_length_falls():
    flat, fallen = series(*[5.0] * 10), series(*[4.5] * 6, cost_s=0.0)
    changes, reasons = run(flat, fallen)
    assert [trains for _, trains in changes] == [False, True]
    assert changes[1][0] < len(flat) + 2 * WINDOW
    assert reasons[1].startswith("training goes on: the accept length fell 8.3% at rest")
    assert "training costs 240 ms in 6" in reasons[1]  # at rest it costs nothing
    # Nothing is decided on what was measured before the change.
    since = len(flat) + len(fallen) - changes[1][0] - 1
    left = 2 * WINDOW - since
    assert len(run(flat, fallen, series(*[4.5] * (left - 1)))[0]) == 2
    assert len(run(flat, fallen, series(*[4.5] * left))[0]) == 3


def test_a_fall_must_be_worth_all_rollouts_of_the_training_that_resumes():
    """10 % of .3 s are 300 ms in ten rollouts."""
    for cost_s, resumes in ((0.04, True), (0.06, False)):
        changes, _ = run(series(*[5.0] * 10, cost_s=cost_s), series(*[4.5] * 6))
        assert (len(changes) == 2) is resumes


def noisy(seed, count, fall=0.0, sigma=0.04):
    """Rollouts of a drafter of a long warm start, whose last half is lower by `fall`."""
    draw = random.Random(seed)
    noise = [math.exp(draw.gauss(0.0, sigma)) for _ in range(count)]
    lengths = [7.5 * x * (1 - fall * (2 * i >= count)) for i, x in enumerate(noise)]
    return rollouts(lengths[0], start=1500) + rollouts(*lengths[1:], start=1509, steps=0)


def test_prompts_seldom_start_training_and_a_fall_does():
    """Accept lengths of rollouts with one drafter differ by 4 % on an H200."""
    resumed = [run(noisy(seed, 80))[0][1:] for seed in range(100)]
    assert sum(map(bool, resumed)) <= 2
    fallen = [run(noisy(seed, 80, fall=0.2))[0][1:] for seed in range(100)]
    assert sum(bool(c) and 40 <= c[0][0] < 40 + 2 * WINDOW for c in fallen) >= 98


def test_a_fall_within_two_standard_errors_is_due_to_prompts():
    """Also if training costs next to nothing."""

    def resumes(spread):
        before, after = [5.0 + spread, 5.0 - spread] * 3, [4.8 + spread, 4.8 - spread] * 3
        return bool(decide(False, series(*before, *after, cost_s=1e-6)))

    # The error of a mean of six is the spread / sqrt(5), that of the difference sqrt(2) more.
    limit = 0.2 / 2 * math.sqrt(5 / 2)
    assert resumes(0.99 * limit) and not resumes(1.01 * limit)


def test_the_error_of_a_change_is_that_of_the_rollouts_with_common_arms():
    before, after = series(4.0, 6.0), series(5.0, 5.0, 5.0)
    assert error(before, after) == pytest.approx(0.2)  # deviation .2 * sqrt(2) of two
    assert error(before, [*after, *series(9.0, arm="other")]) == pytest.approx(0.2)
    assert error(before[:1], after) == 0.0  # one rollout has no spread


def rollouts(*lengths, start=0, steps=9, passes=1000, seconds=0.3, cost_s=0.04, arm=ARM):
    """The same with micro-steps, `start` of which were made before; 0 = no learned passes."""
    return [
        Measured(
            {arm: passes} if a else {},
            {arm: passes * a} if a else {},
            seconds if a else 0.0,
            cost_s if steps else 0.0,
            steps,
            start + i * steps,
        )
        for i, a in enumerate(lengths, 1)
    ]


def test_a_drafter_that_is_never_used_rests_once_it_learns_slowly():
    changes, (reason,) = run(rollouts(*[0] * 60))
    ((index, trains),) = changes
    assert not trains and 15 < index < 25  # 9 micro-steps of 150 let it grow by 1 %
    assert reason.startswith("training rests")
    # It trains again once learned arms run.
    rest = rollouts(*[0] * 20, steps=0)
    assert len(run(rollouts(*[0] * 30), rest)[0]) == 1
    used = rollouts(*[3.0] * 3, steps=0, seconds=2.0)
    changes, reasons = run(rollouts(*[0] * 30), rest, used)
    assert [trains for _, trains in changes] == [False, True]
    assert reasons[1].startswith("training goes on: the accept length has no comparison at rest")


def test_a_few_passes_do_not_stop_a_young_drafter():
    """The bandit explores its arms now and then, so their accept lengths are noise."""
    noise = [1.5, 1.1, 1.9, 1.2, 1.0, 1.3, 1.6, 1.1, 1.4]
    few = {"passes": 8, "seconds": 0.01}
    assert run(rollouts(*noise, **few))[0] == []
    assert len(run(rollouts(*noise, start=1500, **few))[0]) == 1


@pytest.mark.parametrize("after", [2.0, 0])
def test_training_resumes_if_the_bandit_dropped_a_drafter_that_became_poor(after):
    """The few passes that explore it save little; those it made before count."""
    used = rollouts(*[5.0] * 6, start=1500, seconds=0.5)
    dropped = rollouts(*[after] * 6, steps=0, passes=8, seconds=0.004)
    changes, _ = run(used, dropped)
    assert [trains for _, trains in changes] == [False, True]
    assert len(run(rollouts(*[5.0] * 6, start=1500, seconds=0.004), dropped)[0]) == 1
    # It gets a new drafter's time to recover, although it has made many micro-steps.
    unused = rollouts(*[0] * 30, start=1600)
    ((begin, _), (end, trains)) = run(used, dropped, unused)[0][1:]
    assert not trains and 15 < end - begin < 25


def test_an_uneven_growth_is_measured_on_more_rollouts():
    """2 % a rollout is worth 60 ms; three hard prompts in a row hide it from the last six."""
    steady = [2.0 * 1.02**i for i in range(12)]
    hard = [a * (0.93 if i > 8 else 1.0) for i, a in enumerate(steady)]
    options = {"seconds": 0.3, "cost_s": 0.02}
    assert run(series(*hard, **options))[0] == []
    assert decide(True, series(*hard[-6:], **options)).startswith("training rests")


def test_single_rollouts_decide_nothing():
    """Prompts differ: one easy rollout is not learning, one hard rollout no loss."""
    for history in (series(5.0, 9.0), series(5.0, 1.0), []):
        assert not decide(True, history) and not decide(False, history)


def started(trained, steps=8, seconds=0.3, cost_s=0.04, rollouts=8):
    """Changes of the decision for a drafter that starts with `trained` micro-steps."""
    return run(
        [
            Measured({ARM: 1000}, {ARM: 5000}, seconds, cost_s, steps, trained + i * steps)
            for i in range(1, rollouts + 1)
        ]
    )


def test_a_drafter_of_a_long_warm_start_rests_after_its_first_steps():
    changes, (reason, *_) = started(1500)
    assert changes == [(0, False)]
    assert "of 1508 micro-steps the last 8 let the accept length grow by about 0.07%" in reason
    assert reason.endswith("worth 2 ms in 10 rollouts; training costs 40 ms a rollout")
    assert started(1500, seconds=9.0, rollouts=5)[0] == []  # worth it in long rollouts
    assert started(1500, cost_s=0.0)[0] == []
    assert started(100, rollouts=5)[0] == []  # it learns fast at first
    assert started(0, rollouts=5)[0] == []
    # The first rollout is weighed before any step.
    assert Measured({}, {}, 0.3, 0.04, 0, 1500).expected == math.inf


def test_training_resumes_after_a_fall_whatever_the_age_of_the_drafter():
    def measured(accept, steps, cost_s):
        return Measured({ARM: 1000}, {ARM: 1000 * accept}, 0.3, cost_s, steps, 1500)

    payoff = Payoff()
    assert payoff.add(measured(5.0, 8, 0.04)) and not payoff.trains
    for _ in range(4):
        payoff.add(measured(5.0, 0, 0.0))
    reasons = [payoff.add(measured(4.45, 0, 0.0)) for _ in range(WINDOW)]
    (reason,) = filter(None, reasons)
    assert payoff.trains and "fell" in reason and "training costs 240 ms in 6" in reason
    for _ in range(2 * WINDOW - 1):
        assert not payoff.add(measured(4.45, 8, 0.04)) and payoff.trains


def stats(accept, seconds=0.3):
    out = RolloutStats(learned_s=seconds)
    out.learned_passes[ARM], out.learned_emitted[ARM] = 1000, round(1000 * accept)
    return out


def test_a_trainer_at_rest_makes_no_step_and_loads_no_weights():
    parts = build_parts()
    trainer = parts.trainer(final_steps=2)
    fill(trainer, parts)

    def rollout(accept, seconds=0.3):
        """Steps made in the tail, after it, and the change of the version, by one rollout."""
        before, version = trainer.steps, parts.runner.version
        trainer.on_pass(1)
        tail = trainer.steps - before
        reason = trainer.weigh(stats(accept, seconds))
        finish(trainer)
        done = trainer.steps - before - tail, parts.runner.version - version
        return (tail, *done), reason.partition(":")[0]

    assert rollout(5.0)[0][:2] == (1, 2)  # a new drafter trains
    trainer.steps = trainer.payoff.weighed = 1500
    (*steps, version), reason = rollout(5.0)
    assert (steps, reason) == ([1, 0], "training rests") and version
    assert [rollout(5.0) for _ in range(2 * WINDOW)] == [((0, 0, 0), "")] * 2 * WINDOW
    learned = trainer.step.average.values["fc.weight"]
    assert torch.equal(parts.runner.weights["fc"], learned)  # those of the last tail, too
    assert trainer.metrics()["drafter/rests"] == 1.0
    fallen = [rollout(1.5, seconds=30.0) for _ in range(2 * WINDOW)]
    assert [reason for _, reason in fallen if reason] == ["training goes on"]
    assert rollout(1.5)[0][:2] == (1, 2)
    assert trainer.metrics()["drafter/rests"] == 0.0


@pytest.mark.parametrize("part", ["weights.swap", "renew", "_wait"])
def test_the_cost_counts_all_that_the_rollout_or_the_loop_waits_for(part, monkeypatch):
    parts = build_parts()
    trainer = parts.trainer(final_steps=1)
    fill(trainer, parts)
    owner, _, name = part.rpartition(".")
    owner = operator.attrgetter(owner)(trainer) if owner else trainer
    call = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *of: time.sleep(0.02) or call(*of))
    costs = []
    monkeypatch.setattr(trainer.payoff, "add", lambda measured: costs.append(measured.cost_s) or "")
    for _ in range(2):
        trainer.weigh(stats(5.0))
        fill(trainer, parts)
        trainer.on_pass(1)
        finish(trainer)
    assert costs[1] > 0.02


def test_the_cost_leaves_out_captures_and_copies_during_bursts(monkeypatch):
    """A capture is made once. Finished requests are retired while the next burst runs."""
    parts = build_parts()
    trainer = parts.trainer(final_steps=1)
    fill(trainer, parts)
    slept = []

    def slow(*of):
        begin = time.perf_counter()
        time.sleep(0.02)
        slept.append(time.perf_counter() - begin)

    monkeypatch.setattr(trainer.step, "capture", slow)
    begin = time.perf_counter()
    trainer.on_pass(1)
    finish(trainer)
    assert 0 < trainer.payoff.delay_s <= time.perf_counter() - begin - sum(slept) and len(slept) > 1
    monkeypatch.setattr("driver.drafter.trainer.Document.of", slow)
    monkeypatch.setattr(trainer.buffer, "add", slow)
    before = trainer.payoff.delay_s
    assert trainer.micro_step() and trainer.payoff.delay_s == before  # a step that nobody counts
    trainer.on_finish(SimpleNamespace(context_len=3, request=SimpleNamespace(id=0)))
    assert trainer.payoff.delay_s == before


def test_a_trainer_at_rest_records_no_features():
    parts = build_parts()
    trainer = parts.trainer()
    trainer.payoff.trains = False
    trainer.on_finish(None)  # reads nothing of the request
    assert trainer.buffer.num_tokens == 0


@pytest.mark.parametrize("mode", ["off", "coordinated"])
def test_idle_ranks_train_whatever_it_brings(mode):
    trainer = build_parts().trainer(mode=mode)
    assert not any(trainer.weigh(stats(5.0)) for _ in range(20))
    assert trainer.payoff.trains


def test_passes_with_learned_drafts_are_counted_by_arm():
    rollout = make_rollout(random_model("llama-tied-llama3"))
    rollout.spot.swap()
    generate(rollout, requests(), "off", "ngram:4,1,5", "learned:3,1,4", "learned:4,3,12")
    stats = rollout.engine.stats
    assert set(stats.learned_passes) == {"learned:3,1,4", "learned:4,3,12"}
    assert 0 < sum(stats.learned_passes.values()) < stats.spec_request_passes
    assert all(stats.learned_emitted[arm] >= n for arm, n in stats.learned_passes.items())
    assert 0 < stats.learned_s < stats.passes_s
    whole = RolloutStats()
    whole.add(stats)
    whole.add(stats)
    assert whole.learned_passes == {arm: 2 * n for arm, n in stats.learned_passes.items()}
