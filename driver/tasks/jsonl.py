"""Question/answer lines in the format of GSM8K: the final answer follows `####`."""

import functools
import hashlib
import json
import random
import warnings
from pathlib import Path
from typing import NamedTuple

from ..common.errors import SharedWarning, UserError
from ..common.numbers import shown
from ..common.storage import user_path
from .answers import MARK, equal_answers, final_answer
from .base import HELD_OUT_ONE_IN, Prompt, Split, Task, prompt_id


class Line(NamedTuple):
    """One problem of a file; `place` is file:line."""

    question: str
    answer: str
    place: str


class JsonlTask(Task):
    """Questions from a file; the reward compares final answers by `answers.equal_answers`.

    Each pass over the lines of a split has a different random order, the same in every run. `path`
    is a `.jsonl` file, of which every eighth line is held out, or a folder with `train.jsonl` and
    `test.jsonl`. The first `shots` training lines are worked examples before the question. Raises
    UserError if a file or a line is invalid.
    """

    name = "jsonl"
    stop: tuple[str, ...] = ("\n\n",)

    def __init__(self, path: str, shots: int = 4) -> None:
        if not path:
            raise UserError("task.path: empty; task.name=jsonl needs task.path=FILE.jsonl")
        place = user_path(path)
        if place.is_dir():
            train, held = read_jsonl(place / "train.jsonl"), read_jsonl(place / "test.jsonl")
        else:
            lines = read_jsonl(place)
            held = lines[HELD_OUT_ONE_IN - 1 :: HELD_OUT_ONE_IN]
            train = [x for i, x in enumerate(lines, 1) if i % HELD_OUT_ONE_IN]
            if not held:
                raise UserError(
                    f"{place}: {len(lines)} lines; expected at least {HELD_OUT_ONE_IN},"
                    " of which one is held out"
                )
        if len(train) <= shots:
            raise UserError(
                f"{place}: {len(train)} training lines; expected more than task.shots={shots}"
            )
        self.shots, self.is_message = train[:shots], not shots
        shown = {line.question for line in self.shots}
        held = [line for line in held if line.question not in shown]
        asked = shown | {line.question for line in held}
        kept = [line for line in train[shots:] if line.question not in asked]
        if not kept or not held:
            raise UserError(
                f"{place}: too few different questions for shots, training and evaluation"
            )
        if repeated := len(train) - shots - len(kept):
            warnings.warn(
                f"{place}: {repeated} training lines repeat a held-out question or a shot and are"
                " left out",
                SharedWarning,
                stacklevel=2,
            )
        self.lines = {"train": kept, "eval": held}

    def prompt(self, split: Split, index: int) -> Prompt:
        id = prompt_id(self.name, split, index)
        line = self._line(split, index)
        solved = [f"Question: {x.question}\nAnswer: {x.answer}\n\n" for x in self.shots]
        return Prompt(id, "".join(solved) + f"Question: {line.question}\nAnswer:", line.answer)

    def size(self, split: Split) -> int:
        return len(self.lines[split])

    def place(self, split: Split, index: int) -> str:
        return self._line(split, index).place

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for line in (*self.shots, *self.lines["train"], *self.lines["eval"]):
            digest.update(json.dumps([line.question, line.answer]).encode())
        return digest.hexdigest()

    def _line(self, split: Split, index: int) -> Line:
        lines = self.lines[split]
        epoch, at = divmod(index, len(lines))
        return lines[_order(split, epoch, len(lines))[at]]

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        gold, answer = final_answer(prompt.answer), final_answer(response, finished)
        return float(gold is not None and answer is not None and equal_answers(gold, answer))

    def states_answer(self, response: str) -> bool:
        return final_answer(response) is not None

    def demonstration(self, prompt: Prompt) -> str:
        return f" {prompt.answer}\n\n"


@functools.lru_cache(maxsize=8)
def _order(split: Split, epoch: int, count: int) -> list[int]:
    """The order of `count` lines in a pass over them."""
    order = list(range(count))
    random.Random(f"jsonl/{split}/{epoch}").shuffle(order)
    return order


def read_jsonl(path: Path) -> list[Line]:
    """The JSON objects of a file with `question` and `answer`; UserError names file and line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # some editors write a BOM
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return [_parse(f"{path}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()]


def _parse(place: str, line: str) -> Line:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{place}: not JSON; fix or remove the line") from None
    if not isinstance(item, dict):
        raise UserError(f"{place}: expected an object with question and answer, got {line[:40]!r}")
    for key in ("question", "answer"):
        if not isinstance(item.get(key), str) or not item[key].strip():
            raise UserError(
                f"{place}: no text under {key!r}, got {shown(item.get(key))}; fix or remove it"
            )
        if any("\ud800" <= letter <= "\udfff" for letter in item[key]):
            raise UserError(f"{place}: a lone surrogate in {key!r}; fix the line")
    if final_answer(item["answer"]) is None:
        raise UserError(
            f"{place}: 'answer' states no final answer; write it after {MARK}, as in '{MARK} 42',"
            " or in \\boxed{}, or remove the line"
        )
    return Line(item["question"], item["answer"], place)
