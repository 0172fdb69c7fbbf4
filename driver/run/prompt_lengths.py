"""How long the responses to a prompt were when it last came up."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import fmean

KEPT = 1 << 16  # prompts remembered, about 10 MB


class PromptLengths:
    """Mean response length by prompt, of the prompts that came up last.

    Keyed by a hash of the text: a prompt's id is new in each epoch, and the hash is the same on
    every rank, which all have to expect the same. A resumed run begins without: it splits its first
    prompts by number alone, and which rank serves a prompt changes no token.

    Args:
        kept: prompts remembered; the one longest not seen gives way.

    Example:
        >>> lengths = PromptLengths()
        >>> lengths.note("1+1=", [3, 5])
        >>> lengths.expected(["1+1=", "2+2="])
        [4.0, 4.0]
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self._means: dict[bytes, float] = {}  # longest not seen first

    def note(self, text: str, lengths: Sequence[int]) -> None:
        """Remembers the responses to a prompt."""
        self._means.pop(_key(text), None)
        self._means[_key(text)] = fmean(lengths)
        if len(self._means) > self.kept:
            del self._means[next(iter(self._means))]

    def expected(self, texts: Sequence[str]) -> list[float]:
        """Of each prompt; the mean of all where it is not known."""
        usual = fmean(self._means.values()) if self._means else 1.0
        return [self._means.get(_key(text), usual) for text in texts]


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
