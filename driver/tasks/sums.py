"""Addition by counting on: lengths follow the heavy-tailed addend."""

import random

from .base import Prompt, Split, Task, held_out, prompt_id

# P(addend > k) = k ** -TAIL up to the cap: half of the prompts add 2, one in 23 adds all 24.
TAIL = 1.0
MIN_ADDEND, MAX_ADDEND = 2, 24
# Demonstrations contain errors on purpose: a step repeats or skips a number. So a policy that
# imitates them can still improve by rewards, by an amount that does not depend on the seed's
# warm-up.
SLIP_RATE, SLIPS = 0.3, (0, 2)


class SumsTask(Task):
    """`start+addend=`, answered by counting on, one step at a time.

    The response to `578+3=` is `579+2=580+1=581`. The reward is 1 if the text after the last `=` is
    the answer, else 0; the steps before it are ignored. The start has `difficulty` + 2 digits.
    """

    name = "sums"

    def __init__(self, difficulty: int = 1) -> None:
        self.low, self.high = 10 ** (difficulty + 1), 10 ** (difficulty + 2) - 1

    def prompt(self, split: Split, index: int) -> Prompt:
        id = prompt_id(self.name, split, index)
        draw = random.Random(id)
        while True:
            heavy = int((1.0 - draw.random()) ** (-1.0 / TAIL))
            addend = min(MIN_ADDEND - 1 + heavy, MAX_ADDEND)
            start = draw.randint(self.low, self.high - addend)
            text = f"{start}+{addend}="
            if held_out(text) == (split == "eval"):
                return Prompt(id, text, str(start + addend))

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        return float(finished and response.rpartition("=")[2] == prompt.answer)

    def demonstration(self, prompt: Prompt) -> str:
        """Counts on with random errors: each step is wrong with probability `SLIP_RATE`."""
        start, _, addend = prompt.text.removesuffix("=").partition("+")
        draw, total, lines = random.Random(f"{prompt.id}/slips"), int(start), []
        for left in range(int(addend) - 1, -1, -1):
            total += draw.choice(SLIPS) if draw.random() < SLIP_RATE else 1
            lines.append(f"{total}+{left}" if left else str(total))
        return "=".join(lines)
