"""A finite data set is checked to its end before a run starts, and each eval line counts once."""

import json
import warnings
from types import SimpleNamespace

import pytest

from driver.common.errors import SharedWarning, UserError
from driver.config.load import load_config, preset_names
from driver.model import tiny
from driver.model.prompts import PromptEncoder
from driver.run.assemble import check_prompts, longest_request, warn_of_deep_drafts
from driver.run.start import start_run
from driver.tasks import Prompt, make_task
from tests.driver.run.test_run import WORDS


def write_sums(path, count, long=(), terms=60):
    """Lines `n+1=`; those in `long` have many terms."""
    lines = [
        {"question": "1+" * terms + "1=" if n in long else f"{n}+1=", "answer": f"#### {n + 1}"}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def check(path, limit):
    task = make_task("jsonl", path=str(path), shots=0)
    return check_prompts(task, PromptEncoder(tiny.build_tokenizer()), 10, limit)


@pytest.mark.parametrize("at", [0, 7, 150, 199])  # line 8 is held out
def test_a_prompt_that_is_too_long_is_named_wherever_it_is(tmp_path, at):
    path = write_sums(tmp_path / "d.jsonl", 200, long=[at])
    longest = check(path, 400)
    assert longest > 120  # the page pool is made for it
    assert check(path, longest + 10) == longest
    with pytest.raises(UserError, match=rf"d.jsonl:{at + 1}: prompt of {longest} tokens and .*=10"):
        check(path, longest + 9)


def test_all_prompts_that_are_too_long_are_counted(tmp_path):
    path = write_sums(tmp_path / "d.jsonl", 200, long=[3, 90, 110])
    with pytest.raises(UserError, match=r"context of 100 \(one of 3 prompts that do\); shorten or"):
        check(path, 100)


def test_a_prompt_without_tokens_is_named():
    task = make_task("sums")
    task.prompt = lambda split, index: Prompt(str(index), "" if index == 5 else "1+1=", "2")
    with pytest.raises(UserError, match="task sums, train prompt 5: the prompt has no tokens"):
        check_prompts(task, PromptEncoder(tiny.build_tokenizer()), 10, 100)


def test_a_run_with_an_overlong_line_does_not_start(tmp_path):
    """A line after the first ones would have ended it in the middle, and each resume again."""
    path = write_sums(tmp_path / "d.jsonl", 200, long=[110], terms=600)
    words = [*WORDS, f"run.root={tmp_path}", "run.name=run", "task.name=jsonl", "task.shots=0"]
    config = load_config([*words, f"task.path={path}", "warmup.keep=true"])
    with pytest.raises(UserError, match="d.jsonl:111: prompt of"):
        start_run(config, lambda line: None)
    assert not (tmp_path / "run").exists() and not (tmp_path / "warm").exists()


def test_an_evaluation_uses_each_held_out_line_once(tmp_path, monkeypatch):
    path = write_sums(tmp_path / "d.jsonl", 24)
    words = [*WORDS, f"run.root={tmp_path}", "run.name=run", "task.name=jsonl", "task.shots=0"]
    notes = []
    config = load_config([*words, f"task.path={path}", "warmup.steps=0", "run.eval_prompts=64"])
    run = start_run(config, notes.append)
    assert any(
        "the task has 3 held-out prompts, fewer than run.eval_prompts=64" in n for n in notes
    )
    asked = []
    monkeypatch.setattr(
        run.task, "reward", lambda p, *of: asked.append(p.text) or float("15+1" in p.text)
    )
    try:
        assert run.collector.evaluate(64) == pytest.approx(1 / 3)
        assert len(asked) == len(set(asked)) == 3
        run.collector.evaluate(2)
        assert len(asked) == 5
    finally:
        run.close(whole=True)


@pytest.mark.parametrize("name", ["puzzles", "sums", "addition", "multiplication", "calculator"])
@pytest.mark.parametrize("difficulty", [1, 2])
def test_later_prompts_of_a_generated_task_fit_the_tables(name, difficulty):
    """One prompt of the warm start of `preset=h100` has twice the tokens of the first 64."""
    config = load_config([f"task.name={name}", "sampling.max_new_tokens=100"])
    task = make_task(name, difficulty=difficulty)
    encode = PromptEncoder(tiny.build_tokenizer())  # a token for each byte
    context = 1 << 20
    checked = check_prompts(task, encode, config.sampling.max_new_tokens, context)
    spec = SimpleNamespace(max_position=context)
    texts = [task.prompt("train", (1 << 39) + i).text for i in range(4000)]
    longest = max(map(len, encode.batch(texts)))
    assert longest + 100 <= longest_request(config, spec, checked)


def test_a_run_warns_of_drafts_that_are_far_deeper_than_the_unrolled_training(tmp_path):
    arms = "engine.strategies=off ngram:16,1,17 learned:8,4,32 learned:9,1,10"
    words = [*WORDS, f"run.root={tmp_path}", "warmup.steps=0", arms]
    too_few = "drafter.unroll=3: too few for learned:9,1,10, whose deepest drafts"
    with pytest.warns(SharedWarning, match=too_few):
        start_run(load_config([*words, "drafter.unroll=3"]), lambda line: None).close(whole=False)
    for other in ("drafter.unroll=4", "spot.mode=off"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_deep_drafts(load_config([*words, other]))


@pytest.mark.parametrize("preset", preset_names())
def test_presets_draft_no_deeper_than_they_train(preset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_deep_drafts(load_config([f"preset={preset}", "model.path=tiny"]))
