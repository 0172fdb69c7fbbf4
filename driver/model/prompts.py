"""Prompts as token ids: the only place where a prompt is tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from ..common.errors import UserError


class PromptEncoder:
    """Tokenizes prompts in the form that the model was made for.

    With the chat template a prompt is the message of a user, and the assistant's turn follows.
    Without it a prompt is plain text after the special tokens that the tokenizer itself puts in
    front, such as the begin token of Llama 3. Nothing is appended, because the response follows.

    Args:
        tokenizer: of the policy.
        chat_template: "true", "false", or "auto": the template where the tokenizer has one and
            `is_message` holds.
        is_message: whether the prompts are messages to a chat model rather than texts to continue.

    Raises:
        UserError: `chat_template` is "true" and the tokenizer has none.

    Example:
        >>> encode = PromptEncoder(tokenizer)           # doctest: +SKIP
        >>> encode("12+3=")                             # doctest: +SKIP
        (1, 4, 5, 12, 6, 13)
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
        """The token ids of one prompt.

        Raises:
            UserError: the chat template cannot be applied.
        """
        return self.batch([text])[0]

    def batch(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The token ids of many prompts; faster than one at a time.

        Raises:
            UserError: the chat template cannot be applied.
        """
        if not texts:
            return []
        prefix = () if self.uses_template else self._prefix
        if self.uses_template:
            texts = [self._in_template(text) for text in texts]
        rows = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [(*prefix, *row) for row in rows]

    def message(self, text: str) -> list[dict[str, str]]:
        """A prompt as the conversation that the chat template is applied to."""
        return [{"role": "user", "content": text}]

    def describe(self) -> str:
        """One line about the form of the prompts."""
        if self.uses_template:
            return "prompts: messages in the tokenizer's chat template"
        before = "".join(self.tokenizer.convert_ids_to_tokens(list(self._prefix)))
        line = f"prompts: plain text after {before}" if before else "prompts: plain text"
        if self.tokenizer.chat_template is not None:
            line += "; task.chat_template=true would use the tokenizer's chat template"
        return line

    def _in_template(self, text: str) -> str:
        try:
            rendered: Any = self.tokenizer.apply_chat_template(
                self.message(text), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's author
            raise UserError(
                f"the tokenizer's chat template fails on a user's message"
                f" ({type(error).__name__}: {error}); set task.chat_template=false"
            ) from None
        return rendered


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that the tokenizer itself puts in front of a text."""
    text, whole = tokenizer.encode("0", add_special_tokens=False), tokenizer.encode("0")
    starts = range(len(whole) - len(text), -1, -1)
    start = next((i for i in starts if whole[i : i + len(text)] == text), 0)
    return tuple(whole[:start])
