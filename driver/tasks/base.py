"""The interface of a task: prompts that are a pure function of their index, and a reward."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Split = Literal["train", "eval"]

# One problem in eight is held out. The text decides, so that no problem is in both splits.
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Prompt:
    """One problem: `id` is unique in its split and the same in every run."""

    id: str
    text: str
    answer: str


class Task(Protocol):
    """A source of prompts and rewards.

    `stop` lists texts that end a response, in addition to the model's end token (few-shot prompts
    of a base model need one). Texts that are one token of the model become stop ids, unless prompts
    use a chat template. `is_message` means that prompts are messages to a chat model, not texts to
    continue.
    """

    name: str
    stop: tuple[str, ...] = ()
    is_message: bool = False

    def prompt(self, split: Split, index: int) -> Prompt:
        """The prompt at `index` (0 or more) of `split`, the same in every run."""
        ...

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        """Reward of a response.

        Args:
            prompt: the prompt of the response.
            response: its text, without the end token.
            finished: whether the model ended it. Otherwise the length limit cut it, and an answer
                that may be incomplete does not count.
        """
        ...

    def states_answer(self, response: str) -> bool:
        """Whether a response states an answer, right or wrong."""
        return True

    def respond(self, prompt: Prompt, turn: int, text: str) -> str | None:
        """The answer of a tool or an environment to a turn of the model; for several threads.

        The answer follows the turn as plain text, and the model goes on after it. Tokens are equal
        in each rollout only if equal arguments get equal answers.

        Args:
            prompt: the prompt of the response.
            turn: number of the turn, from 0.
            text: of the turn, with the stop text that ended it, without the model's end token.

        Returns:
            The answer, or None if the turn ends the response.
        """
        return None

    @property
    def has_turns(self) -> bool:
        """Whether the task answers turns of the model."""
        return type(self).respond is not Task.respond

    def demonstration(self, prompt: Prompt) -> str | Sequence[str] | None:
        """A worked response for the supervised warm-up, or None if the task has none.

        If the task answers turns, the texts of the model's turns; `respond` gives the answers.
        """
        return None

    def size(self, split: Split) -> int | None:
        """Number of different prompts, after which they repeat; None if they are generated."""
        return None

    def fingerprint(self) -> str:
        """A hash of the data of the prompts, or "" if they are generated."""
        return ""

    def place(self, split: Split, index: int) -> str:
        """File and line of a prompt, or "" if it is not from a file."""
        return ""


def held_out(problem: str) -> bool:
    """Whether a problem, identified by a text, belongs to the eval split.

    Returns:
        True for one text in `HELD_OUT_ONE_IN`, the same in every run and on every machine.
    """
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def prompt_id(task: str, split: Split, index: int) -> str:
    """The id of a prompt, "<task>/<split>/<index>".

    Raises:
        ValueError: unknown split or negative index.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split: expected train or eval, got {split!r}")
    if index < 0:
        raise ValueError(f"index: expected at least 0, got {index}")
    return f"{task}/{split}/{index}"


def may_go_on(rest: str) -> bool:
    """Whether a number at the end of a cut response may be incomplete.

    Args:
        rest: the rest of the response's line after the number, its line end included.

    Example:
        >>> may_go_on(""), may_go_on("."), may_go_on(" apples"), may_go_on("\\n")
        (True, True, False, False)
    """
    return "\n" not in rest and not rest.strip(" .,")


def generator(id: str) -> random.Random:
    """The random generator of one prompt; text seeds give the same numbers on every machine."""
    return random.Random(id)
