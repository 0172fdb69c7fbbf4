"""The model-free drafter: what followed the same tokens before."""

from collections.abc import Sequence

from tlt_ext import _C
from tlt_ext.common import Array, current_stream


def ngram_propose(
    tokens: Array,
    length: Array,
    group_slots: Array,
    slot: Array,
    context_len: Array,
    node_token: Array,
    node_parent: Array,
    node_score: Array,
    node_depth: Array,
    node_count: Array,
    temperature: Array,
    request: Array,
    status: Array,
    *,
    seed: int,
    depth: int,
    top_k: int,
    max_ngram: int = 8,
    min_ngram: int = 1,
    stream: int | None = None,
) -> None:
    """Drafts a tree of what followed the request's last tokens elsewhere in its group.

    The token store is the index: nothing is built or kept between calls. A *match* is a place in a
    sequence of the group whose tokens, counted back from it, equal the request's last `min_ngram`
    or more, and which has a token after it; its length is how many agree, `max_ngram` at most. The
    32 best matches are followed: longest first, then the earlier sequence in `group_slots`, then
    the later place. A match of n tokens counts 4^(n - 1).

    What follows the matches forms a trie; a node's count is the sum over the matches that pass
    through it. Children of a node are the best `top_k` by log count + the target's noise (T = 0: by
    count; ties: lower id), and per level the `top_k` best nodes by score are kept (ties: parent
    order, then rank order). A child's score is its parent's plus log(count / (total + 1)), where
    total is the count of all its siblings with it. A negative token ends a continuation.

    Args:
        tokens: [slots, L] int32, token at each absolute position, the prompt included. Rows are
            read 16 bytes at once where L is a multiple of 4.
        length: [slots] int32, how many tokens of each row are known. That of a request's own row
            is not read: it is context_len + 1.
        group_slots: [B, G] int32, rows that request b looks at, its own among them; -1 = none.
            G at most 128, G * L at most 2^28.
        slot: [B] int32, the request's own row; -1 makes the request inert: node_count 0.
        context_len: [B] int32, position of the root, which is the request's last known token.
        node_token, node_parent, node_depth: [B, C] int32; node_score: [B, C] float32; node_count:
            [B] int32; all out, C at least 1 + depth * min(top_k, 32).
        temperature: [B] float32.
        request: [B] int64, noise key of each request.
        status: [B] int32, bits are ORed in. BAD_LENGTH: a slot or length outside the store; that
            sequence is left out, and a request whose own is so is inert.
        seed: the run's seed.
        depth: levels, 1 to 16.
        top_k: nodes kept per level, 1 to 128 (of which 32 can be).
        max_ngram: longest suffix that is compared, 1 to 8.
        min_ngram: shortest match that counts, 1 to max_ngram.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        >>> # tokens [[1, 2, 3, 4], [9, 2, 3, 0]], length [4, 3], group_slots [[1, 0]], slot [1],
        >>> # context_len [2]: 2, 3 was followed by 4, so nodes are 3 (the root) and 4, whose score
        >>> # is log(4 / 5)

    Source: prompt lookup decoding, Saxena (2023); suffix trees over earlier rollouts, Oliaro et
        al., "SuffixDecoding" (2024); weights and noise are this project's.
    Reference: `tests/reference.py::ngram_propose`.
    """
    _C.ngram_propose(
        tokens,
        length,
        group_slots,
        slot,
        context_len,
        node_token,
        node_parent,
        node_score,
        node_depth,
        node_count,
        temperature,
        request,
        status,
        seed,
        depth,
        top_k,
        max_ngram,
        min_ngram,
        current_stream(tokens, stream),
    )


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
