"""Tasks of the user, by module or file."""

import sys
from pathlib import Path

import pytest

from driver.common.errors import UserError
from driver.config.load import load_config
from driver.records.progress import Progress
from driver.tasks import Prompt, make_task
from driver.train import train

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_task.py"
PARTS = """
from functools import partial, wraps
from driver.tasks import Prompt

def score(prompt, response, answer, finished):
    return float(finished and answer in response)

class Words:
    stop = ("\\n",)
    reward = staticmethod(score)
    def prompt(self, split, index):
        return f"{split} {index}"

class Odd:
    reward = staticmethod(score)
    def prompt(self, split, index):
        return {}[index]

class Same(Odd):
    def prompt(self, split, index):
        return Prompt("same", [None, "a"][index], "b")

def logged(function):
    @wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call

class Scorer:
    def __call__(self, prompt, response, answer, finished=True, weight=1):
        return score(prompt, response, answer, finished)

class Wrapped(Words):
    reward = staticmethod(logged(score))

class Partial(Words):
    reward = staticmethod(partial(score, finished=True))

class Called(Words):
    reward = Scorer()

class Number(Odd):
    stop = "end"
    def prompt(self, split, index):
        return "a", "b", "c"
    def demonstration(self, prompt, answer):
        return 5

class Token(Odd):
    stop = (5,)

class Half:
    def prompt(self, split, index):
        return ""

class Broken:
    def __init__(self):
        raise ValueError("no data")
"""


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Workers that a later test starts must not find the `json.py` of this file."""
    monkeypatch.setattr(sys, "path", sys.path.copy())


def test_a_task_has_the_name_of_its_module(parts):
    assert make_task(f"{parts}:Words").name == parts.stem
    assert make_task("profiling.benches.big:Scored").name == "big"


def test_respond_is_optional_and_may_take_the_answer(parts):
    task = make_task(f"{EXAMPLE.with_name('tool_task.py')}:Guess")
    prompt = task.prompt("train", 0)
    assert task.has_turns and not make_task(f"{parts}:Words").has_turns
    turns = task.demonstration(prompt)
    answers = [task.respond(prompt, turn, text) for turn, text in enumerate(turns)]
    assert answers[-1] is None and set(answers[:-1]) <= {"<", ">"}
    whole = "".join(turn + (answer or "") for turn, answer in zip(turns, answers, strict=True))
    assert task.reward(prompt, whole.removesuffix("?")) == 1.0
    assert task.reward(prompt, "100") == 0.0 and task.respond(prompt, 0, "x?") is None


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "parts_of_a_user", raising=False)  # of another test
    path = tmp_path / "parts_of_a_user.py"
    path.write_text(PARTS)
    return path


def test_an_error_of_its_prompt_is_one_line(parts):
    task = make_task(f"{parts}:Odd")
    with pytest.raises(
        UserError, match=r"prompt\('eval', 3\): KeyError: 3 .parts_of_a_user.py:\d+"
    ):
        task.prompt("eval", 3)


def test_wrong_types_are_refused(parts):
    task = make_task(f"{parts}:Number")
    assert task.stop == ("end",)
    with pytest.raises(UserError, match=r"prompt\('train', 1\) must return a text, .* got \('a', "):
        task.prompt("train", 1)
    with pytest.raises(TypeError, match="expected a text or the texts of turns, got 5"):
        task.demonstration(Prompt("0", "a", "b"))
    with pytest.raises(UserError, match="stop must be texts, got 5"):
        make_task(f"{parts}:Token")


def test_a_prompt_of_the_user_gets_the_id_of_its_index(parts):
    task = make_task(f"{parts}:Same")
    assert task.prompt("train", 1) == Prompt("parts_of_a_user/train/1", "a", "b")
    with pytest.raises(
        UserError, match=r"prompt\('train', 0\) must return a text, .* got \(None, "
    ):
        task.prompt("train", 0)


@pytest.mark.parametrize(("name", "cut"), [("Wrapped", 0.0), ("Partial", 1.0), ("Called", 0.0)])
def test_any_callable_may_be_the_reward(parts, name, cut):
    task = make_task(f"{parts}:{name}")
    prompt = task.prompt("train", 0)
    assert task.reward(prompt, "x") == 1.0 and task.reward(prompt, "x", finished=False) == cut


def test_everything_but_prompt_and_reward_is_optional(parts):
    task = make_task(f"{parts}:Words")
    prompt = task.prompt("eval", 3)
    assert prompt.text == "eval 3" and prompt.answer == "" and prompt.id.endswith("/eval/3")
    assert task.reward(prompt, "x") == 1.0 and task.reward(prompt, "x", finished=False) == 0.0
    assert task.stop == ("\n",) and task.demonstration(prompt) is None and not task.is_message
    assert make_task("parts_of_a_user:Words").prompt("eval", 3) == prompt


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("{parts}:Half", "no method reward; needs prompt and reward"),
        ("{parts}:Broken", "ValueError: no data; expected module:Class or path/to/file.py:Class"),
        ("{parts}:Other", "AttributeError"),
        ("no_such_module:Task", "ModuleNotFoundError"),
        ("/no/such.py:Task", "/no/such.py: no such file"),
        ("{other}:Task", "json is another module; rename the file"),
    ],
)
def test_mistakes_are_one_line(parts, tmp_path, name, line):
    (tmp_path / "json.py").touch()
    name = name.format(parts=parts, other=tmp_path / "json.py")
    with pytest.raises(UserError, match=f"task.name={name}: {line}"):
        make_task(name)


@pytest.mark.parametrize(
    ("name", "workers"),
    [("own_task.py:Reverse", 0), ("own_task.py:Reverse", 1), ("tool_task.py:Guess", 1)],
)
def test_the_examples_train(tmp_path, name, workers):
    words = [f"task.name={EXAMPLE.with_name(name)}", f"run.root={tmp_path}", "run.steps=1"]
    words += ["warmup.steps=4", "run.eval_prompts=2", "grpo.prompts_per_step=2"]
    words += ["sampling.max_new_tokens=8", f"reward.workers={workers}"]
    config = load_config(words)
    run = train(config, Progress(config.run.steps))
    assert run.step == 1 and "critic/rewards/mean" in run.last_metrics
