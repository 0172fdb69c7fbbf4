"""Runs of a task with a tool: equal tokens at any speed, failures, and a training."""

import random
import threading
import time

import numpy as np
import pytest

from driver.common.stop import Stopped
from driver.config.load import load_config
from driver.records.folder import read_jsonl
from driver.records.progress import Progress
from driver.report.data import RunData
from driver.report.page import MAX_SAMPLES, render
from driver.run.start import start_run
from driver.tasks.calculator import CalculatorTask
from driver.train import train
from tests.driver.run.test_run import WORDS

ARMS = "engine.strategies=off ngram:4,1,5 learned:4,2,8"


@pytest.fixture
def start(tmp_path):
    """Starts runs of a model that was not warmed up: it calls the calculator at random."""
    runs = []

    def make(*words):
        root = [f"run.root={tmp_path}", f"run.name=run-{len(runs)}", "task.name=calculator"]
        lengths = ["warmup.steps=0", "sampling.max_new_tokens=96", "grpo.prompts_per_step=4"]
        run = start_run(load_config([*WORDS, *lengths, *root, *words]), lambda line: None)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close(whole=True)


def talkative(monkeypatch, answer=lambda text: f"{len(text)}<1"):
    """Each turn that ends with the stop text gets an answer, so that responses have many turns."""

    def respond(self, prompt, turn, text):
        return answer(text) if text.endswith(">") else None

    monkeypatch.setattr(CalculatorTask, "respond", respond)


def test_tokens_depend_on_neither_strategy_nor_latency_of_the_tool(start, monkeypatch):
    talkative(monkeypatch)
    few = "tool.turns=5"
    wanted = start("engine.strategies=off", few).collector.gather(0)
    respond = CalculatorTask.respond

    def late(*arguments):
        time.sleep(0.02 * random.random())
        return respond(*arguments)

    monkeypatch.setattr(CalculatorTask, "respond", late)
    run = start(ARMS, "engine.max_batch=5", "bandit.epsilon=1", few)
    got = run.collector.gather(0)
    assert [(r.token_ids, r.tools, r.finish) for r in got.responses] == [
        (r.token_ids, r.tools, r.finish) for r in wanted.responses
    ]
    for a, b in zip(got.responses, wanted.responses, strict=True):
        assert np.array_equal(np.float32(a.logprobs), np.float32(b.logprobs))
    assert got.rewards == wanted.rewards
    assert run.collector.stats.spec_passes > 0
    turns = [r.turns for r in got.responses]
    assert max(turns) == 5 and np.mean(turns) > 2
    metrics = run.collector.tool_stats.metrics(got.responses)
    assert metrics["tool/calls"] == sum(turns) - len(turns) and metrics["tool/failures"] == 0


