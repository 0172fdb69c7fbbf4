"""Addition by counting on: lengths follow the heavy-tailed addend."""

from __future__ import annotations

import random

from driver.tasks.base import Prompt, Split, generator, held_out, prompt_id

# P(addend > k) = k ** -TAIL up to the cap: half of the prompts add 2, one in 23 adds all 24.
TAIL = 1.0
MIN_ADDEND, MAX_ADDEND = 2, 24


class SumsTask:
    """`start+addend=`, answered by counting on, one line a step.

    The prompt `578+3=` has the worked response `579+2=580+1=581`. The reward is 1 when the text
    after the last `=` is the answer and 0 otherwise; the steps before it are not judged.

    Args:
        difficulty: the start has this many digits and two more.

    Example:
        >>> task = SumsTask()
        >>> task.demonstration(Prompt("0", "578+3=", "581"))
        '579+2=580+1=581'
        >>> task.reward(Prompt("0", "578+3=", "581"), "580+1=581")
        1.0
    """

    name = "sums"
    stop: tuple[str, ...] = ()

    def __init__(self, difficulty: int = 1) -> None:
        self.low, self.high = 10 ** (difficulty + 1), 10 ** (difficulty + 2) - 1

    def prompt(self, split: Split, index: int) -> Prompt:
        id = prompt_id(self.name, split, index)
        draw = generator(id)
        while True:
            addend = _draw_addend(draw)
            start = draw.randint(self.low, self.high - addend)
            text = f"{start}+{addend}="
            if held_out(text) == (split == "eval"):
                return Prompt(id, text, str(start + addend))

    def reward(self, prompt: Prompt, response: str) -> float:
        return float(response.rpartition("=")[2] == prompt.answer)

    def demonstration(self, prompt: Prompt) -> str:
        start, _, addend = prompt.text.removesuffix("=").partition("+")
        counted = [f"{int(start) + step}+{int(addend) - step}" for step in range(1, int(addend))]
        return "=".join([*counted, prompt.answer])


def _draw_addend(draw: random.Random) -> int:
    heavy = int((1.0 - draw.random()) ** (-1.0 / TAIL))
    return min(MIN_ADDEND - 1 + heavy, MAX_ADDEND)
