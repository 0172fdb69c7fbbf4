"""Ops with random wrong arguments: each call runs or raises an error of one line.

A native core that is built with `-fsanitize=address,undefined` finds reads past the arrays, too.
"""

import random
import re

import numpy as np
import pytest

import tlt_ext
from tests.csrc.plain_arrays import Arrays, cases
from tests.grouping import flat

CALLS = 60  # of an op
DTYPES = ("f2", "f4", "f8", "i4", "i8", "u1", "?")
INTEGERS = (-(2**31), -2, -1, 0, 1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 10**6, 2**31 - 1)
FLOATS = (np.nan, np.inf, -np.inf, 0.0, -1.0, 6e4)
NUMBERS = (-(2**63), -1, 0, 1, 2, 17, 129, 256, 2**31, 2**63 - 1, 2**63, 2**64, 1.5, None, "x")
# pybind11's own message shows all arguments. Without a name: errors found before the op is known.
NAMELESS = "|".join(
    [
        r"incompatible function arguments",
        r"^seed: expected",
        r"^expected an array",
        r"^an array ",
        r"cannot be interpreted as an integer$",
        r"^iteration over a 0-d array$",
        r"object is not iterable$",
    ]
)


def changed(array: np.ndarray, draw: random.Random) -> np.ndarray | None:
    """An array of another shape, type, layout or content, or None."""
    if array.ndim == 0 or array.size == 0:
        return array
    axis, flat_array = draw.randrange(array.ndim), array.reshape(-1)
    values = INTEGERS if array.dtype == np.int32 else FLOATS
    with np.errstate(all="ignore"):
        filled = flat_array.copy()
        for _ in range(draw.choice((1, 2, filled.size))):
            filled[draw.randrange(filled.size)] = np.asarray(draw.choice(values)).astype(
                array.dtype
            )
        return draw.choice(
            (
                lambda: None,
                lambda: array.astype(draw.choice(DTYPES)),
                lambda: np.take(array, range(draw.randrange(array.shape[axis])), axis),
                lambda: np.repeat(array, draw.choice((2, 3, 17)), axis),
                lambda: array.T,
                lambda: array[::-1],
                lambda: array[..., None],
                lambda: flat_array,
                lambda: flat_array[0].reshape(()),
                lambda: np.repeat(array, 2, 0)[::2],
                lambda: filled.reshape(array.shape),
                lambda: filled.reshape(array.shape),
            )
        )()


def wrong_calls(name: str, arguments: Arrays, count: int):
    draw = random.Random(name)
    for _ in range(count):
        call = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
        for key in draw.sample(sorted(call), draw.choice((1, 1, 2))):
            value = call[key]
            is_array = isinstance(value, np.ndarray)
            call[key] = changed(value, draw) if is_array else draw.choice(NUMBERS)
        if name in ("arm_passes", "advance_batch"):
            call["ring"] = tlt_ext.PassRing(8, 1, pinned=False)
        yield call


@pytest.mark.parametrize("name", sorted(cases()))
def test_a_wrong_call_runs_or_gives_one_line(name):
    refused = 0
    for dtype in (np.float32, np.float16):
        for call in wrong_calls(name, cases(dtype)[name], CALLS // 2):
            try:
                getattr(flat, name)(**call)
            except (TypeError, ValueError) as error:
                message, refused = str(error), refused + 1
                assert message.startswith(f"{name}: ") or re.search(NAMELESS, message), message
    assert refused > CALLS / 4
