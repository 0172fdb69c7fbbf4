"""Tasks of the reasoning-gym package, an optional extra."""

from collections.abc import Mapping
from typing import Any

from ..common.errors import UserError
from .base import HELD_OUT_ONE_IN, Prompt, Split, Task, held_out, prompt_id

# Items that one index searches for one in its split: it fails with probability (7/8)^64 = 0.02 %.
_TRIES = 64
_SIZE = 2**31 - 1
# These data sets generate something for every item when they are created.
_LISTED, _LISTED_SIZE = ("acre", "gsm_symbolic", "list_functions"), 1 << 12
_SAMPLE = 8  # items that are checked for answers of several lines


class ReasoningGymTask(Task):
    """A procedural data set of reasoning-gym, such as `basic_arithmetic`, with its own scorer.

    If answers have one line, the first line of the response is scored and a line end stops
    generation. Otherwise the whole response is scored. Raises UserError without package or data
    set.
    """

    name = "reasoning_gym"
    is_message = True

    def __init__(self, dataset: str) -> None:
        if not dataset:
            raise UserError("task.path: empty; write, for example, task.path=basic_arithmetic")
        try:
            import reasoning_gym
        except ImportError:
            raise UserError(
                "task.name=reasoning_gym: the package is missing; pip install reasoning-gym"
            ) from None
        try:
            size = _LISTED_SIZE if dataset in _LISTED else _SIZE
            self.items = reasoning_gym.create_dataset(dataset, seed=0, size=size)
        except (ValueError, AssertionError) as error:
            raise UserError(f"task.path={dataset}: reasoning-gym rejects it ({error})") from None
        answers = [str(self.items[i]["answer"]) for i in range(_SAMPLE)]
        self.one_line = not any("\n" in answer for answer in answers)
        self.stop = ("\n",) if self.one_line else ()
        self.numbers: dict[str, list[int]] = {}  # item numbers of each split, if listed
        if dataset in _LISTED:
            held = [held_out(self.items[number]["question"]) for number in range(size)]
            for split in ("train", "eval"):
                self.numbers[split] = [n for n in range(size) if held[n] == (split == "eval")]

    def prompt(self, split: Split, index: int) -> Prompt:
        id = prompt_id(self.name, split, index)
        item = self._item(split, index)
        answer = "" if item["answer"] is None else str(item["answer"])  # some have several
        return Prompt(id, f"Question: {item['question']}\nAnswer:", answer)

    def size(self, split: Split) -> int | None:
        return len(self.numbers[split]) if self.numbers else None

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        _, split, index = prompt.id.split("/")
        item = self._item(split, int(index))  # the scorer needs the whole item
        answer = response.strip()
        if self.one_line:
            answer, newline, _ = response.lstrip().partition("\n")
            finished = finished or bool(newline)
        if not finished:
            return 0.0
        try:
            return float(self.items.score_answer(answer=answer.strip(), entry=item))
        except Exception:  # some scorers of the package raise on malformed answers
            return 0.0

    def demonstration(self, prompt: Prompt) -> str | None:
        end = "\n" if self.one_line else ""
        return f" {prompt.answer}{end}" if prompt.answer else None

    def _item(self, split: str, index: int) -> Mapping[str, Any]:
        if self.numbers:
            return self.items[self.numbers[split][index % len(self.numbers[split])]]
        for number in range(index * _TRIES, (index + 1) * _TRIES):
            item = self.items[number]
            if held_out(item["question"]) == (split == "eval"):
                return item
        raise UserError(
            f"task.path: no {split} problem in {_TRIES} consecutive items of reasoning-gym; the"
            f" data set has too few problems to hold out one in {HELD_OUT_ONE_IN}"
        )
