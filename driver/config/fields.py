"""Typed fields: meaning and limits stand beside the default, and one reader converts text."""

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..common.errors import UserError
from .strategy import split_strategies

MAX_NUMBER = 2**31 - 1  # without another bound: fits into int32, float32 and a timeout in seconds
Options = TypeVar("Options", bound="Section")


def setting(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    words: Sequence[str | int] | None = None,
) -> Any:
    """Declares a dataclass field with meaning and limits; a list is copied for each instance.

    `meaning` is one line with the unit, which `--help` prints. `low`, `above` and `high` mean
    `value >= low`, `value > above`, `value <= high`, of each list item too; `words` are all values.
    A number without `high` is at most `MAX_NUMBER`.
    """
    metadata = {"meaning": meaning, "low": low, "above": above, "high": high, "words": words}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Section:
    """Base of all groups of fields; values outside their limits are rejected."""

    prefix: ClassVar[str]  # of the keys, for example "run."

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls.prefix = prefix

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            for one in value if isinstance(value, list) else [value]:
                _check_limits(self.prefix + item.name, one, item.metadata)


def field_types(kind: type[Section]) -> dict[str, Any]:
    """Returns key -> declared type of each field."""
    hints = typing.get_type_hints(kind)
    return {kind.prefix + item.name: hints[item.name] for item in dataclasses.fields(kind)}


def read_value(key: str, declared: Any, text: str) -> Any:
    """Converts text to the type of a field: str, int, float, bool, or a list of one of them.

    The section that takes the value checks its limits. Raises UserError, which names `key`.

    Example:
        >>> read_value("grpo.lr", float, "1e-4"), read_value("bandit.buckets", list[int], "1,2,4")
        (0.0001, [1, 2, 4])
    """
    if typing.get_origin(declared) is list:
        (each,) = typing.get_args(declared)
        separators = re.sub(r"[\[\],;]", " ", text)
        items = split_strategies(text) if each is str else separators.split()
        return [read_value(f"{key}[{i}]", each, item) for i, item in enumerate(items)]
    kind, read = _KINDS[declared]
    try:
        if "\0" in text:  # not allowed in a path
            raise ValueError
        text.encode()  # a lone surrogate is a byte that is not UTF-8
        return read(text)
    except ValueError:
        raise UserError(f"{key}: must be {kind}, got {text!r}") from None


def read_options(kind: type[Options], argv: Sequence[str]) -> Options:
    """Fills fields from `key=value` words; a later word wins, UserError for a wrong one."""
    types = field_types(kind)
    values = {}
    for word in argv:
        key, text = split_word(word, next(iter(types)))
        if key not in types:
            raise UserError(f"{key}: unknown key; {nearest(key, types)}")
        values[key] = read_value(key, types[key], text)
    return kind(**values)


def split_word(word: str, example: str) -> tuple[str, str]:
    """Splits `key=value`; anything else is an error."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        hint = "; --help lists the keys" if word.startswith("-") else ""
        raise UserError(f"{word!r}: must be key=value, for example {example}=...{hint}")
    return key, text


def nearest(word: str, names: Iterable[str]) -> str:
    """The hint behind an unknown name: the nearest known one, or all."""
    names = list(names)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}"


def _read_int(text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", text):
        raise ValueError
    return int(text)


def _read_bool(text: str) -> bool:
    values = {"true": True, "false": False}
    if text.lower() not in values:
        raise ValueError
    return values[text.lower()]


_KINDS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    str: ("text", str),
    int: ("an integer", _read_int),
    float: ("a number", float),
    bool: ("true or false", _read_bool),
}


def _check_limits(key: str, value: Any, limits: Mapping[str, Any]) -> None:
    words = limits.get("words")
    if words is not None and value not in words:
        allowed = list(map(str, words))
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}: must be one of {', '.join(allowed)}, got {value!r}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}: must be a finite number, got {value}")
    low, above, high = limits.get("low"), limits.get("above"), limits.get("high")
    if high is None and isinstance(value, int | float):
        high = MAX_NUMBER
    if low is not None and value < low:
        raise UserError(f"{key}: must be at least {low}, got {value}")
    if above is not None and value <= above:
        raise UserError(f"{key}: must be more than {above}, got {value}")
    if high is not None and value > high:
        raise UserError(f"{key}: must be at most {high}, got {value}")
