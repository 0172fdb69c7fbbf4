"""Puzzles solved step by step: long sums, word problems, countdown with a written search.

Most responses have a few lines and some have thousands of tokens, because the number of steps
follows a power law and the position of a search's first hit varies as much.
"""

import random
from typing import NamedTuple

from . import countdown, stories
from .base import Prompt, Split, Task, held_out, prompt_id

# Share of each kind.
MIX = {"sum": 0.2, "story": 0.15, "easy": 0.1, "near": 0.25, "far": 0.25, "wide": 0.05}
# Countdown: how many numbers, and the bounds of the target. A tree of four numbers has up to 3,100
# characters, each one token for most tokenizers; a tree of five, up to 50,000.
COUNTDOWN = {"easy": (3, 10, 99), "near": (4, 10, 99), "far": (4, 100, 399), "wide": (5, 10, 99)}
MAX_LINES = 150  # longest search among five numbers; longer problems are not used
# Demonstrations contain errors on purpose, so that a policy that imitates them can still improve by
# rewards. The rates below decide by how much, since a policy imitates closely (SmolLM2-135M within
# 6 million tokens: .753 right, after demonstrations of which .72 were right).
SLIP_RATE, SLIPS = 0.15, (-10, -1, 1, 10)  # errors in computed or copied results
OVERLOOK_RATE = 0.15  # overlooked hits
MISREAD_RATE = 0.6  # results that differ from the target by a slip and are taken for a hit
MARK = "=> "  # before the final answer
NOTHING = "none"  # the answer of a search that overlooked every hit


class _Search(NamedTuple):
    """A countdown problem: the counterpart of `stories.Chain`."""

    text: str
    numbers: list[int]
    target: int


class PuzzlesTask(Task):
    """Three kinds of problems; the reward is 1 if the answer after the last `=>` is right.

    The answer of a sum or a story is a number, that of a countdown any steps that use every number
    once and end at the target, `=> 3+2=5, 9+5=14`. Terms of sums have up to `difficulty` + 1
    digits.
    """

    name = "puzzles"

    def __init__(self, difficulty: int = 1) -> None:
        self.digits = difficulty + 1

    def prompt(self, split: Split, index: int) -> Prompt:
        id = prompt_id(self.name, split, index)
        problem = self._problem(id)
        if not isinstance(problem, _Search):
            return Prompt(id, problem.text, str(problem.answer))
        numbers = " ".join(map(str, problem.numbers))
        return Prompt(id, problem.text, f"{problem.target} from {numbers}")

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        _, mark, answer = response.rpartition(MARK)
        if not mark or not finished:
            return 0.0
        target, search, numbers = prompt.answer.partition(" from ")
        if search:
            given = [int(number) for number in numbers.split()]
            return float(countdown.reaches(given, int(target), answer))
        return float(answer.strip() == prompt.answer)

    def demonstration(self, prompt: Prompt) -> str:
        """A solution with random errors: wrong results, overlooked hits, wrong hits."""
        problem, draw = self._problem(prompt.id), random.Random(f"{prompt.id}/slips")
        if isinstance(problem, _Search):
            # With five numbers, the next hit may be thousands of lines later.
            overlook = OVERLOOK_RATE if len(problem.numbers) < 5 else 0.0

            def is_hit(value: int) -> bool:
                off = value - problem.target
                chance = MISREAD_RATE if off in SLIPS else 0.0 if off else 1.0 - overlook
                return draw.random() < chance

            lines, steps = countdown.search(problem.numbers, problem.target, is_hit)
            # The final steps are copied once, however long the search was.
            texts = [step.split("=") for step in steps]
            final = ", ".join(f"{text}={_slip(draw, int(result))}" for text, result in texts)
        else:
            lines, total = problem.work(lambda result: _slip(draw, result))
            final = str(total)
        return "\n".join([*lines, MARK + (final or NOTHING)])

    def _problem(self, id: str) -> _Search | stories.Chain:
        draw, eval_split = random.Random(f"{id}/{self.digits}"), id.split("/")[1] == "eval"
        kind = draw.choices(list(MIX), list(MIX.values()))[0]
        while True:
            problem = self._draw(draw, kind)
            if problem is not None and held_out(problem.text) == eval_split:
                return problem

    def _draw(self, draw: random.Random, kind: str) -> _Search | stories.Chain | None:
        """A problem of a kind, or None if its search is too long."""
        if kind == "sum":
            return stories.draw_sum(draw, self.digits)
        if kind == "story":
            return stories.draw_story(draw)
        numbers, target = countdown.draw_problem(draw, *COUNTDOWN[kind])
        if len(numbers) == 5:
            try:
                countdown.search(numbers, target, max_lines=MAX_LINES)
            except countdown.TooLong:
                return None
        text = f"Numbers: {' '.join(map(str, numbers))}\nTarget: {target}\n"
        return _Search(text, numbers, target)


def _slip(draw: random.Random, result: int) -> int:
    return result + draw.choice(SLIPS) if draw.random() < SLIP_RATE else result
