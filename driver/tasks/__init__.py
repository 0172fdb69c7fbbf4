"""Tasks: prompts and rewards. Each task is one class with a small interface."""

from __future__ import annotations

import difflib

from ..common.errors import UserError
from .base import Prompt, Split, Task

__all__ = ["TASK_NAMES", "Prompt", "Split", "Task", "check_task_name", "make_task"]

TASK_NAMES = (
    "sums", "puzzles", "questions", "addition", "multiplication", "calculator", "jsonl",
    "reasoning_gym",
)  # fmt: skip


def make_task(
    name: str,
    *,
    path: str = "",
    shots: int = 4,
    difficulty: int = 1,
    chat_template: str = "auto",
) -> Task:
    """Builds a task from the fields of `TaskConfig`: `make_task(**asdict(config.task))`.

    Args:
        name: one of `TASK_NAMES`, or a task of the user: `module:Class` or `path/to/file.py:Class`.
        path: jsonl: the file with question/answer lines; reasoning_gym: the name of the data set.
        shots: addition, multiplication, jsonl: number of worked examples before the question.
        difficulty: sums: the start has `difficulty` + 2 digits; puzzles, addition, multiplication:
            the terms have `difficulty` + 1 digits; calculator: they have `difficulty` digits.
        chat_template: ignored; see `driver.model.prompts.PromptEncoder`.

    Returns:
        The task. Fields that the task does not use are ignored.

    Raises:
        UserError: unknown name, unreadable file, missing package; the line says what to do.
    """
    check_task_name(name)
    # Each import is in its branch, so that a task's dependencies load only with it.
    if name == "sums":
        from .sums import SumsTask

        return SumsTask(difficulty)
    if name == "puzzles":
        from .puzzles import PuzzlesTask

        return PuzzlesTask(difficulty)
    if name == "questions":
        from .questions import QuestionsTask

        return QuestionsTask()
    if name in ("addition", "multiplication"):
        from .fewshot import FewShotTask

        return FewShotTask(name, difficulty + 1, shots)
    if name == "calculator":
        from .calculator import CalculatorTask

        return CalculatorTask(difficulty)
    if name == "jsonl":
        from .jsonl import JsonlTask

        return JsonlTask(path, shots)
    if name == "reasoning_gym":
        from .reasoning_gym import ReasoningGymTask

        return ReasoningGymTask(path)
    from .own import own_task

    return own_task(name)


def check_task_name(name: str) -> None:
    """Rejects a name that `make_task` would reject, without importing a task.

    Raises:
        UserError: it is neither in `TASK_NAMES` nor a task of the user.
    """
    if name not in TASK_NAMES and ":" not in name:
        near = difflib.get_close_matches(name, TASK_NAMES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        names = ", ".join(TASK_NAMES)
        raise UserError(f"task.name={name}: unknown task; {hint}expected one of {names}")
