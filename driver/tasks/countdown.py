"""Countdown: reach a target from a few numbers, with a depth-first search that is written out.

The search tries pairs in order of their positions and `+ - *` for each, so its text determines the
next line. Its length depends on the position of the first hit in a tree of thousands of leaves:
lengths of one problem size vary by two orders of magnitude.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence

LARGEST = 25  # given numbers
TABLE = 12  # products are tried up to 12 * 12

_STEP = re.compile(r"([0-9]{1,6})([-+*])([0-9]{1,6})=([0-9]{1,6})")


def combine(a: int, b: int) -> Iterator[tuple[str, int]]:
    """(`a sign b`, value) of two numbers, larger one first; no zeros, products up to `TABLE`."""
    yield f"{a}+{b}", a + b
    if a != b:
        yield f"{a}-{b}", a - b
    if 1 < b and a <= TABLE:
        yield f"{a}*{b}", a * b


def pairs(numbers: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Every pair in order of position: (larger, smaller, the others in order)."""
    for i, first in enumerate(numbers):
        for j in range(i + 1, len(numbers)):
            others = [n for k, n in enumerate(numbers) if k not in (i, j)]
            yield max(first, numbers[j]), min(first, numbers[j]), others


def draw_problem(draw: random.Random, count: int, low: int, high: int) -> tuple[list[int], int]:
    """`count` different numbers, and a target from `low` to `high` that random operations reach."""
    while True:
        numbers = draw.sample(range(1, LARGEST + 1), count)
        left = list(numbers)
        while len(left) > 1:
            a, b, others = draw.choice(list(pairs(left)))
            left = [*others, draw.choice(list(combine(a, b)))[1]]
        if low <= left[0] <= high and left[0] not in numbers:
            return numbers, left[0]


class TooLong(Exception):
    """A search exceeded its limit of lines."""


def search(
    numbers: Sequence[int],
    target: int,
    is_hit: Callable[[int], bool] | None = None,
    max_lines: int = 10_000,
) -> tuple[list[str], list[str]]:
    """Lines of the search up to its first hit, and the steps that reach the target.

    A line is a step, the remaining numbers, and if two remain, all their results:
    `10+25=35;50,35:85,15`. A hit ends its line with `!`. `is_hit` tells which results are taken for
    the target, by default those that equal it; a wrong hit is written as the target too. There are
    no steps without a hit. Raises TooLong if there is none within `max_lines`.

    Example:
        >>> search([2, 3, 9], 14)
        (['3+2=5;9,5:14!'], ['3+2=5', '9+5=14'])
    """
    lines: list[str] = []
    taken = is_hit or (lambda value: value == target)

    def descend(numbers: Sequence[int]) -> list[str]:
        for a, b, others in pairs(numbers):
            for text, value in combine(a, b):
                step, left = f"{text}={value}", [*others, value]
                if len(lines) == max_lines:
                    raise TooLong
                lines.append(f"{step};{','.join(map(str, left))}")
                found = descend(left) if len(left) > 2 else finish(left)
                if found:
                    return [step, *found]
        return []

    def finish(left: Sequence[int]) -> list[str]:
        results: list[str] = []
        for text, value in combine(max(left), min(left)):
            if taken(value):
                lines[-1] += f":{','.join([*results, str(target)])}!"
                return [f"{text}={target}"]
            results.append(str(value))
        lines[-1] += f":{','.join(results)}"
        return []

    return lines, descend(numbers)


def reaches(numbers: Sequence[int], target: int, answer: str) -> bool:
    """Whether steps like `3+7=10, 25+10=35` use each number once, are right and end at the target.

    Example:
        >>> reaches([2, 3, 9], 14, "2+3=5, 9+5=14"), reaches([2, 3, 9], 14, "9+5=14")
        (True, False)
    """
    left = list(numbers)
    for text in answer.split(","):
        step = _STEP.fullmatch(text.strip())
        if step is None:
            return False
        a, b, result = (int(step[k]) for k in (1, 3, 4))
        for number in (a, b):
            if number not in left:
                return False
            left.remove(number)
        if {"+": a + b, "-": a - b, "*": a * b}[step[2]] != result:
            return False
        left.append(result)
    return left == [target]
