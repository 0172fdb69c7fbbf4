"""What the host does while the device makes passes: rewards, and prompts of the next step."""

import gc

import pytest

from driver.common.errors import UserError
from driver.config.load import load_config
from driver.config.strategy import OFF
from driver.rollout.plan import BucketPlan
from driver.run.collector import collections_paused
from driver.run.start import start_run
from tests.driver.rollout.test_bursts import LatePool, Loops
from tests.driver.run.test_run import WORDS


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts runs of two steps of the tiny model whose every response has a reward of its own."""
    runs = []

    def make(*words):
        root = [f"run.root={tmp_path}", f"run.name=run-{len(runs)}", "run.steps=2"]
        config = load_config([*WORDS, "warmup.steps=0", *root, *words])
        run = start_run(config, lambda line: None)
        runs.append(run)
        run.drawn = []
        prompt = run.task.prompt

        def draw(split, index):
            run.drawn.append(index)
            return prompt(split, index)

        monkeypatch.setattr(run.task, "prompt", draw)
        monkeypatch.setattr(
            run.task,
            "reward",
            lambda p, text, finished: sum(map(ord, text)) + int(p.id.split("/")[-1]) / 64,
        )
        return run

    yield make
    for run in runs:
        run.close(whole=True)


def with_device(run):
    """Passes are made by a device that the host has work beside."""
    engine = run.rollout.engine
    buckets, most = run.rollout.bandit.config.buckets, engine.config.max_batch
    plan = BucketPlan(most, most, [OFF], buckets, engine.model.max_rows)
    engine.runner.graphs = Loops(engine, plan, True, LatePool)
    return run


def test_work_during_passes_changes_no_prompt_and_no_reward(start):
    """Every response is scored in its place, every prompt is drawn once and in its turn."""
    words = "engine.strategies=off"
    alone, beside = start(words), with_device(start(words))
    per_step = beside.config.grpo.prompts_per_step
    for step in range(2):
        wanted, got = (run.collector.gather(step) for run in (alone, beside))
        assert got == wanted
        assert len(set(got.rewards)) > len(got.rewards) / 2
        # Those that ended with the last burst are left.
        assert 0 < len(beside.collector._submitted) < len(got.rewards)
        assert not alone.collector._submitted
        assert alone.drawn == list(range((1 + step) * per_step))
        assert beside.drawn == list(range(2 * per_step))
        assert len(beside.collector._ahead) == (1 - step) * per_step


@pytest.mark.filterwarnings("ignore:dynamic sampling")
def test_groups_that_are_replaced_take_the_prompts_drawn_ahead(start, monkeypatch):
    """Dynamic sampling: those of the next step are the next ones, and its own are drawn behind."""
    words = ("engine.strategies=off", "grpo.max_refills=1", "run.steps=3")
    alone, beside = start(*words), with_device(start(*words))
    per_step = beside.config.grpo.prompts_per_step
    each = beside.config.grpo.samples_per_prompt
    for run in (alone, beside):  # every third group has equal rewards
        reward = run.task.reward
        monkeypatch.setattr(
            run.task,
            "reward",
            lambda p, *of, reward=reward: reward(p, *of) * (int(p.id.split("/")[-1]) % 3),
        )
    for step in range(2):
        wanted, got = (run.collector.gather(step) for run in (alone, beside))
        assert got == wanted and got.refills == 1
        mixed = [int(p.id.split("/")[-1]) % 3 > 0 for p in got.prompts]
        assert got.keep == [kept for kept in mixed for _ in range(each)]
        assert len(mixed) == 2 * per_step - sum(mixed[:per_step]) > per_step
        drawn = beside.collector.prompts_drawn
        assert alone.drawn == list(range(drawn))
        assert beside.drawn == list(range(drawn + len(beside.collector._ahead)))
        # The second step is not the last: it has drawn ahead again, from where it ended.
        assert list(beside.collector._ahead) == list(range(drawn, drawn + per_step))


def test_workers_get_each_response_once_it_has_ended(start):
    alone = start("engine.strategies=off")
    beside = with_device(start("engine.strategies=off", "reward.workers=1"))
    jobs = []
    for run in (alone, beside):
        workers, mine = run.collector.workers, []
        workers.submit = lambda *job, mine=mine: mine.append(job)
        workers.collect = lambda count: [0.0] * count
        run.collector.gather(0)
        jobs.append(sorted(mine, key=lambda job: job[0]))
    assert jobs[0] == jobs[1] and len(jobs[0]) == len(beside.collector._submitted)


def test_a_reward_that_fails_beside_passes_names_its_sample(start, monkeypatch):
    run = with_device(start("engine.strategies=off"))
    each = run.config.grpo.samples_per_prompt

    def fails(prompt, text, finished):
        raise ValueError("no such unit")

    with monkeypatch.context() as planted, pytest.raises(UserError, match="ValueError: no such"):
        planted.setattr(run.task, "reward", fails)
        run.collector.gather(0)
    step = run.collector.gather(1)  # nothing is left in flight
    assert len(step.rewards) == each * run.config.grpo.prompts_per_step


def test_python_collects_garbage_beside_passes_only(start, monkeypatch):
    run, ways, generations = with_device(start("engine.strategies=off")), [], []

    def noted(phase, info):
        if phase == "start":
            ways.append(gc.isenabled())
            generations.append(info["generation"])

    on_wait = run.collector.on_wait
    monkeypatch.setattr(run.collector, "on_wait", lambda: ways.append(gc.isenabled()) or on_wait())
    with monkeypatch.context() as during:
        roll_out = run.session.roll_out

        def watched(*args, **rest):
            gc.callbacks.append(noted)
            try:
                return roll_out(*args, **rest)
            finally:
                gc.callbacks.remove(noted)

        during.setattr(run.session, "roll_out", watched)
        run.collector.gather(0)
    assert set(generations) == {1} and not any(ways)
    assert gc.isenabled()


def test_collections_are_as_before_after_an_error_or_a_pause_inside_another():
    with pytest.raises(ValueError, match="inside"), collections_paused():
        raise ValueError("inside")
    assert gc.isenabled()
    with collections_paused():
        with collections_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_each_evaluation_makes_the_same_requests(start, monkeypatch):
    run, made = with_device(start("engine.strategies=off")), []
    roll_out = run.session.roll_out

    def noted(requests, **rest):
        made.append(requests)
        return roll_out(requests, **rest)

    monkeypatch.setattr(run.session, "roll_out", noted)
    first = run.collector.evaluate(4)
    run.collector.gather(0)
    assert run.collector._submitted  # places of this rollout
    assert run.collector.evaluate(4) == first  # the policy is the same
    assert not run.collector._submitted  # or its responses at these places would not be scored
    assert len(made) == 3 and made[0] == made[2]
