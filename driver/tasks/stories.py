"""Sums of many terms and word problems: one running total, computed line by line."""

import random
from collections.abc import Callable
from dataclasses import dataclass

# P(moves >= k) ~ k ** -TAIL: most chains are short, a few are very long.
TAIL = 1.1
MAX_TERMS, MAX_EVENTS = 48, 12

NAMES = "Ada Ben Chloe Dev Elif Femi Grace Hugo Ines Jun Kofi Lea".split()
THINGS = ("shells", "stamps", "marbles", "coins", "cards", "beads", "apples", "pencils", "stickers")
PACKS = ("bags", "boxes", "packs", "jars")
GAINS = ("finds {0} more {1}", "buys {0} {1}", "is given {0} {1}", "wins {0} {1}")
LOSSES = ("gives away {0} {1}", "loses {0} {1}", "sells {0} {1}", "trades away {0} {1}")


@dataclass(frozen=True)
class Move:
    """A change of the total: `sign` and one operand, or the product of two."""

    sign: str
    operand: int
    times: int = 1

    def apply(self, total: int) -> int:
        value = self.operand * self.times
        return {"+": total + value, "-": total - value, "*": total * value}[self.sign]


@dataclass(frozen=True)
class Chain:
    """A problem's text, the start of its total, and the changes of the total."""

    text: str
    start: int
    moves: tuple[Move, ...]

    @property
    def answer(self) -> int:
        return self.work()[1]

    def work(self, slip: Callable[[int], int] = lambda result: result) -> tuple[list[str], int]:
        """The lines and the result of a solution; `slip` maps right results to written ones."""
        lines, total = [], self.start
        for move in self.moves:
            value = move.operand
            if move.times > 1:
                value = slip(move.operand * move.times)
                lines.append(f"{move.times}*{move.operand}={value}")
            after = slip(Move(move.sign, value).apply(total))
            lines.append(f"{total}{move.sign}{value}={after}")
            total = after
        return lines, total


def heavy(draw: random.Random, low: int, high: int) -> int:
    """A count from `low` to `high` with a power-law tail."""
    return min(low - 1 + int((1.0 - draw.random()) ** (-1.0 / TAIL)), high)


def draw_sum(draw: random.Random, digits: int) -> Chain:
    """`347+85-29=`: terms of at most `digits` digits, the total never below zero."""
    total = start = draw.randint(10, 10**digits - 1)
    moves: list[Move] = []
    for _ in range(heavy(draw, 4, MAX_TERMS)):
        operand = draw.randint(2, 10 ** draw.randint(1, digits) - 1)
        sign = "-" if operand <= total and draw.random() < 0.5 else "+"
        moves.append(Move(sign, operand))
        total = moves[-1].apply(total)
    text = "".join(f"{move.sign}{move.operand}" for move in moves)
    return Chain(f"{start}{text}=\n", start, tuple(moves))


def draw_story(draw: random.Random) -> Chain:
    """A word problem about one person's things, sometimes with an irrelevant second person."""
    name, other = draw.sample(NAMES, 2)
    thing = draw.choice(THINGS)
    total = start = draw.randint(5, 60)
    sentences, moves = [f"{name} has {start} {thing}."], []
    bystander = draw.random() < 0.3
    for _ in range(heavy(draw, 2, MAX_EVENTS)):
        sentence, move = _event(draw, total, thing)
        sentences.append(f"{name} {sentence}.")
        moves.append(move)
        total = move.apply(total)
    if bystander:
        place = draw.randint(1, len(sentences))
        sentences.insert(place, f"{other} has {draw.randint(2, 60)} {thing}.")
    question = f"How many {thing} does {name} have?\n"
    return Chain(" ".join([*sentences, question]), start, tuple(moves))


def _event(draw: random.Random, total: int, thing: str) -> tuple[str, Move]:
    kinds = ["gain", "pack"] + ["loss", "loss"] * (total >= 10) + ["double"] * (total <= 100)
    kind = draw.choice(kinds)
    if kind == "pack":
        packs, each = draw.randint(2, 9), draw.randint(2, 9)
        text = f"buys {packs} {draw.choice(PACKS)} of {each} {thing}"
        return text, Move("+", each, packs)
    if kind == "double":
        return f"gets as many {thing} again", Move("*", 2)
    if kind == "loss":
        operand = draw.randint(2, total)
        return draw.choice(LOSSES).format(operand, thing), Move("-", operand)
    operand = draw.randint(2, 60)
    return draw.choice(GAINS).format(operand, thing), Move("+", operand)
