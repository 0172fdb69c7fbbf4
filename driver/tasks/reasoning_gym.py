"""Tasks of the reasoning-gym package, an optional extra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.errors import UserError
from .base import HELD_OUT_ONE_IN, Prompt, Split, Task, held_out, prompt_id

# Items that one index may choose from until one is in its split: (7/8)^64 leaves 0.02 % without.
_TRIES = 64
_SIZE = 2**31 - 1


class ReasoningGymTask(Task):
    """A procedural data set of reasoning-gym; its own scorer judges the response's first line.

    Args:
        dataset: a data set's name, for example `basic_arithmetic`.

    Raises:
        UserError: the package is missing, or it knows no such data set.

    Example:
        >>> ReasoningGymTask("basic_arithmetic").prompt("train", 0).id  # doctest: +SKIP
        'reasoning_gym/train/0'
    """

    name = "reasoning_gym"
    stop: tuple[str, ...] = ("\n",)
    is_message = True

    def __init__(self, dataset: str) -> None:
        if not dataset:
            raise UserError("task.path: empty; write, for example, task.path=basic_arithmetic")
        try:
            import reasoning_gym
        except ImportError:
            raise UserError(
                "task.name=reasoning_gym: the package is missing; pip install 'tlt-ext[gym]'"
            ) from None
        try:
            self.items = reasoning_gym.create_dataset(dataset, seed=0, size=_SIZE)
        except (ValueError, AssertionError) as error:
            raise UserError(f"task.path={dataset}: reasoning-gym refuses it ({error})") from None

    def prompt(self, split: Split, index: int) -> Prompt:
        id = prompt_id(self.name, split, index)
        item = self._item(split, index)
        return Prompt(id, f"Question: {item['question']}\nAnswer:", str(item["answer"]))

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        _, split, index = prompt.id.split("/")
        item = self._item(split, int(index))  # the scorer needs the whole item
        line, newline, _ = response.lstrip().partition("\n")
        if not finished and not newline:
            return 0.0
        line = line.strip()
        return float(self.items.score_answer(answer=line, entry=item))

    def demonstration(self, prompt: Prompt) -> str | None:
        return f" {prompt.answer}\n"

    def _item(self, split: str, index: int) -> Mapping[str, Any]:
        for number in range(index * _TRIES, (index + 1) * _TRIES):
            item = self.items[number]
            if held_out(item["question"]) == (split == "eval"):
                return item
        raise UserError(
            f"task.path: {_TRIES} items of reasoning-gym in a row hold no {split} problem; the"
            f" data set has too few problems to hold out one in {HELD_OUT_ONE_IN}"
        )
