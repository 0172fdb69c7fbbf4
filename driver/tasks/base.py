"""The interface of a task: prompts that are a pure function of their index, and a reward."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Split = Literal["train", "eval"]

# One problem in eight is held out. Its text decides, so that no problem is in both splits.
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Prompt:
    """One problem: `id` is unique in its split and the same in every run."""

    id: str
    text: str
    answer: str


class Task(Protocol):
    """A source of prompts and rewards."""

    name: str
    # Texts of one token that end a response, besides the model's end token; not used with a chat
    # template.
    stop: tuple[str, ...] = ()
    is_message: bool = False  # prompts are messages to a chat model, not texts to continue

    def prompt(self, split: Split, index: int) -> Prompt:
        """The prompt at `index` (0 or more) of `split`, the same in every run."""
        ...

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        """Reward of a response, a text without the end token.

        Not `finished`: the length limit cut it; an answer that may be incomplete does not count.
        """
        ...

    def states_answer(self, response: str) -> bool:
        """Whether a response states an answer, right or wrong."""
        return True

    def respond(self, prompt: Prompt, turn: int, text: str) -> str | None:
        """The answer of a tool to a turn, as plain text, or None if the turn ends the response.

        Turns count from 0; `text` has the stop text that ended it, but not the model's end token.
        Called in several threads. Equal arguments must get equal answers.
        """
        return None

    @property
    def has_turns(self) -> bool:
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
    """Whether a problem, identified by a text, belongs to the eval split of every run."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def prompt_id(task: str, split: Split, index: int) -> str:
    """The id of a prompt, "<task>/<split>/<index>"."""
    return f"{task}/{split}/{index}"


def may_go_on(rest: str) -> bool:
    """Whether a number in a cut response may be incomplete, by the rest of its line.

    Example:
        >>> may_go_on(""), may_go_on("."), may_go_on(" apples"), may_go_on("\\n")
        (True, True, False, False)
    """
    return "\n" not in rest and not rest.strip(" .,")
