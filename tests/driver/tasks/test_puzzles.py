"""Puzzles: exact rewards, demonstrations as fallible as stated, lengths with a heavy tail."""

import random
import re

import pytest

from driver.model.tiny import CHARACTERS
from driver.tasks import Prompt, countdown, make_task, puzzles, stories

SAMPLE = 400


@pytest.fixture(scope="module")
def task():
    return make_task("puzzles", difficulty=2)


@pytest.fixture(scope="module")
def worked(task):
    """(prompt, demonstration) of the first prompts."""
    prompts = [task.prompt("train", i) for i in range(SAMPLE)]
    return [(p, task.demonstration(p)) for p in prompts]


def is_search(prompt: Prompt) -> bool:
    return " from " in prompt.answer


# -- the task


def test_prompt_is_a_pure_function_of_split_and_index(task, worked):
    again = make_task("puzzles", difficulty=2)
    for index in reversed(range(60)):
        prompt, text = worked[index]
        assert again.prompt("train", index) == prompt
        assert again.demonstration(prompt) == text
    assert len({p.id for p, _ in worked}) == SAMPLE
    assert task.prompt("train", 1 << 60).text
    assert make_task("puzzles").prompt("train", 3).id == worked[3][0].id


def test_no_problem_is_in_both_splits(task, worked):
    held = {task.prompt("eval", i).text for i in range(SAMPLE)}
    assert len(held) > 0.9 * SAMPLE
    assert not held & {p.text for p, _ in worked}


def test_every_kind_has_its_share(worked):
    def share(of):
        return sum(map(of, worked)) / SAMPLE

    searches = puzzles.MIX["easy"] + puzzles.MIX["near"] + puzzles.MIX["far"] + puzzles.MIX["wide"]
    assert share(lambda w: is_search(w[0])) == pytest.approx(searches, abs=0.08)
    assert share(lambda w: "How many" in w[0].text) == pytest.approx(puzzles.MIX["story"], abs=0.06)
    assert share(lambda w: w[0].text.endswith("=\n")) == pytest.approx(puzzles.MIX["sum"], abs=0.07)
    assert sum(puzzles.MIX.values()) == pytest.approx(1)


def test_lengths_have_a_heavy_tail_within_the_limit(task, worked):
    """In characters, each a token of its own: most responses are short, a few fill the limit."""
    lengths = sorted(len(text) + 1 for _, text in worked)
    right = sorted(len(text) + 1 for p, text in worked if task.reward(p, text))
    assert lengths[SAMPLE // 2] < 512
    assert lengths[int(0.99 * SAMPLE)] > 1500
    assert lengths[-1] < 4096
    assert right[int(0.99 * len(right))] >= 4 * right[len(right) // 2]


def test_responses_are_written_in_single_characters(worked):
    for _, text in worked:
        words = text.replace(puzzles.NOTHING, "")
        assert set(words) <= set(CHARACTERS)
        assert "\n\n" not in text


def test_demonstrations_are_right_about_as_often_as_meant(task, worked):
    share = sum(task.reward(p, text) for p, text in worked) / SAMPLE
    assert 0.42 < share < 0.6


def test_without_slips_every_demonstration_is_right(task, monkeypatch):
    for name in ("SLIP_RATE", "OVERLOOK_RATE", "MISREAD_RATE"):
        monkeypatch.setattr(puzzles, name, 0.0)
    for index in range(150):
        prompt = task.prompt("train", index)
        text = task.demonstration(prompt)
        assert task.reward(prompt, text) == 1.0
        for line in text.split("\n")[:-1]:
            step = line.partition(";")[0]
            assert eval(step.replace("=", "=="))


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("35", "44-9=35\n=> 35", 1),
        ("35", "=> 35", 1),
        ("35", "=> 34\n=> 35", 1),  # the last one counts
        ("35", "=> 35\n=> 34", 0),
        ("35", "35", 0),
        ("35", "=>35", 0),
        ("35", "=> 35.0", 0),
        ("35", "=> 035", 0),
        ("35", "=> 35\n1", 0),
        ("35", "", 0),
        ("35", "=> ", 0),
        ("35", "=> \u0663\u0665", 0),  # digits of another script
        ("14 from 2 3 9", "=> 3+2=5, 9+5=14", 1),
        ("14 from 2 3 9", "=> 3+2=5,9+5=14", 1),
        ("14 from 2 3 9", "=> 2+3=5, 5+9=14", 1),
        ("14 from 2 3 9", "=> 9+5=14", 0),  # no five is given
        ("14 from 2 3 9", "=> 9+2=11, 11+3=14", 1),
        ("14 from 2 3 9", "=> 9+2=11, 11+3=15", 0),
        ("14 from 2 3 9", "=> 9+3=14", 0),  # wrong, and a number is left
        ("14 from 2 3 9", "=> 9+3=12, 12+2=14, 14+0=14", 0),
        ("14 from 2 3 9", "=> 3+3=6, 6+9=15", 0),  # a number twice
        ("14 from 2 3 9", "=> none", 0),
        ("14 from 2 3 9", "=> 14", 0),
        ("14 from 2 3 9", "=> 3+2=5, 9+5=14,", 0),
        ("12 from 2 3 9", "=> 2-3=-1, 9--1=12", 0),  # no negative numbers
    ],
)
def test_reward(task, answer, response, reward):
    assert task.reward(Prompt("0", "", answer), response) == reward


