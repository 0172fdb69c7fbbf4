"""What the host does while the device makes passes: rewards, and prompts of the next step."""

import pytest

from driver.config import load_config
from driver.rollout.plan import BucketPlan, GraphCost
from driver.run import Run
from driver.strategy import OFF
from tests.driver.test_bursts import LatePool, Loops
from tests.driver.test_train import WORDS


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts runs of two steps of the tiny model whose every response has a reward of its own."""
    runs = []

    def make(*words):
        root = [f"run.root={tmp_path}", f"run.name=run-{len(runs)}", "run.steps=2"]
        config = load_config([*WORDS, "warmup.steps=0", *root, *words])
        run = Run.start(config, lambda line: None)
        runs.append(run)
        run.drawn = []
        prompt = run.task.prompt

        def draw(split, index):
            run.drawn.append(index)
            return prompt(split, index)

        monkeypatch.setattr(run.task, "prompt", draw)
        monkeypatch.setattr(
            run.task, "reward", lambda p, text: sum(map(ord, text)) + int(p.id.split("/")[-1]) / 64
        )
        return run

    yield make
    for run in runs:
        run.close(whole=True)


def with_device(run):
    """Passes are made by a device that the host has work beside."""
    engine = run.rollout.engine
    buckets, cost = run.rollout.bandit.config.buckets, GraphCost(engine.model.spec)
    rows = engine.model.max_rows
    plan = BucketPlan(engine.config.max_batch, engine.config.max_batch, [OFF], buckets, rows, cost)
    engine.runner.graphs = Loops(engine, plan, True, LatePool)
    return run


def test_work_beside_passes_changes_nothing(start):
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
