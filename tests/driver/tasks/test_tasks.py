"""Tasks: pure prompts, disjoint splits, rewards on odd texts, broken files."""

import itertools
import json
import re
import sys
import types
from pathlib import Path

import pytest

from driver.common.errors import SharedWarning, UserError
from driver.tasks import Prompt, make_task
from driver.tasks.answers import final_answer
from driver.tasks.calculator import MOST_STEPS, calculate
from driver.tasks.calculator import SLIP_RATE as CALL_SLIP_RATE
from driver.tasks.fewshot import FewShotTask
from driver.tasks.jsonl import read_jsonl
from driver.tasks.sums import SLIP_RATE

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
GENERATED = [
    ("sums", {}),
    ("sums", {"difficulty": 3}),
    ("addition", {"difficulty": 2}),
    ("addition", {"shots": 0}),
    ("multiplication", {}),
    ("calculator", {}),
    ("calculator", {"difficulty": 3}),
]
SLIPPING = "sums", "calculator"  # their demonstrations contain errors on purpose


def line(question: str = "1+1?", answer: str = "Two.\n#### 2") -> str:
    return json.dumps({"question": question, "answer": answer})


@pytest.fixture
def word_problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(line(f"Item {n:02d}?", f"Count.\n#### {n + 1}") for n in range(32)))
    return path


@pytest.fixture
def fake_gym(monkeypatch):
    """Stands in for the optional package: item `n` asks for n squared, and scores like it."""

    class Squares:
        def __getitem__(self, n):
            return {"question": f"{n}*{n}?", "answer": str(n * n), "metadata": {"n": n}}

        def score_answer(self, answer, entry):
            return 1.0 if answer == str(entry["metadata"]["n"] ** 2) else 0.01

    def create_dataset(name, seed, size):
        if name != "squares":
            raise ValueError(f"Dataset '{name}' not registered")
        return Squares()

    module = types.SimpleNamespace(create_dataset=create_dataset)
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


def question(task, prompt: Prompt) -> str:
    """The problem of a prompt, without the shots before it."""
    return prompt.text.rpartition("\n")[2]


@pytest.mark.parametrize(("name", "options"), GENERATED)
def test_prompt_is_a_pure_function_of_split_and_index(name, options):
    task, again = make_task(name, **options), make_task(name, **options)
    forward = [task.prompt("train", i) for i in range(50)]
    assert [again.prompt("train", i) for i in reversed(range(50))] == forward[::-1]
    assert len({prompt.id for prompt in forward}) == 50
    assert task.prompt("train", 1 << 60).text  # any index


@pytest.mark.parametrize(("name", "options"), GENERATED)
def test_no_eval_problem_is_ever_trained_on(name, options):
    task = make_task(name, **options)
    held = {question(task, task.prompt("eval", i)) for i in range(300)}
    shown = "\n".join(task.prompt("train", i).text for i in range(300))
    assert len(held) > 5
    assert not any(problem in shown.replace("=", "=\n").split("\n") for problem in held)


@pytest.mark.parametrize(
    ("name", "options"), [task for task in GENERATED if task[0] not in SLIPPING]
)
def test_demonstration_earns_the_reward(name, options):
    task = make_task(name, **options)
    for index in range(200):
        prompt = task.prompt("train", index)
        assert task.reward(prompt, task.demonstration(prompt)) == 1.0


def test_sums_demonstrations_count_on_and_slip_at_their_rate():
    task, slips, steps = make_task("sums"), 0, 0
    for index in range(2000):
        prompt = task.prompt("train", index)
        worked = task.demonstration(prompt)
        assert worked == task.demonstration(prompt)
        sides = [eval(side) for side in (prompt.text + worked).split("=")]
        errors = [after - before for before, after in itertools.pairwise(sides)]
        assert set(errors) <= {-1, 0, 1}
        assert len(errors) == int(prompt.text.removesuffix("=").partition("+")[2])
        assert task.reward(prompt, worked) == (sum(errors) == 0)
        slips, steps = slips + sum(error != 0 for error in errors), steps + len(errors)
    assert slips / steps == pytest.approx(SLIP_RATE, abs=0.02)