# -- countdown


def test_search_is_depth_first_and_complete():
    lines, steps = countdown.search([3, 7, 25, 10], 10_000)
    assert steps == []
    leaves = [line for line in lines if ":" in line]
    inner = [line for line in lines if ":" not in line]
    expected = 0
    for a, b, others in countdown.pairs([3, 7, 25, 10]):
        for _, value in countdown.combine(a, b):
            left = [*others, value]
            expected += sum(len(list(countdown.combine(c, d))) for c, d, _ in countdown.pairs(left))
    assert len(leaves) == expected
    assert len(inner) == sum(
        len(list(countdown.combine(a, b))) for a, b, _ in countdown.pairs([3, 7, 25, 10])
    )
    assert lines[:3] == ["7+3=10;25,10,10", "25+10=35;10,35:45,25", "25-10=15;10,15:25,5"]


@pytest.mark.parametrize(("count", "low", "high"), puzzles.COUNTDOWN.values())
def test_every_target_is_reached_and_checked(count, low, high):
    draw = random.Random(5)
    for _ in range(10):
        numbers, target = countdown.draw_problem(draw, count, low, high)
        assert low <= target <= high
        assert len(set(numbers)) == count
        try:
            lines, steps = countdown.search(numbers, target, max_lines=3000)
        except countdown.TooLong:
            continue
        assert lines[-1].endswith(f"{target}!")
        assert len(steps) == count - 1
        assert countdown.reaches(numbers, target, ", ".join(steps))
        assert not countdown.reaches(numbers, target + 1, ", ".join(steps))
        assert not countdown.reaches(numbers, target, ", ".join(steps[:-1]))


def test_a_hit_can_escape_or_be_taken_for_one():
    lines, steps = countdown.search([2, 3, 9], 14, lambda value: False)
    assert steps == []
    assert not any("!" in line for line in lines)
    lines, steps = countdown.search([2, 3, 9], 15, lambda value: value == 14)
    assert steps == ["3+2=5", "9+5=15"]  # what it believes, and so no right answer
    assert not countdown.reaches([2, 3, 9], 15, ", ".join(steps))
    with pytest.raises(countdown.TooLong):
        countdown.search([2, 3, 9], 1000, max_lines=4)


# -- chains


def test_stories_state_every_change_of_the_total():
    draw = random.Random(2)
    for _ in range(200):
        story = stories.draw_story(draw)
        name = story.text.partition(" has ")[0]
        numbers = list(map(int, re.findall(r"\d+", story.text)))
        for move in story.moves:
            assert move.sign == "*" or {move.operand, move.times} - {1} <= set(numbers)
        assert name in stories.NAMES
        lines, total = story.work()
        assert total == story.answer >= 0
        assert all(eval(line.replace("=", "==")) for line in lines)


def test_sums_never_fall_below_zero_and_lengths_fall_like_a_power():
    draw = random.Random(3)
    counts = []
    for _ in range(2000):
        chain = stories.draw_sum(draw, 3)
        totals = [chain.start]
        for move in chain.moves:
            totals.append(move.apply(totals[-1]))
        assert min(totals) >= 0
        assert eval(chain.text.removesuffix("=\n")) == chain.answer == totals[-1]
        counts.append(len(chain.moves))
    counts.sort()
    assert counts[1000] <= 6
    assert counts[-1] == stories.MAX_TERMS
    assert counts[1980] > 6 * counts[1000]
