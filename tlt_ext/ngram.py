"""The model-free drafter: what followed the same tokens before."""

from collections.abc import Sequence

from tlt_ext import _C
from tlt_ext.common import Array


class NgramIndex:
    """Suffix index over the tokens of many sequences, which proposes continuations as a draft tree.

    Sequences of one group (a prompt's sibling responses, and those of earlier epochs) see each
    other's tokens and nobody else's; an n-gram never spans two sequences. Adding a token costs
    O(max_order). The pool never grows past `capacity`: when it is full, dropped groups are cleared
    out and then the least recently extended sequences are forgotten, until a quarter is free. A
    sequence that alone fills it is forgotten too. A forgotten sequence takes no more tokens and
    proposes nothing. All calls come from one thread.

    Args:
        max_order: longest suffix that is looked up, 1 to 16.
        capacity: most tokens held, up to 2^30; about 88 bytes a token at max_order 6.

    Raises:
        ValueError: an argument is out of range, or a token is negative.

    Example:
        >>> index = NgramIndex()
        >>> index.start(0, [1, 2, 3, 4])
        0
        >>> index.start(0, [9, 2, 3])    # proposes 4: it followed 2, 3
        1

    Source: prompt lookup decoding, Saxena (2023); suffix trees over earlier rollouts, Oliaro et
        al., "SuffixDecoding" (2024).
    Reference: `tests/reference.py::NgramIndex`.
    """

    def __init__(self, max_order: int = 6, capacity: int = 1 << 22) -> None:
        self._index = _C.NgramIndex(max_order, capacity)

    @property
    def num_tokens(self) -> int:
        """Tokens held, of sequences that are neither dropped nor forgotten."""
        return self._index.num_tokens

    def start(self, group: int, tokens: Sequence[int]) -> int:
        """Begins a sequence with these tokens (may be empty) and returns its handle."""
        return self._index.start(group, tokens)

    def extend(self, handle: int, tokens: Sequence[int]) -> None:
        """Appends tokens to a sequence; does nothing if it was dropped or forgotten."""
        self._index.extend(handle, tokens)

    def drop(self, group: int) -> None:
        """Forgets every sequence of a group; an unknown group is fine."""
        self._index.drop(group)

    def clear(self) -> None:
        """Forgets everything."""
        self._index.clear()

    def propose(
        self,
        handles: Array,
        node_token: Array,
        node_parent: Array,
        node_score: Array,
        node_depth: Array,
        node_count: Array,
        temperature: Array,
        request: Array,
        root_position: Array,
        *,
        seed: int,
        depth: int,
        top_k: int,
        min_order: int = 1,
    ) -> None:
        """Fills the node store with what followed the longest known suffix of each sequence.

        The suffix has max_order to `min_order` tokens; of each order at most the 64 most recent
        places are looked at, and the longest order with a continuation is taken. Children of a node
        are the tokens that followed there, the best `top_k` by log count + the target's noise
        (T = 0: by count; ties: lower id). Per level the `top_k` best nodes by score are kept (ties:
        parent order, then rank order). A child's score is its parent's plus
        log(count / (total + 1)).

        Args:
            handles: [B] int64 from `start`; -1 or a forgotten sequence gives the root alone.
            node_token, node_parent, node_depth: [B, C] int32; node_score: [B, C] float32;
                node_count: [B] int32; all out, C at least 1 + depth * top_k. The root's token is
                the sequence's last; without a sequence it is left as the caller wrote it.
            temperature: [B] float32.
            request: [B] int64, noise key of each request.
            root_position: [B] int32, absolute position of the root.
            seed: the run's seed.
            depth: levels, 1 to 16.
            top_k: nodes kept per level, 1 to 128.
            min_order: shortest suffix that counts, 1 to max_order.

        Raises:
            TypeError: a dtype is wrong.
            ValueError: a device, layout, shape or value is wrong, or a handle was never given out.
        """
        self._index.propose(
            handles,
            node_token,
            node_parent,
            node_score,
            node_depth,
            node_count,
            temperature,
            request,
            root_position,
            seed,
            depth,
            top_k,
            min_order,
        )
