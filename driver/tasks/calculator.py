"""Chains of arithmetic, computed by a calculator that the model calls."""

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from .base import Prompt, Split, Task, held_out, prompt_id

# Demonstrations contain errors on purpose, as those of `sums`: a call has a wrong digit.
SLIP_RATE = 0.3
MOST_STEPS = 5  # operations of a chain
INVALID = "?"  # the calculator's answer to what it does not compute
MAX_CHARACTERS = 200  # of an expression; they limit its depth and the size of its value
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CalculatorTask(Task):
    """`12*7+5=`, answered by calls of a calculator: `<12*7>84<84+5>89=89`.

    The model writes an expression between `<` and `>`, and the calculator writes the value behind
    it. The reward is 1 if the text after the last `=` is the answer, else 0. The numbers have up to
    `difficulty` digits.
    """

    name = "calculator"
    stop = (">",)

    def __init__(self, difficulty: int = 1) -> None:
        self.high = 10**difficulty - 1

    def prompt(self, split: Split, index: int) -> Prompt:
        id = prompt_id(self.name, split, index)
        draw = random.Random(id)
        while True:
            total = draw.randint(2, self.high)
            text = str(total)
            # Half of the chains have one operation, a quarter two, and so on.
            steps = 1
            while steps < MOST_STEPS and draw.random() < 0.5:
                steps += 1
            for step in range(steps):
                other = draw.randint(2, self.high)
                if step == 0 and draw.random() < 0.5:  # only the first: no precedence to observe
                    text, total = f"{text}*{other}", total * other
                elif other <= total and draw.random() < 0.5:
                    text, total = f"{text}-{other}", total - other
                else:
                    text, total = f"{text}+{other}", total + other
            text = f"{text}="
            if held_out(text) == (split == "eval"):
                return Prompt(id, text, str(total))

    def respond(self, prompt: Prompt, turn: int, text: str) -> str | None:
        call = re.search(r"<([^<>]*)>$", text)
        return None if call is None else calculate(call[1])

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        return float(finished and response.rpartition("=")[2] == prompt.answer)

    def states_answer(self, response: str) -> bool:
        return "=" in response

    def demonstration(self, prompt: Prompt) -> Sequence[str]:
        """A call for each operation; each is wrong in a digit with probability `SLIP_RATE`."""
        draw = random.Random(f"{prompt.id}/slips")
        total, *steps = re.findall(r"[-+*]?\d+", prompt.text)
        turns = []
        for step in steps:
            if draw.random() < SLIP_RATE:
                step = step[:-1] + str((int(step[-1]) + 1) % 10)
            turns.append(f"<{total}{step}>")
            total = calculate(f"{total}{step}")
        return [*turns, f"={total}"]


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, computed exactly and without `eval`.

    It has numbers, `+ - * /`, parentheses and spaces, at most `MAX_CHARACTERS`. The value is an
    integer, a decimal with six significant digits, or `INVALID`, for a division by 0 too.

    Example:
        >>> calculate("(3+4)*5"), calculate("1/3"), calculate("9**9**9"), calculate("x")
        ('35', '0.333333', '?', '?')
    """
    if len(expression) > MAX_CHARACTERS or not re.fullmatch(r"[0-9+\-*/.() ]+", expression):
        return INVALID
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError):
        return INVALID
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError("not arithmetic")
