"""What the commands share: `key=value` options, and one line for a user's mistake."""

from __future__ import annotations

import dataclasses
import difflib
import signal
import sys
import typing
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import yaml
from transformers.utils.logging import disable_progress_bar

from ..common.errors import UserError
from .strategy import split_strategies

Options = TypeVar("Options")


def read_options(kind: type[Options], argv: Sequence[str]) -> Options:
    """Fills a dataclass of plain fields (str, int, float, bool, list of strategies).

    Raises:
        UserError: a word without `=`, an unknown key, a value of another type.

    Example:
        >>> @dataclasses.dataclass
        ... class Job:
        ...     tokens: int = 10
        >>> read_options(Job, ["tokens=3"]).tokens
        3
    """
    types = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"{word!r}: wanted key=value, for example {names[0]}=...")
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise UserError(f"{key}: unknown key; {hint}")
        values[key] = _value(key, types[key], text)
    return kind(**values)


def _value(key: str, declared: Any, text: str) -> Any:
    if declared is str:
        return text
    if typing.get_origin(declared) is list:
        return split_strategies(text)
    try:
        value = yaml.safe_load(text)
        if declared is float and type(value) in (int, str):  # to YAML 1e-6 is a text
            value = float(value)
    except (ValueError, yaml.YAMLError):
        value = None
    if type(value) is not declared or value != value:
        raise UserError(f"{key}: wanted {declared.__name__}, got {text!r}")
    return value


def run_command(command: Callable[[Sequence[str]], None]) -> None:
    """Runs `command(argv)`; a UserError is one line on stderr and exit code 2.

    `--help` prints what the command's module says of itself.

    SIGTERM (a time limit) ends it as Ctrl-C does, so that what was found so far is still printed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    disable_progress_bar()  # of transformers: what a command shows is its own
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write((sys.modules["__main__"].__doc__ or "").strip() + "\n")
        return
    try:
        command(sys.argv[1:])
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(UserError.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(130)
