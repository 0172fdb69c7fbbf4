"""Final answers: how to find them in a text, and how to compare them."""

import re
from fractions import Fraction

from .base import may_go_on

MARK = "####"
MOST_DIGITS = 400  # limit of digits and of exponents; a longer number is text
MOST_LETTERS = 400  # of an expression; math-verify takes seconds for a longer one

_BOXED = re.compile(r"\\boxed\s*\{(.*)\}", re.DOTALL)
# Markup around an answer that does not change it.
_WRAPPED = re.compile(
    r"\*\*(.+)\*\*|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]|`(.+)`|\\text\{(.+)\}|\((.+)\)"
)
_SIGN = r"[-+\u2212]?"
_MONEY = r"(?:[$€£¥]|\\\$)?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})\s*{_MONEY}\s*(?P<inner>{_SIGN})"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?P<decimals>\.[0-9]+)?"
    r"(?:[eE](?P<power>[-+]?[0-9]{1,4}))?(?:\s*/\s*(?P<below>[0-9]+))?(?:\s*\\?%)?"
)
# Words that may follow a number, as in "18 dollars", except those that scale it.
_UNIT = re.compile(r"\s+(?!(?:hundred|thousand|million|billion|trillion|dozen)\b)[A-Za-z].*")


def final_answer(text: str, finished: bool = True) -> str | None:
    """The final answer of a text: its line after the first `####`, or the last `\\boxed{...}`.

    It has no decoration; None if the text states none. `finished=False`: the text was cut, and an
    answer that may be incomplete does not count.

    Example:
        >>> final_answer("9 + 9 = 18\\n#### **$18**"), final_answer("so x is 18")
        ('$18', None)
    """
    before, mark, after = text.partition(MARK)
    if not mark:
        boxed = before.rpartition("\\boxed")
        found = _BOXED.match("\\boxed" + _in_braces(boxed[2])) if boxed[1] else None
        return _undecorated(found[1]) if found else None
    line, newline, _ = after.lstrip().partition("\n")
    if not finished and not newline:
        number = _NUMBER.match(line)  # any line matches, without digits
        if number is None or not number[0].strip() or may_go_on(line[number.end() :]):
            return None
    return _undecorated(line) or None


def _in_braces(text: str) -> str:
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if letter == "}" and depth == 0:
            return text[: at + 1]
    return ""


def _undecorated(text: str) -> str:
    text = text.strip()
    while True:
        before = text
        text = text.removeprefix("=").removesuffix(".").strip()
        boxed = _BOXED.fullmatch(text)
        wrapped = _WRAPPED.fullmatch(text)
        if boxed:
            text = boxed[1].strip()
        elif wrapped and not (wrapped[7] and "," in wrapped[7]):  # (1, 2) is a pair
            text = next(group for group in wrapped.groups() if group is not None).strip()
        if text == before:
            return text


def number_of(answer: str) -> Fraction | None:
    """The exact value of an answer that is one number, or None.

    A currency, percent sign or unit may stand beside it; `42/2x`, `42k` and `1,2` are no numbers.

    Example:
        >>> number_of("-$1,018.50"), number_of("2/6"), number_of("1e3 apples"), number_of("42k")
        (Fraction(-2037, 2), Fraction(1, 3), Fraction(1000, 1), None)
    """
    text = answer.replace("{,}", ",").replace("\\,", "").replace("\\!", "").strip()
    found = _NUMBER.match(text)
    if found is None or not (found["whole"] or found["decimals"]):
        return None
    unit = text[found.end() :]
    if unit and not _UNIT.fullmatch(unit):
        return None
    digits = (found["whole"] or "0").replace(",", "") + (found["decimals"] or "")
    power, below = int(found["power"] or 0), found["below"] or "1"
    if max(len(digits), len(below), abs(power)) > MOST_DIGITS or int(below) == 0:
        return None
    value = Fraction(digits) * Fraction(10) ** power / int(below)
    signs = (found["sign"] + found["inner"]).replace("\u2212", "-")
    return -value if signs.count("-") == 1 else value


def equal_answers(gold: str, answer: str) -> bool:
    """Whether two answers of `final_answer` are equal: as numbers, as text, or as expressions.

    Example:
        >>> equal_answers("1/2", "0.5"), equal_answers("1/2", "1/3"), equal_answers("blue", "Blue")
        (True, False, True)

    Source: Math-Verify (Hugging Face), which compares expressions within its time limits.
    """
    left, right = number_of(gold), number_of(answer)
    if left is not None and right is not None:
        return left == right
    if _as_text(gold) == _as_text(answer):
        return True
    if not (_is_expression(gold) and _is_expression(answer)):
        return False
    import math_verify  # here: it takes a second

    parsed = [math_verify.parse(f"${x.strip('$')}$") for x in (gold, answer)]
    return all(parsed) and bool(math_verify.verify(*parsed))


def _as_text(answer: str) -> str:
    return re.sub(r"\s*([,;:])\s*", r"\1", " ".join(answer.casefold().split()))


def _is_expression(answer: str) -> bool:
    if len(answer) > MOST_LETTERS:
        return False
    # Words would parse as products of letters.
    without_commands = re.sub(r"\\[A-Za-z]+", "", answer)
    return ":" not in answer and not re.search(r"[A-Za-z]{2}", without_commands)
