"""Tasks of the user: a class from any module or file, set by `task.name=module:Class`."""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..common.errors import UserError, user_code
from ..common.numbers import shown
from ..common.storage import user_path
from .base import Prompt, Split, Task, prompt_id


class OwnTask(Task):
    """Adapts a task of the user to `Task`, with defaults for optional members.

    The class needs `prompt(split, index)`, which returns a text, a (text, answer) pair or a
    `Prompt`, and `reward(prompt, response, answer)`, which returns a number; `finished` may be a
    fourth parameter. `stop`, `demonstration(prompt, answer)`, `is_message` and `respond(prompt,
    turn, text)`, with `answer` as an optional fourth parameter, are optional. Raises UserError if a
    method is missing, or a stop text is none.
    """

    def __init__(self, name: str, task: Any) -> None:
        for method in ("prompt", "reward"):
            if not callable(getattr(task, method, None)):
                raise UserError(f"task.name={name}: no method {method}; needs prompt and reward")
        place = name.rpartition(":")[0].removesuffix(".py")
        self.name, self.task = Path(place.replace(".", "/")).name, task
        stop = getattr(task, "stop", ())
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if wrong := [text for text in self.stop if not isinstance(text, str)]:
            raise UserError(f"task.name={name}: stop must be texts, got {shown(wrong[0])}")
        self.is_message = bool(getattr(task, "is_message", False))

    def prompt(self, split: Split, index: int) -> Prompt:
        with user_code(f"task {self.name}: prompt({split!r}, {index})"):
            made = self.task.prompt(split, index)
        if isinstance(made, Prompt):  # its id may not be unique
            made = made.text, made.answer
        text, answer = made if isinstance(made, tuple) and len(made) == 2 else (made, "")
        if not isinstance(text, str):
            raise UserError(
                f"task {self.name}: prompt({split!r}, {index}) must return a text, (text, answer)"
                f" or a Prompt, got {shown(made)}"
            )
        return Prompt(prompt_id(self.name, split, index), text, answer)

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        score: Callable[..., float] = self.task.reward
        arguments = (prompt.text, response, prompt.answer)
        return score(*arguments, finished) if _takes_four(score) else score(*arguments)

    def respond(self, prompt: Prompt, turn: int, text: str) -> str | None:
        answer: Callable[..., str | None] = self.task.respond
        arguments = (prompt.text, turn, text)
        return answer(*arguments, prompt.answer) if _takes_four(answer) else answer(*arguments)

    @property
    def has_turns(self) -> bool:
        return hasattr(self.task, "respond")

    def demonstration(self, prompt: Prompt) -> str | Sequence[str] | None:
        make = getattr(self.task, "demonstration", None)
        worked = None if make is None else make(prompt.text, prompt.answer)
        turns = [worked] if isinstance(worked, str) else worked
        texts = isinstance(turns, Sequence) and all(isinstance(text, str) for text in turns)
        if not (turns is None or texts):
            raise TypeError(f"expected a text or the texts of turns, got {shown(worked)}")
        return worked


def _takes_four(function: Any) -> bool:
    """Whether a function, a bound method or another callable has a fourth parameter by place."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function of C
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) >= 4


def own_task(name: str) -> OwnTask:
    """The task `module:Class` or `path/to/file.py:Class`; UserError if it cannot be made."""
    place, _, kind = name.rpartition(":")
    path = user_path(place).resolve() if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise UserError(f"task.name={name}: {path}: no such file")
    try:
        if path is not None:
            if str(path.parent) not in sys.path:  # reward workers import the module by name
                sys.path.insert(0, str(path.parent))
            place = path.stem
        elif "" not in sys.path:
            sys.path.insert(0, "")
        module = importlib.import_module(place)
        if path is not None and Path(module.__file__ or "").resolve() != path:
            raise UserError(f"task.name={name}: {place} is another module; rename the file")
        return OwnTask(name, getattr(module, kind)())
    except UserError:
        raise
    except Exception as error:  # code of the user
        raise UserError(
            f"task.name={name}: {type(error).__name__}: {error}; expected module:Class or"
            " path/to/file.py:Class"
        ) from error
