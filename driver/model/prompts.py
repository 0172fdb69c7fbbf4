"""Prompts as token ids: the only place where a prompt is tokenized."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from ..common.errors import UserError
from ..common.numbers import shown


class PromptEncoder:
    """Tokenizes prompts in the form that the model was made for.

    With the chat template a prompt is the message of a user, and the assistant's turn follows.
    Without it a prompt is plain text after the special tokens that the tokenizer itself puts in
    front, such as the begin token of Llama 3. Nothing is appended, because the response follows.
    `chat_template` is "true" (UserError if the tokenizer has none), "false", or "auto": where the
    tokenizer has one and the prompts are messages to a chat model, not texts to continue.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: str = "auto", is_message: bool = False
    ) -> None:
        has_template = tokenizer.chat_template is not None
        if chat_template == "true" and not has_template:
            raise UserError(
                "task.chat_template=true: the tokenizer has no chat template; use auto or false"
            )
        self.tokenizer = tokenizer
        self.uses_template = has_template and (
            chat_template == "true" or (chat_template == "auto" and is_message)
        )
        self._prefix = _prefix(tokenizer)

    def __call__(self, text: str) -> tuple[int, ...]:
        """The token ids of one prompt; UserError if the chat template cannot be applied."""
        return self.batch([text])[0]

    def batch(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The token ids of many prompts; faster than one at a time; for errors see `__call__`."""
        if not texts:
            return []
        prefix = () if self.uses_template else self._prefix
        if self.uses_template:
            texts = [self.render(self.message(text)) for text in texts]
        for text in texts:
            try:
                text.encode()  # the tokenizer's own error does not name the text
            except UnicodeEncodeError as error:
                raise UserError(f"prompt {shown(text)}: {error}; remove the character") from None
        rows = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [(*prefix, *row) for row in rows]

    @functools.cached_property
    def turns(self) -> TurnEncoder:
        return TurnEncoder(self)

    def message(self, text: str) -> list[dict[str, str]]:
        """A prompt as the conversation that the chat template is applied to."""
        return [{"role": "user", "content": text}]

    def describe(self) -> str:
        if self.uses_template:
            return "prompts: messages in the tokenizer's chat template"
        before = "".join(self.tokenizer.convert_ids_to_tokens(list(self._prefix)))
        line = f"prompts: plain text after {before}" if before else "prompts: plain text"
        if self.tokenizer.chat_template is not None:
            line += "; task.chat_template=true would use the tokenizer's chat template"
        return line

    def render(self, messages: list[dict[str, str]]) -> str:
        """A conversation in the chat template, followed by the start of the assistant's turn.

        Raises UserError if the template cannot be applied.
        """
        try:
            rendered: Any = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's author
            raise UserError(
                f"the tokenizer's chat template fails on a user's message"
                f" ({type(error).__name__}: {error}); set task.chat_template=false"
            ) from None
        return rendered


class TurnEncoder:
    """Token ids of the answers to a model's turns, and texts of the turns; for any thread.

    An answer is plain text. With the chat template it is the next message of the user, and the
    assistant's turn follows. Special tokens in an answer are encoded as the characters of their
    names, so that no answer can end a turn or begin a message.
    """

    def __init__(self, encode: PromptEncoder) -> None:
        # Its settings change with each answer, while another thread may encode prompts.
        self._tokenizer: Any = copy.deepcopy(encode.tokenizer)
        self._lock = threading.Lock()
        self._before: list[int] = []
        self._after: list[int] = []
        if encode.uses_template:
            self._before, self._after = self._frame(encode)

    def __call__(self, text: str) -> list[int]:
        return self.framed(self.plain(text))

    def plain(self, text: str) -> list[int]:
        """The token ids of a text in which special tokens have no meaning."""
        with self._lock:
            return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def framed(self, ids: Sequence[int], end: int | None = None) -> list[int]:
        """The token ids of an answer from those of its text, in the chat template if it is used.

        `end` is the end token of the turn before, which the template may put there too.
        """
        before = self._before[1:] if self._before[:1] == [end] else self._before
        return [*before, *ids, *self._after]

    def text(self, ids: Sequence[int]) -> str:
        with self._lock:
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _frame(self, encode: PromptEncoder) -> tuple[list[int], list[int]]:
        """What the chat template puts before and after an answer; UserError if that fails."""
        marks = "first-turn-of-the-model", "answer-to-that-turn"
        roles = "user", "assistant", "user"
        contents = "0", *marks
        rendered = encode.render(
            [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        )
        if any(rendered.count(mark) != 1 for mark in marks):
            raise UserError(
                "the tokenizer's chat template cannot continue a conversation; set"
                " task.chat_template=false"
            )
        before, after = rendered.partition(marks[0])[2].split(marks[1])
        # The model has ended its turn already.
        before = before.removeprefix(self._tokenizer.eos_token or "")
        ids = [self._tokenizer.encode(part, add_special_tokens=False) for part in (before, after)]
        return ids[0], ids[1]


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that the tokenizer itself puts in front of a text."""
    text, whole = tokenizer.encode("0", add_special_tokens=False), tokenizer.encode("0")
    starts = range(len(whole) - len(text), -1, -1)
    start = next((i for i in starts if whole[i : i + len(text)] == text), 0)
    return tuple(whole[:start])
