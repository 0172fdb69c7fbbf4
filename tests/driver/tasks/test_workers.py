"""Rewards in processes of their own, and without: no failure of one stops a run unnamed."""

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from driver.common.errors import UserError
from driver.config.sections import RewardConfig
from driver.tasks import Prompt
from driver.tasks.sums import SumsTask
from driver.tasks.workers import RewardWorkers


@dataclass
class Moody:
    """A reward function that does as the response says."""

    name: str = "moody"

    def reward(self, prompt, response, finished=True):
        if not finished:
            return -1
        if response == "raise":
            raise ValueError("no such unit")
        if response == "hang":
            time.sleep(600)
        if response == "die":
            os._exit(3)
        if response == "exit":
            raise SystemExit(3)
        if response == "large":
            return 1e308  # a mean of such rewards is infinite
        if response == "huge":
            return 10**400  # an integer that is no float: math.isfinite raises OverflowError
        if response == "long":
            return 10**5000  # its repr raises ValueError
        return len(response) + int(prompt.answer)


class SlowStart(Moody):
    """A task that a worker takes three seconds to load."""

    def __setstate__(self, state):
        time.sleep(3)
        self.__dict__.update(state)


class MoodySums(SumsTask):
    """Sums whose rewards for the second training prompt end as `fate` says."""

    def __init__(self, fate):
        super().__init__()
        self.fate = fate

    def reward(self, prompt, response, finished=True):
        return Moody().reward(prompt, self.fate if prompt.id == "sums/train/1" else response)


def score(texts, workers=2, **config):
    workers = RewardWorkers(Moody(), RewardConfig(workers=workers, **config))
    try:
        for i, text in enumerate(texts):
            workers.submit(i, Prompt(f"moody/train/{i}", "", str(i)), text)
        return workers.collect(len(texts))
    finally:
        workers.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_rewards_come_in_the_order_of_the_responses(workers):
    assert score(["a", "bb", "ccc", "", "eeeee"], workers) == [1, 3, 5, 3, 9]


@pytest.mark.parametrize("count", [0, 1])
def test_a_reward_function_knows_whether_the_response_was_cut(count):
    workers = RewardWorkers(Moody(), RewardConfig(workers=count))
    for index, finished in enumerate((True, False)):
        workers.submit(index, Prompt("p", "", "0"), "aa", finished)
    assert workers.collect(2) == [2, -1]
    workers.close()


def test_a_second_batch_does_not_see_the_first():
    workers = RewardWorkers(Moody(), RewardConfig(workers=1))
    for text, expected in (("aa", 2), ("b", 1)):
        workers.submit(0, Prompt("p", "", "0"), text)
        assert workers.collect(1) == [expected]
    workers.close()


@pytest.mark.parametrize(
    ("workers", "text", "reason"),
    [
        (0, "raise", "ValueError: no such unit"),
        (2, "raise", "ValueError: no such unit"),
        (2, "die", "its worker died with exit code 3"),
        (2, "hang", "no answer in reward.timeout_s=4"),
        (0, "exit", "SystemExit: 3"),
        (0, "large", "expected a number from -1e30 to .*, got 1e.308"),
        (0, "huge", r"expected a number from -1e30 to .*, got 1000\S+"),
        (2, "huge", r"expected a number from -1e30 to .*, got 1000\S+"),
        (0, "long", "expected a number from -1e30 to .*, got a value of type int"),
    ],
)
def test_a_failure_names_its_sample(workers, text, reason):
    texts, timeout_s = ["a", "bb", text, "ccc"], 4 if text == "hang" else 120
    with pytest.raises(UserError, match=f"response 2 to prompt moody/train/2: {reason}"):
        score(texts, workers, timeout_s=timeout_s)
    with pytest.warns(UserWarning, match=f"moody/train/2: {reason}; counted as 0"):
        assert score(texts, workers, timeout_s=timeout_s, on_error="zero") == [1, 3, 0.0, 6]


@pytest.mark.parametrize(
    ("name", "answer", "what"), [(lambda: 1, "0", "the task"), ("moody", lambda: 1, "prompt p")]
)
def test_what_no_process_can_receive_is_one_line(name, answer, what):
    workers = RewardWorkers(Moody(name), RewardConfig(workers=1))
    with pytest.raises(UserError, match=f"reward.workers: {what} cannot be sent to a process"):
        workers.submit(0, Prompt("p", "", answer), "a")
    workers.close()