def test_calculator_demonstrations_call_it_for_each_operation_and_slip_at_their_rate():
    task, right, expected = make_task("calculator"), 0, 0.0
    for index in range(2000):
        prompt = task.prompt("train", index)
        *turns, last = task.demonstration(prompt)
        assert len(turns) == len(re.findall("[-+*]", prompt.text)) <= MOST_STEPS
        answers = [task.respond(prompt, turn, text) for turn, text in enumerate(turns)]
        assert None not in answers and "?" not in answers and last == f"={answers[-1]}"
        assert task.respond(prompt, len(turns), last) is None
        assert int(prompt.answer) == eval(prompt.text.removesuffix("="))
        whole = "".join(part for pair in zip(turns, answers, strict=True) for part in pair) + last
        right += task.reward(prompt, whole)
        expected += (1 - CALL_SLIP_RATE) ** len(turns)
        assert task.reward(prompt, whole, finished=False) == 0 and task.states_answer(whole)
    assert right / expected == pytest.approx(1, abs=0.06)  # two errors may cancel out


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7+5", "89"),
        (" (3+4) *-5 ", "-35"),
        ("1/3", "0.333333"),
        ("10/4*2", "5"),
        ("7%4", "?"),
        ("2**-2", "?"),
        ("1.5+0.1", "1.6"),
        ("1e9", "?"),
        ("1/0", "?"),
        ("9**9**9", "?"),
        ("9" * 150, "9" * 150),
        ("-" * 199 + "1", "-1"),
        ("(" * 99 + "1" + ")" * 99, "1"),
        ("1+" * 99 + "1", "100"),
        ("1" * 201, "?"),
        ("1(2)", "?"),
        ("1,2", "?"),
        ("1 2", "?"),
        ("()", "?"),
        ("", "?"),
        ("x", "?"),
        ("__import__('os')", "?"),
        ("٣+1", "?"),
        ("True+1", "?"),
        ("1 if 1 else 2", "?"),
        ("1//2", "?"),
    ],
)
def test_the_calculator_computes_arithmetic_and_nothing_else(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("<12*7>", "84"),
        ("<1+1>2<3+3>", "6"),  # the call that the turn ends with
        ("<>", "?"),
        ("<a>", "?"),
        ("12>", None),
        ("<12*7>=84", None),
        ("=84", None),
        ("", None),
    ],
)
def test_the_calculator_answers_calls_only(turn, answer):
    assert make_task("calculator").respond(Prompt("0", "", ""), 0, turn) == answer


def test_sums_lengths_have_a_heavy_tail():
    task = make_task("sums")
    prompts = [task.prompt("train", index) for index in range(4000)]
    lengths = sorted(len(task.demonstration(prompt)) + 1 for prompt in prompts)
    median, p99 = lengths[2000], lengths[3960]
    assert p99 >= 8 * median
    assert lengths[-1] <= 160  # fits in the limit of the tiny preset


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("579+2=580+1=581", 1),
        ("581", 1),
        ("1+1=581", 1),  # the steps are not judged
        ("579+2=580+1=580", 0),
        ("579+2=580+1=581 ", 0),
        ("579+2=580+1=581=", 0),
        ("579+2=580+1=0581", 0),
        ("579+2=580+1=-581", 0),
        ("579+2=580+1", 0),
        ("581=582", 0),
        ("", 0),
        ("=", 0),
        ("<b>581</b>", 0),
        ("\u0665\u0668\u0661", 0),  # digits of other scripts
        ("\uff15\uff18\uff11", 0),
    ],
)
def test_sums_reward(response, reward):
    assert make_task("sums").reward(Prompt("0", "578+3=", "581"), response) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("7", 1),
        (" 7\n1+1=2", 1),
        ("\n7", 1),
        ("007", 1),
        ("7 apples", 1),
        ("<b>7</b>", 1),  # the first integer of the line
        ("77", 0),
        ("-7", 0),
        ("6 or 7", 0),
        ("the answer is\n7", 0),
        ("", 0),
        ("<html></html>", 0),
        ("\u0667", 0),
        ("\uff17", 0),
        ("9" * 100_000, 0),
    ],
)
def test_few_shot_reward(response, reward):
    task = FewShotTask("addition")
    assert task.reward(Prompt("0", "3+4=", "7"), response) == reward


