"""Few-shot addition and multiplication for a pretrained model."""

import operator
import random
import re

from .base import Prompt, Split, Task, held_out, may_go_on, prompt_id

_OPERATIONS = {"addition": ("+", operator.add), "multiplication": ("*", operator.mul)}
# ASCII digits only: int() would also read the digits of other scripts.
_INTEGER = re.compile(r"-?[0-9]+")


class FewShotTask(Task):
    """Worked lines `a + b = c`, then one to complete. The answer is the first line's first integer.

    Operands have `difficulty` + 1 digits. `shots` solved lines, none of them a held-out problem,
    stand before the question.
    """

    stop: tuple[str, ...] = ("\n",)

    def __init__(self, name: str, difficulty: int = 1, shots: int = 4) -> None:
        self.name, self.shots = name, shots
        self.sign, self.operation = _OPERATIONS[name]
        self.low, self.high = 10**difficulty, 10 ** (difficulty + 1) - 1

    def prompt(self, split: Split, index: int) -> Prompt:
        id = prompt_id(self.name, split, index)
        draw = random.Random(f"{id}/{self.low}-{self.high}")
        problem, answer = self._problem(draw, eval_split=split == "eval")
        lines: list[str] = []
        while len(lines) < self.shots:
            shot, solved = self._problem(draw, eval_split=False)
            if shot != problem:  # a shot must not give the answer away
                lines.append(f"{shot} {solved}\n")
        return Prompt(id, "".join(lines) + problem, answer)

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        line = response.lstrip().partition("\n")
        found = _INTEGER.search(line[0])
        if found is None or (not finished and may_go_on(line[0][found.end() :] + line[1])):
            return 0.0
        # Compared as text without leading zeros, because integers may have thousands of digits.
        return float(_plain(found.group()) == prompt.answer)

    def demonstration(self, prompt: Prompt) -> str:
        return f" {prompt.answer}\n"

    def _problem(self, draw: random.Random, eval_split: bool) -> tuple[str, str]:
        while True:
            a, b = draw.randint(self.low, self.high), draw.randint(self.low, self.high)
            text = f"{a} {self.sign} {b} ="
            if held_out(text) == eval_split:
                return text, str(self.operation(a, b))


def _plain(integer: str) -> str:
    digits = integer.lstrip("-").lstrip("0") or "0"
    return f"-{digits}" if integer.startswith("-") and digits != "0" else digits