def test_the_time_out_begins_when_the_worker_has_started():
    """A start that takes longer than `timeout_s` is not a failure of the sample."""
    workers = RewardWorkers(SlowStart(), RewardConfig(workers=1, timeout_s=2.0))
    workers.submit(0, Prompt("p", "", "0"), "aa")
    assert workers.collect(1) == [2]
    workers.close()


def test_a_worker_that_never_starts_is_given_up(monkeypatch):
    monkeypatch.setattr("driver.tasks.workers.START_S", 0.5)
    workers = RewardWorkers(SlowStart(), RewardConfig(workers=1, timeout_s=0.5))
    workers.submit(0, Prompt("p", "", "0"), "aa")
    with pytest.raises(UserError, match="prompt p: no answer in reward.timeout_s=0.5"):
        workers.collect(1)


@pytest.mark.parametrize("count", [0, 1])
def test_an_evaluation_is_scored_the_same_way(count):
    from driver.run.collector import Collector  # here: workers import this file, and start quickly

    collector = Collector.__new__(Collector)
    collector.task, collector.text = Moody(), lambda response: response.text
    collector._submitted = set()
    collector.workers = RewardWorkers(Moody(), RewardConfig(workers=count, on_error="zero"))
    prompts = [Prompt(f"moody/eval/{i}", "", str(i % 2)) for i in range(3) for _ in range(2)]
    texts = ["a", "bb", "raise", "c", "d", "ee"]
    finishes = ["stop"] * 4 + ["length", "stop"]
    responses = [SimpleNamespace(text=t, finish=f) for t, f in zip(texts, finishes, strict=True)]
    with pytest.warns(UserWarning, match="response 2 to prompt moody/eval/1: .*counted as 0"):
        assert collector.rewards(prompts, responses) == [1, 2, 0, 2, -1, 2]
    collector.workers.close()


@pytest.mark.parametrize(
    ("fate", "reason"),
    [("die", "its worker died with exit code 3"), ("hang", "no answer in reward.timeout_s=5")],
)
def test_a_run_ends_with_the_sample_s_name_or_counts_it(tmp_path, monkeypatch, fate, reason):
    from driver.records.folder import read_jsonl
    from tests.driver.run.test_run import run

    monkeypatch.setattr("driver.run.start.make_task", lambda **_: MoodySums(fate))
    words = ["run.steps=1", "run.eval_prompts=0", "warmup.steps=0", "grpo.samples_per_prompt=2"]
    words += ["reward.workers=2", "reward.timeout_s=5"]
    failed = f"response [23] to prompt sums/train/1: {reason}"
    with pytest.raises(UserError, match=failed):
        run(tmp_path, "stop", *words)
    assert not (tmp_path / "stop").exists() and not multiprocessing.active_children()
    with pytest.warns(UserWarning, match=f"{failed}; counted as 0"):
        counted = run(tmp_path, "zero", *words, "reward.on_error=zero")
    samples = read_jsonl(counted.folder.path / "samples.jsonl")
    rewards = {sample["prompt_id"]: sample["reward"] for sample in samples}
    assert [rewards[f"sums/train/{i}"] > 0 for i in range(3)] == [True, False, True]
    assert counted.step == 1 and not multiprocessing.active_children()


def test_ctrl_c_is_not_the_workers_to_answer():
    """It reaches the whole process group; the run ends its workers itself."""
    workers = RewardWorkers(Moody(), RewardConfig(workers=1))
    workers.submit(0, Prompt("p", "", "0"), "aa")
    os.kill(workers._workers[0].process.pid, signal.SIGINT)  # it has hardly started
    assert workers.collect(1) == [2]
    os.kill(workers._workers[0].process.pid, signal.SIGINT)
    workers.submit(0, Prompt("p", "", "0"), "b")
    assert workers.collect(1) == [1]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    workers.close()


def test_a_stopped_pool_leaves_no_process():
    workers = RewardWorkers(Moody(), RewardConfig(workers=2))
    workers.submit(0, Prompt("p", "", "0"), "hang")
    processes = [worker.process for worker in workers._workers]
    workers.close()
    assert [process.is_alive() for process in processes] == [False]