def test_few_shot_reward_of_zero():
    task = FewShotTask("multiplication")
    prompt = Prompt("0", "0*4=", "0")
    assert task.reward(prompt, "0") == task.reward(prompt, "-0") == 1
    assert task.reward(prompt, "40") == 0


@pytest.mark.parametrize(("difficulty", "low", "high"), [(1, 10, 99), (2, 100, 999)])
def test_few_shot_form(difficulty, low, high):
    task = FewShotTask("multiplication", difficulty, shots=5)
    for index in range(100):
        *shots, last = task.prompt("eval", index).text.split("\n")
        assert len(shots) == 5
        assert last not in {shot[: shot.index("=") + 1] for shot in shots}
        a, b = last.removesuffix("=").split("*")
        assert low <= int(a) <= high and low <= int(b) <= high
        for shot in shots:
            a, _, rest = shot.partition("*")
            b, _, c = rest.partition("=")
            assert int(a) * int(b) == int(c)


def test_jsonl_splits(word_problems):
    task = make_task("jsonl", path=str(word_problems), shots=2)
    train = [task.prompt("train", i) for i in range(60)]
    held = [task.prompt("eval", i) for i in range(60)]
    last = {p.text.rpartition("Question: ")[2] for p in train}
    held_last = {p.text.rpartition("Question: ")[2] for p in held}
    assert (len(last), len(held_last)) == (26, 4)
    assert not last & held_last
    assert not any(question in prompt.text for question in held_last for prompt in train)
    assert len({p.id for p in train}) == 60  # a second pass over the file has ids of its own
    assert task.prompt("train", 0).text.count("Answer:") == 3
    assert task.reward(train[0], task.demonstration(train[0])) == 1


def test_jsonl_folder_has_its_own_test_file(tmp_path):
    lines = "\n".join(line(f"train {n}") for n in range(3))
    (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "test.jsonl").write_text(line("held out"))
    task = make_task("jsonl", path=str(tmp_path), shots=0)
    assert any("train 2" in task.prompt("train", i).text for i in range(3))
    assert "held out" in task.prompt("eval", 7).text
    assert task.place("eval", 7) == f"{tmp_path / 'test.jsonl'}:1"


def test_jsonl_lines_come_in_another_order_in_each_epoch(tmp_path):
    """The same order in every run, each line once an epoch, and not the order of the file."""
    path = tmp_path / "d.jsonl"
    path.write_text("\n\n" + "\n".join(line(f"q{i}", f"#### {i}") for i in range(64)))
    task = make_task("jsonl", path=str(path), shots=0)
    size = task.size("train")
    assert (size, task.size("eval")) == (56, 8)
    epochs = []
    for epoch in range(3):
        indices = range(epoch * size, (epoch + 1) * size)
        places = [task.place("train", i) for i in indices]
        epochs.append([int(place.rpartition(":")[2]) for place in places])
        texts = [task.prompt("train", i).text for i in indices]
        numbers = [int(text.split()[1][1:]) for text in texts]
        assert epochs[-1] == [n + 3 for n in numbers]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(sorted(epochs[0]))}
    assert all(epoch != sorted(epoch) for epoch in epochs)
    again = make_task("jsonl", path=str(path), shots=0)
    assert [again.prompt("train", i) for i in range(3 * size)] == [
        task.prompt("train", i) for i in range(3 * size)
    ]
    assert len({task.prompt("eval", i).text for i in range(8)}) == 8