def test_samples_show_what_the_tool_wrote(start, monkeypatch):
    talkative(monkeypatch)
    run = start("engine.strategies=off")
    step = run.collector.gather(0)
    samples = run._samples(step)
    assert any(sample.parts for sample in samples)
    for sample, response in zip(samples, step.responses[::4], strict=True):
        assert len(sample.parts) == (2 * response.turns - 1 if response.tools else 0)
        assert "".join(sample.parts) in ("", sample.response)
    run.folder.log_samples(1, samples)
    records = read_jsonl(run.folder.path / "samples.jsonl")
    assert [tuple(record.get("parts", ())) for record in records] == [s.parts for s in samples]
    text = (run.folder.path / "samples.txt").read_text()
    answers = [part for sample in samples for part in sample.parts[1::2]]
    assert text.count("--- tool\n") == len(answers)
    assert all(f"--- tool\n{answer}\n--- response\n" in text for answer in answers)
    some, plain = records[:MAX_SAMPLES], [{"step": 1, "response": "1"}]
    tools = sum(len(record.get("parts", ())) // 2 for record in some)
    pages = [render([RunData("a", run.folder.path, samples=shown)]) for shown in (some, plain)]
    assert [page.count("<mark>") for page in pages] == [tools, 0] and tools > 0


def test_limits_of_turns_and_of_the_response(start, monkeypatch):
    talkative(monkeypatch, lambda text: "7" * 30)
    run = start("tool.turns=3", "tool.turn_tokens=20", "engine.strategies=off")
    responses = run.collector.gather(0).responses
    assert max(r.turns for r in responses) == 3
    assert {r.finish for r in responses} == {"stop", "length"}
    for r in responses:
        assert len(r.token_ids) <= 96 and all(b - a <= 20 for a, b in r.tools)
        turn = len(r.token_ids) - (r.tools[-1][1] if r.tools else 0)
        assert (turn == 20 or len(r.token_ids) == 96) if r.finish == "length" else turn <= 20
    full = start("sampling.max_new_tokens=40", "engine.strategies=off").collector.gather(0)
    ended_by_answer = [r for r in full.responses if r.tools and r.tools[-1][1] == 40]
    assert ended_by_answer and {r.finish for r in ended_by_answer} == {"length"}
    assert all(len(r.token_ids) <= 40 for r in full.responses)


@pytest.mark.filterwarnings("ignore:.*equal rewards", "ignore:.*more responses")
@pytest.mark.parametrize("on_error", ["end", "mask"])
def test_a_failed_sample_is_reported_and_left_out_as_configured(start, monkeypatch, on_error):
    def fail(text):
        if len(text) % 2:
            raise OSError("no connection")
        return "8"

    talkative(monkeypatch, fail)
    run = start(f"tool.on_error={on_error}", "engine.strategies=off")
    with pytest.warns(UserWarning, match=r"to prompt calculator/train/\d+, turn \d+: OSError: no"):
        step = run.collector.gather(0)
    failures = run.collector.tool_stats.failures
    failed = [r.request.id in failures for r in step.responses]
    assert 0 < sum(failed) < len(failed) and len(failures) == sum(failed)
    assert {r.finish for r, f in zip(step.responses, failed, strict=True) if f} == {"stop"}
    kept = [True] * len(failed) if on_error == "end" else [not f for f in failed]
    assert step.keep == kept and len(step.rewards) == len(failed)
    metrics = run.update_policy(step)
    assert np.isfinite(metrics["actor/grad_norm"])
    assert run.collector.tool_stats.metrics(step.responses)["tool/failures"] == sum(failed)


def test_a_signal_ends_a_rollout_whose_tools_hang(start, monkeypatch):
    """The tool would take an hour; nothing waits for it after the signal."""
    free = threading.Event()

    def hang(text):
        run.collector.stop.name = "SIGTERM"
        free.wait(3600)

    talkative(monkeypatch, hang)
    run = start("engine.strategies=off", "reward.timeout_s=3600")
    try:
        with pytest.raises(Stopped) as stopped:
            run.collector.gather(0)
        (*waiting,) = (t for t in threading.enumerate() if "(_call)" in t.name)
        assert stopped.value.name == "SIGTERM" and waiting
        run.session.close()
        for thread in waiting:
            thread.join(60)
        assert not any(thread.is_alive() for thread in waiting)
    finally:
        free.set()
        run.collector.stop.name = ""


def test_an_evaluation_has_turns(start, monkeypatch):
    asked = []
    talkative(monkeypatch, lambda text: asked.append(text) or "1")
    run = start("engine.strategies=off")
    run.collector.evaluate(8)
    assert len(asked) > 8 and run.collector.tools.stats.calls == len(asked)


@pytest.mark.slow  # a minute: the warm-up teaches calls
def test_training_with_the_calculator_raises_the_reward(tmp_path):
    words = ["preset=tiny", "task.name=calculator", f"run.root={tmp_path}", "run.steps=10"]
    words += ["warmup.steps=130", "sampling.max_new_tokens=96", "tool.turns=6", ARMS]
    words += ["run.eval_every=10", "run.checkpoint_every=0"]
    config = load_config(words)
    run = train(config, Progress(config.run.steps))
    assert run.evaluations[10] > run.evaluations[0] + 0.05
    records = read_jsonl(run.folder.path / "metrics.jsonl")
    assert all(record["tool/turns"] > 1.5 for record in records if record["step"])
    assert records[-1]["tool/failures"] == 0
