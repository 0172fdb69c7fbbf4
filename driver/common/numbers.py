"""Numbers from code of the user, such as reward functions."""

import reprlib
from numbers import Real
from typing import Any

LARGEST = 1e30  # of a reward: sums and advantages fit into float32


def finite(value: Any) -> float | None:
    """The value as a float, or None if it is not a real number of at most `LARGEST` in size.

    Example:
        >>> finite(True), finite("1"), finite(10**400)
        (1.0, None, None)
    """
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if abs(number) <= LARGEST else None


def shown(value: Any) -> str:
    """The value for an error message: at most one line, even if its `repr` fails.

    Example:
        >>> shown(10**400)
        '100000000000000000...0000000000000000000'
    """
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # its own `repr` fails, or the integer has too many digits for one
        return f"a value of type {type(value).__name__}"