@pytest.mark.parametrize(
    ("name", "answer", "cut", "whole"),
    [
        ("jsonl", "#### 1", ["so\n#### 1", "#### 1.", "#### 1,", "#### $1 "], "#### 1\nmore"),
        ("addition", "7", [" 7", "7.", "7 "], " 7\n3+"),
        ("addition", "7", ["is 7"], "7 apples and m"),
        ("sums", "58", ["57+1=58"], None),
        ("puzzles", "58", ["=> 58"], None),
        ("puzzles", "14 from 2 3 9", ["=> 3+2=5, 9+5=14"], None),
        ("reasoning_gym", "9", ["9"], "9\nm"),
    ],
)
def test_an_answer_that_the_length_limit_may_have_cut_does_not_count(
    fake_gym, word_problems, name, answer, cut, whole
):
    options = {"jsonl": {"path": str(word_problems)}, "reasoning_gym": {"path": "squares"}}
    task = make_task(name, **options.get(name, {}))
    prompt = Prompt("0", "", answer)
    if name == "reasoning_gym":
        prompt = next(p for i in range(99) if (p := task.prompt("train", i)).answer)
        cut, whole = [prompt.answer], f"{prompt.answer}\nm"
    for text in cut:
        assert task.reward(prompt, text) == 1.0, text
        assert task.reward(prompt, text, finished=False) < 0.5, text
    if whole is not None:
        assert task.reward(prompt, whole, finished=False) == 1.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("9 * 2 = 18\n#### 18", 1),
        ("#### 18.0", 1),
        ("#### $18 a day", 1),
        ("####18\n\nQuestion: more? #### 19", 1),
        ("18", 0),
        ("#### -18", 0),
        ("#### 1,8", 0),
        ("#### 180", 0),
        ("####\n19", 0),
        ("#### \u0661\u0668", 0),
        ("#### eighteen", 0),
        ("<p>#### </p>18", 0),
        ("", 0),
    ],
)
def test_jsonl_reward(word_problems, response, reward):
    task = make_task("jsonl", path=str(word_problems))
    assert task.reward(Prompt("0", "", "#### 18"), response) == reward


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"question": "a", ', "not JSON"),
        ('["question", "answer"]', "expected an object"),
        ('{"question": "a"}', "no text under 'answer'"),
        ('{"question": 3, "answer": "#### 3"}', "no text under 'question', got 3"),
        (line(answer="just 3"), "'answer' states no final answer; write it after ####"),
        (line(answer="####  "), "'answer' states no final answer; write it after ####"),
        ("[" * 100_000, "not JSON"),
        ('{"question": "\\ud800", "answer": "#### 2"}', "a lone surrogate"),
    ],
)
def test_broken_line_is_named(tmp_path, bad, message):
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join([line()] * 9 + ["", bad, line()]))
    with pytest.raises(UserError, match=rf"broken\.jsonl:11: {message}"):
        make_task("jsonl", path=str(path))


def test_unusable_files(tmp_path):
    with pytest.raises(UserError, match="task.path: empty"):
        make_task("jsonl")
    with pytest.raises(UserError, match="none.jsonl: cannot be read .No such file"):
        make_task("jsonl", path=str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="train.jsonl: cannot be read"):
        make_task("jsonl", path=str(tmp_path))
    short = tmp_path / "short.jsonl"
    short.write_text(line())
    with pytest.raises(UserError, match="1 lines; expected at least 8"):
        make_task("jsonl", path=str(short))
    short.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        make_task("jsonl", path=str(short))
    short.write_text("\n".join([line()] * 8))
    with pytest.raises(UserError, match="7 training lines; expected more than task.shots"):
        make_task("jsonl", path=str(short), shots=7)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K folder beside the repository")
def test_gsm8k():
    assert len(read_jsonl(GSM8K / "test.jsonl")) == 1319
    task = make_task("jsonl", path=str(GSM8K))
    for index in range(1319):
        prompt = task.prompt("eval", index)
        assert task.reward(prompt, task.demonstration(prompt)) == 1
    assert final_answer(read_jsonl(GSM8K / "test.jsonl")[0].answer) == "18"


