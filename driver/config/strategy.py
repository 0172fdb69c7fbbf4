"""Speculation strategies and their kinds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tlt_ext.limits import MAX_DEPTH, MAX_DRAFT_SLOTS, MAX_TOP_K, MAX_TREE_ROWS

from ..common.errors import UserError

SHARED, REJECTION = "shared", "rejection"  # words of engine.verify
MAX_DRAFTED = MAX_DRAFT_SLOTS - 1  # nodes drafted before selection, without the root


@dataclass(frozen=True)
class Kind:
    """One way to draft. `driver/rollout/proposers.py` has a proposer for each."""

    name: str  # as configs, logs and metrics write it
    drafts: bool = True  # its strategies draft, and have numbers
    drafter: bool = False  # the trained drafter proposes
    lookup: bool = False  # tokens that followed the last ones in other rows are proposed
    launches: int = 0  # of kernels for that lookup in a pass, at most
    in_config: bool = True  # a configuration may name it
    colors: tuple[str, str] = ("#c9ccd1", "#c9ccd1")  # in charts: smallest and largest tree

    @property
    def form(self) -> str:
        """How a strategy of the kind is written."""
        return f"{self.name}:depth,top_k,num_verify" if self.drafts else self.name


# In the order of legends and reports.
PLAIN = Kind("off", drafts=False)
NGRAM = Kind("ngram", lookup=True, launches=7, colors=("#f2c48d", "#b3540c"))
LEARNED = Kind("learned", drafter=True, colors=("#9cc9ea", "#2459a8"))
# Its lookup replaces trees of the drafter, so it shares the launches that select nodes.
HYBRID = Kind("hybrid", drafter=True, lookup=True, launches=4, colors=("#b5d8b9", "#2c6e3f"))
ORACLE = Kind("oracle", in_config=False)  # knows the answers, for tests of token identity
KINDS = {kind.name: kind for kind in (PLAIN, NGRAM, LEARNED, HYBRID, ORACLE)}

_FORM = re.compile(r"(?P<kind>[a-z]+):(?P<numbers>\d+,\d+,\d+)", re.ASCII)
_FORMS = [repr(kind.form) for kind in KINDS.values() if kind.in_config]
_REMEDY = f"write {', '.join(_FORMS[:-1])} or {_FORMS[-1]}"


@dataclass(frozen=True, order=True)
class Strategy:
    """How one pass over a batch drafts and verifies; `off` is plain decoding.

    `hybrid` drafts like `learned`. If the last tokens of a request occur elsewhere in rows of its
    prompt, its tree is replaced by what followed them there, one chain of `num_verify` rows.
    Numbers outside the limits, such as `depth * top_k` above 255, raise a UserError.

    Example:
        >>> Strategy.parse("learned:8,4,32")
        Strategy(kind='learned', depth=8, top_k=4, num_verify=32)
        >>> str(Strategy("ngram", 4, 1, 5))
        'ngram:4,1,5'
    """

    kind: str  # name of one of `KINDS`
    depth: int = 0  # levels drafted, at most 16 (0 for off)
    top_k: int = 0  # nodes kept per level, at most 128 (0 for off)
    num_verify: int = 1  # rows sent to the target, root included, at most 128 (1 for off)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"strategy kind {self.kind!r}: unknown; {_REMEDY}")
        if not self.drafting.drafts:
            if (self.depth, self.top_k, self.num_verify) != (0, 0, 1):
                raise UserError(f"strategy {self.kind}: takes no numbers; write {self.kind!r}")
            return
        _limit(self, "depth", self.depth, 1, MAX_DEPTH)
        _limit(self, "top_k", self.top_k, 1, MAX_TOP_K)
        _limit(self, "depth*top_k", self.depth * self.top_k, 1, MAX_DRAFTED)
        _limit(self, "num_verify", self.num_verify, 2, MAX_TREE_ROWS)

    def __str__(self) -> str:
        if not self.drafting.drafts:
            return self.kind
        return f"{self.kind}:{self.depth},{self.top_k},{self.num_verify}"

    @property
    def drafting(self) -> Kind:
        return KINDS[self.kind]

    @property
    def needs_drafter(self) -> bool:
        return self.drafting.drafter

    @property
    def is_chain(self) -> bool:
        """Whether one source drafts one token a level and all are verified."""
        mixed = self.drafting.drafter and self.drafting.lookup
        return self.top_k == 1 and self.num_verify == self.depth + 1 and not mixed

    @property
    def chain(self) -> int:
        """Levels of a chain that takes all rows but the root's."""
        return min(MAX_DEPTH, self.num_verify - 1)

    @property
    def levels(self) -> int:
        """Levels of its deepest tree; a request emits at most one token more in a pass."""
        kind = self.drafting  # of both sources, the lookup drafts a chain
        return max(self.depth, self.chain) if kind.drafter and kind.lookup else self.depth

    @classmethod
    def parse(cls, text: str, *others: Kind) -> Strategy:
        """Reads "off" or "kind:depth,top_k,num_verify"; `others` are further kinds allowed."""
        text = text.strip()
        if text == PLAIN.name:
            return cls(text)
        match = _FORM.fullmatch(text)
        allowed = {k.name for k in KINDS.values() if k.drafts and (k.in_config or k in others)}
        if match is None or match["kind"] not in allowed:
            raise UserError(f"strategy {text!r}: malformed; {_REMEDY}")
        return cls(match["kind"], *map(int, match["numbers"].split(",")))


OFF = Strategy(PLAIN.name)


def split_strategies(text: str) -> list[str]:
    """Splits a list whose items contain commas themselves, with or without brackets and quotes.

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
    """Parses strategies; raises UserError for a malformed or repeated one."""
    strategies = tuple(Strategy.parse(text) for text in texts)
    for position, strategy in enumerate(strategies):
        if strategy in strategies[:position]:
            raise UserError(f"strategy {str(strategy)!r}: listed twice; keep one")
    return strategies


def _limit(strategy: Strategy, name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UserError(f"strategy {strategy}: {name}={value}; wanted {low} to {high}")
