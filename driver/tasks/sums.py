"""Repeated addition, worked step by step: lengths follow the heavy-tailed number of steps."""

from __future__ import annotations

import random

from driver.tasks.base import Prompt, Split, generator, held_out, prompt_id

# P(steps > k) = k ** -TAIL up to the cap: half of the prompts need two steps, one in fifty all 24.
TAIL = 1.2
MIN_STEPS, MAX_STEPS = 2, 24


class SumsTask:
    """`start+addend*steps=`, answered by rewriting one addition at a time.

    The prompt `57+7*3=` has the worked response `64+7*2=71+7*1=78`. The reward is 1 when the text
    after the last `=` is the answer and 0 otherwise; the steps before it are not judged.

    Args:
        difficulty: digits of the addend; the start has up to one more.

    Example:
        >>> task = SumsTask()
        >>> task.demonstration(Prompt("0", "57+7*3=", "78"))
        '64+7*2=71+7*1=78'
        >>> task.reward(Prompt("0", "57+7*3=", "78"), "64+7*2=78")
        1.0
    """

    name = "sums"
    stop: tuple[str, ...] = ()

    def __init__(self, difficulty: int = 1) -> None:
        self.max_addend = 10**difficulty - 1
        self.max_start = 10 ** (difficulty + 1) - 1

    def prompt(self, split: Split, index: int) -> Prompt:
        id = prompt_id(self.name, split, index)
        draw = generator(id)
        while True:
            start, addend = draw.randint(1, self.max_start), draw.randint(2, self.max_addend)
            steps = _draw_steps(draw)
            text = f"{start}+{addend}*{steps}="
            if held_out(text) == (split == "eval"):
                return Prompt(id, text, str(start + addend * steps))

    def reward(self, prompt: Prompt, response: str) -> float:
        return float(response.rpartition("=")[2] == prompt.answer)

    def demonstration(self, prompt: Prompt) -> str:
        start, _, product = prompt.text.removesuffix("=").partition("+")
        addend, _, steps = product.partition("*")
        total, worked = int(start), []
        for left in range(int(steps) - 1, -1, -1):
            total += int(addend)
            worked.append(f"{total}+{addend}*{left}" if left else str(total))
        return "=".join(worked)


def _draw_steps(draw: random.Random) -> int:
    heavy = int((1.0 - draw.random()) ** (-1.0 / TAIL))
    return min(MIN_STEPS - 1 + heavy, MAX_STEPS)