def test_reasoning_gym(fake_gym):
    task = make_task("reasoning_gym", path="squares")
    train = [task.prompt("train", i) for i in range(40)]
    held = [task.prompt("eval", i) for i in range(40)]
    assert not {p.text for p in train} & {p.text for p in held}
    assert make_task("reasoning_gym", path="squares").prompt("eval", 3) == held[3]
    for prompt in (*train, *held):
        assert task.reward(prompt, f" {prompt.answer}\nmore") == 1.0
        assert task.reward(prompt, "x") == 0.01
    with pytest.raises(UserError, match="task.path=cubes: .*not registered"):
        make_task("reasoning_gym", path="cubes")


class Gym:
    """A data set whose answers are given; its scorer raises on anything but a number."""

    def __init__(self, answers):
        self.answers = answers

    def __getitem__(self, n):
        return {"question": f"{n}?", "answer": self.answers[n % len(self.answers)]}

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"]) if answer else int(answer)


@pytest.mark.parametrize(
    ("answers", "stop", "demonstration"),
    [(["1 2\n3 4"], (), " 1 2\n3 4"), (["12"], ("\n",), " 12\n"), ([None], ("\n",), None)],
)
def test_reasoning_gym_takes_the_form_of_its_answers(monkeypatch, answers, stop, demonstration):
    module = types.SimpleNamespace(create_dataset=lambda name, seed, size: Gym(answers))
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    task = make_task("reasoning_gym", path="some")
    prompt = task.prompt("train", 0)
    assert task.stop == stop and task.demonstration(prompt) == demonstration
    assert task.reward(prompt, answers[0] or "x") == (answers[0] is not None)
    assert task.reward(prompt, "") == 0.0  # the scorer raises
    assert task.reward(prompt, answers[0] or "x", finished=False) == 0.0


def test_reasoning_gym_sets_that_are_listed_are_small(monkeypatch):
    sizes = []
    module = types.SimpleNamespace(
        create_dataset=lambda name, seed, size: sizes.append(size) or Gym(["1"])
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    task = make_task("reasoning_gym", path="acre")
    count = task.size("train")
    assert sizes == [count + task.size("eval")] and count > 3000
    texts = [{task.prompt(split, i).text for i in range(500)} for split in ("train", "eval")]
    assert len(texts[0]) == 500 and not texts[0] & texts[1]


def test_repeated_questions_are_in_one_place(tmp_path):
    path = tmp_path / "repeated.jsonl"
    path.write_text("\n".join(line(question=f"{n % 11}?") for n in range(44)))
    with pytest.warns(SharedWarning, match="training lines repeat a held-out question or a shot"):
        task = make_task("jsonl", path=str(path), shots=1)
    train, held = (
        {task.prompt(split, i).text.rpartition("Question")[2] for i in range(task.size(split))}
        for split in ("train", "eval")
    )
    assert train and held and not train & held


def test_reasoning_gym_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="pip install reasoning-gym"):
        make_task("reasoning_gym", path="squares")
    with pytest.raises(UserError, match="task.path: empty"):
        make_task("reasoning_gym")


def test_reasoning_gym_with_too_few_problems(monkeypatch):
    class One:
        def __getitem__(self, n):
            return {"question": "always the same", "answer": "1"}

    module = types.SimpleNamespace(create_dataset=lambda name, seed, size: One())
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    task = make_task("reasoning_gym", path="one")
    with pytest.raises(UserError, match="too few problems"):
        for split in ("train", "eval"):
            task.prompt(split, 0)


def test_mistakes():
    with pytest.raises(UserError, match="task.name=sum: unknown task; did you mean sums"):
        make_task("sum")


def test_open_questions_have_no_right_answer():
    task = make_task("questions")
    prompts = [task.prompt("eval", i) for i in range(60)]
    assert prompts == [task.prompt("eval", i) for i in range(60)]
    assert len({p.id for p in prompts}) == 60 and len({p.text for p in prompts}) == 56
    assert task.reward(prompts[0], "42") == 0.0 and task.demonstration(prompts[0]) is None
