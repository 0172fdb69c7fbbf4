"""Response lengths of each prompt, from its last use."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import fmean

KEPT = 1 << 16  # prompts remembered, about 10 MB


class PromptLengths:
    """Mean response length by prompt, for the most recent prompts.

    The key is a hash of the text: a prompt's id changes with each epoch, and all ranks must get the
    same key. A resumed run starts empty and splits its first prompts by number alone; the rank of a
    prompt changes no token. Beyond `kept` prompts the least recently used one is dropped.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self._means: dict[bytes, float] = {}  # least recently used first

    def note(self, text: str, lengths: Sequence[int]) -> None:
        """Records the response lengths of a prompt."""
        self._means.pop(_key(text), None)
        self._means[_key(text)] = fmean(lengths)
        if len(self._means) > self.kept:
            del self._means[next(iter(self._means))]

    def expected(self, texts: Sequence[str]) -> list[float]:
        """The expected length of each prompt; the mean of all prompts for an unknown one."""
        usual = fmean(self._means.values()) if self._means else 1.0
        return [self._means.get(_key(text), usual) for text in texts]


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
