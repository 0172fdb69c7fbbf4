"""The core needs no torch: every op on NumPy's and CuPy's arrays, in a process of their own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import tlt_ext
from tests import kit

needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="no cupy")


@pytest.mark.parametrize(
    "library", ["numpy", pytest.param("cupy", marks=[kit.gpu, kit.needs_gpu, needs_cupy])]
)
def test_every_op_takes_arrays_of(library):
    done = subprocess.run(
        [sys.executable, "-m", "tests.csrc.plain_arrays", library],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {op.__name__ for op in tlt_ext.OPS}
