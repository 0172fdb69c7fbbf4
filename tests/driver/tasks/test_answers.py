"""Final answers: what counts as one, and which are equal."""

import json

import pytest

from driver.common.errors import UserError
from driver.tasks.answers import equal_answers, final_answer
from driver.tasks.base import Prompt
from driver.tasks.jsonl import JsonlTask


def judge(gold: str, response: str, finished: bool = True) -> bool:
    """As the task does: the gold answer stands in a worked answer."""
    expected, answer = final_answer(f"So.\n#### {gold}"), final_answer(response, finished)
    return expected is not None and answer is not None and equal_answers(expected, answer)


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("42", "#### 42/2"),
        ("42", "#### 42^2"),
        ("42", "#### 42e3"),
        ("42", "#### 42k"),
        ("42", "#### 42 million"),
        ("42", "#### 42x"),
        ("42", "42"),
        ("12", "#### 1,2"),
        ("1/2", "#### 1/3"),
        ("1/2", "#### 1"),
        ("3:45", "#### 3"),
        ("2^10", "#### 2"),
        ("1e6", "#### 1"),
        ("5\\sqrt{2}", "#### 5"),
        ("3, 5, 7", "#### 3"),
        ("3", "#### -3"),
        ("blue", "#### red"),
        ("4", "#### "),
        ("4", "#### 1e99999999"),
        ("4", "#### " + "9" * 5000),  # Python reads no integer of more than 4300 digits
        ("4", "#### 4." + "9" * 5000),
        ("4", "#### 4/" + "9" * 5000),
    ],
)
def test_other_answers_score_0(gold, response):
    assert not judge(gold, response)


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("9500", "#### 9{,}500"),
        ("42", "#### \\boxed{42}"),
        ("42", "so it is \\boxed{42}."),
        ("\\frac{1}{2}", "it is \\boxed{\\frac{1}{2}}"),
        ("42", "#### **42**"),
        ("42", "#### = 42"),
        ("42", "#### (42)"),
        ("42", "#### $42$"),
        ("42", "#### 42."),
        ("42", "#### 42.00 dollars"),
        ("42", "#### 42%"),
        ("-3", "#### -$3"),
        ("42", "#### €42"),
        ("-3", "#### \u22123"),
        ("1018", "#### $1,018 in all"),
        ("1/2", "#### 0.5"),
        ("2^10", "#### 1024"),
        ("1e6", "#### 1,000,000"),
        ("5\\sqrt{2}", "#### \\sqrt{50}"),
        ("3, 5, 7", "#### 3,5,7"),
        ("3:45", "#### 3:45"),
        ("Blue", "#### blue"),
    ],
)
def test_equal_answers_score_1(gold, response):
    assert judge(gold, response)


def test_a_long_expression_is_compared_as_text(monkeypatch):
    """Math-Verify takes up to 5 s for one, and a policy may repeat itself."""
    monkeypatch.setattr("math_verify.parse", None)
    for letters in ("(", "1,", "-"):
        assert not equal_answers("x + 1", letters * 401)
        assert equal_answers(letters * 401, letters * 401)


@pytest.mark.parametrize(
    ("response", "counts"),
    [
        ("#### 1", False),
        ("#### 1.", False),
        ("#### 1\n", True),
        ("#### 1 apple", True),
        ("#### \\sqrt{1}", False),
    ],
)
def test_an_answer_that_was_cut_does_not_count(response, counts):
    assert (final_answer(response, finished=False) is not None) == counts


def test_a_file_without_answers_is_refused_by_its_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = [{"question": f"{n}?", "answer": f"#### {n}/7"} for n in range(12)]
    path.write_text("\n".join(map(json.dumps, lines)))
    task = JsonlTask(str(path), shots=1)
    prompt = task.prompt("train", 0)
    assert task.reward(prompt, prompt.answer) == 1.0 and task.states_answer("#### 3")
    assert task.reward(Prompt("0", "", "#### 3/7"), "#### 6/14") == 1.0
    assert not task.states_answer("it is 3")
    path.write_text(path.read_text().replace("#### 5/7", "5/7"))
    with pytest.raises(UserError, match="lines.jsonl:6: 'answer' states no final answer; write it"):
        JsonlTask(str(path), shots=1)
