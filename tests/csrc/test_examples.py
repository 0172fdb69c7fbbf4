"""The examples in the docstrings of the ops run on the CPU, with NumPy's arrays."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import tlt_ext

PUBLIC = {name: getattr(tlt_ext, name) for name in tlt_ext.__all__}
FUNCTIONS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]
PARTS = [part.name for part in pkgutil.iter_modules(tlt_ext.__path__) if part.name[0] != "_"]


@pytest.mark.parametrize("module", ["tlt_ext", *(f"tlt_ext.{part}" for part in PARTS)])
def test_examples_run(module):
    """With the public names alone, as a reader has them."""
    assert doctest.testmod(importlib.import_module(module), globs=PUBLIC).failed == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_op_has_an_example_that_calls_it(name):
    examples = doctest.DocTestParser().get_examples(PUBLIC[name].__doc__)
    assert any(f"{name}(" in example.source and not example.options for example in examples)
