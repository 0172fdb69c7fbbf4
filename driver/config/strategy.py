"""Speculation strategies: parsed here once, carried everywhere as values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..common.errors import UserError

KINDS = ("off", "ngram", "learned", "hybrid", "oracle")  # oracle: a test's, not for a config
MAX_DEPTH = 16  # levels: an ancestor list has 16 slots
MAX_VERIFY = 128  # rows a request sends to the target in one pass, the root included
MAX_TOP_K = 128  # nodes kept per level, as the ops allow
MAX_DRAFTED = 255  # nodes drafted before selection: a node's index is one byte

_FORM = re.compile(r"(?P<kind>[a-z]+):(?P<numbers>\d+,\d+,\d+)", re.ASCII)
_REMEDY = (
    "write 'off', 'ngram:depth,top_k,num_verify', 'learned:depth,top_k,num_verify' or"
    " 'hybrid:depth,top_k,num_verify'"
)


@dataclass(frozen=True, order=True)
class Strategy:
    """How one pass over a batch drafts and verifies; `off` is plain decoding.

    `hybrid` drafts like `learned`, but a request whose last tokens stand elsewhere in sequences of
    its prompt gets what followed them there, as one chain of all rows that it may verify.

    Args:
        kind: "off", "ngram", "learned" or "hybrid".
        depth: levels drafted, at most 16 (0 for off).
        top_k: nodes kept per level (0 for off), at most 128; `depth * top_k` is at most 255.
        num_verify: rows sent to the target, root included, at most 128 (1 for off).

    Raises:
        UserError: a value outside these limits.

    Example:
        >>> Strategy.parse("learned:8,4,32")
        Strategy(kind='learned', depth=8, top_k=4, num_verify=32)
        >>> str(Strategy("ngram", 4, 1, 5))
        'ngram:4,1,5'
    """

    kind: str
    depth: int = 0
    top_k: int = 0
    num_verify: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"strategy kind {self.kind!r}: unknown; {_REMEDY}")
        if self.kind == "off":
            if (self.depth, self.top_k, self.num_verify) != (0, 0, 1):
                raise UserError("strategy off: takes no numbers; write 'off'")
            return
        _limit(self, "depth", self.depth, 1, MAX_DEPTH)
        _limit(self, "top_k", self.top_k, 1, MAX_TOP_K)
        _limit(self, "depth*top_k", self.depth * self.top_k, 1, MAX_DRAFTED)
        _limit(self, "num_verify", self.num_verify, 2, MAX_VERIFY)

    def __str__(self) -> str:
        if self.kind == "off":
            return "off"
        return f"{self.kind}:{self.depth},{self.top_k},{self.num_verify}"

    @property
    def needs_drafter(self) -> bool:
        """Whether the learned model drafts."""
        return self.kind in ("learned", "hybrid")

    @property
    def chain(self) -> int:
        """Levels of a chain that takes all rows but the root's."""
        return min(MAX_DEPTH, self.num_verify - 1)

    @property
    def levels(self) -> int:
        """Levels that a tree of it may have: a request emits at most one token more in a pass."""
        return max(self.depth, self.chain) if self.kind == "hybrid" else self.depth

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Reads one strategy as it is written in configs, logs and metrics.

        Args:
            text: "off" or "kind:depth,top_k,num_verify", the kind "ngram", "learned" or "hybrid".

        Returns:
            The strategy; `str()` of it gives the text back.

        Raises:
            UserError: malformed text or a value outside the limits.

        Example:
            >>> str(Strategy.parse("off"))
            'off'
        """
        text = text.strip()
        if text == "off":
            return cls("off")
        match = _FORM.fullmatch(text)
        if match is None or match["kind"] not in ("ngram", "learned", "hybrid"):
            raise UserError(f"strategy {text!r}: malformed; {_REMEDY}")
        return cls(match["kind"], *map(int, match["numbers"].split(",")))


OFF = Strategy("off")


def split_strategies(text: str) -> list[str]:
    """Cuts a list typed on the command line, whose items hold commas themselves.

    Args:
        text: items separated by commas, semicolons or spaces, with or without brackets and quotes.

    Returns:
        The items' texts, not yet parsed.

    Example:
        >>> split_strategies("[off, ngram:4,1,5, learned:8,4,32]")
        ['off', 'ngram:4,1,5', 'learned:8,4,32']
        >>> split_strategies("1=learned:8,4,32, 4=ngram:4,1,5")
        ['1=learned:8,4,32', '4=ngram:4,1,5']
    """
    bare = re.sub(r"[\[\]'\"]", "", text).strip(" ,;")
    # An item starts with a letter or a batch and "=", a number inside an item with a digit.
    return re.split(r"[,;\s]+(?=\d+=|[^\d,;\s])", bare) if bare else []


def parse_strategies(texts: Iterable[str]) -> tuple[Strategy, ...]:
    """Parses a list of strategies and refuses duplicates.

    Args:
        texts: one strategy each.

    Returns:
        The strategies in the given order.

    Raises:
        UserError: a malformed or repeated item.

    Example:
        >>> [s.kind for s in parse_strategies(["off", "ngram:4,1,5"])]
        ['off', 'ngram']
    """
    strategies = tuple(Strategy.parse(text) for text in texts)
    for position, strategy in enumerate(strategies):
        if strategy in strategies[:position]:
            raise UserError(f"strategy {str(strategy)!r}: listed twice; keep one")
    return strategies


def _limit(strategy: Strategy, name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UserError(f"strategy {strategy}: {name}={value}; wanted {low} to {high}")
