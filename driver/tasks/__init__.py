"""Tasks: prompts and rewards. Each task is one class with a small interface."""

from importlib import import_module
from typing import Any

from ..common.errors import UserError
from ..config.fields import nearest
from ..config.sections import TaskConfig
from .base import Prompt, Split, Task

__all__ = ["TASKS", "Prompt", "Split", "Task", "check_task_name", "make_task"]

# Name -> module, class, and the fields of `TaskConfig` that the class takes.
TASKS = {
    "sums": ("sums", "SumsTask", ["difficulty"]),
    "puzzles": ("puzzles", "PuzzlesTask", ["difficulty"]),
    "questions": ("questions", "QuestionsTask", []),
    "addition": ("fewshot", "FewShotTask", ["name", "difficulty", "shots"]),
    "multiplication": ("fewshot", "FewShotTask", ["name", "difficulty", "shots"]),
    "calculator": ("calculator", "CalculatorTask", ["difficulty"]),
    "jsonl": ("jsonl", "JsonlTask", ["path", "shots"]),
    "reasoning_gym": ("reasoning_gym", "ReasoningGymTask", ["path"]),
}


def make_task(name: str, **options: Any) -> Task:
    """The task of `TaskConfig(name, **options)`; UserError for a wrong name, file or package."""
    config = TaskConfig(name, **options)
    check_task_name(name)
    if name not in TASKS:
        from .own import own_task

        return own_task(name)
    module, kind, fields = TASKS[name]  # the dependencies of a task load only with it
    make = getattr(import_module(f".{module}", __package__), kind)
    return make(*(getattr(config, field) for field in fields))


def check_task_name(name: str) -> None:
    """Rejects a name that `make_task` would reject, without importing a task."""
    if name not in TASKS and ":" not in name:
        hint = nearest(name, [*TASKS, "a class of yours, FILE.py:Class"])
        raise UserError(f"task.name={name}: unknown task; {hint}")
