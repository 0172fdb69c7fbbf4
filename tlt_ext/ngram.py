"""The model-free drafter: continuations of earlier occurrences of the last tokens."""

from tlt_ext import _C
from tlt_ext.common import Array, current_stream, seed_word
from tlt_ext.groups import Nodes, Sampling, TokenTable


def ngram_propose(
    table: TokenTable,
    nodes: Nodes,
    sampling: Sampling,
    *,
    context_len: Array,
    status: Array,
    seed: int,
    depth: int,
    top_k: int,
    max_ngram: int = 8,
    min_ngram: int = 1,
    keep_unmatched: bool = False,
    stream: int | None = None,
) -> None:
    """Drafts a tree of the tokens that followed the request's last tokens elsewhere in its group.

    The token table is the index: nothing is built or kept between calls. A *match* is a position in
    a sequence of the group at which the last `min_ngram` or more tokens equal those of the request,
    and which is not the end of the sequence. Its length is the number of equal tokens, at most
    `max_ngram`. The 32 best matches are used: longest first, then the earlier sequence in
    `group_slots`, then the later position. A match of n tokens has weight 4^(n - 1).

    The continuations of the matches form a trie; the count of a node is the sum of the weights of
    the matches that pass through it. The children of a node are the best `top_k` by log count + the
    target's noise (T = 0: by count; ties: lower id). Per level the `top_k` best nodes by score are
    kept (ties: parent order, then rank order). The score of a child is that of its parent plus
    log(count / (total + 1)), where total is the count of all children of the parent. A negative
    token ends a continuation.

    Args:
        table: all fields. Rows of tokens are read 16 bytes at once where L is a multiple of 4. G at
            most 128, G * L at most 2^28. A slot of -1 makes the request inert: nodes.count 0.
        nodes: written; C at least 1 + depth * min(top_k, 32).
        sampling: temperature and request.
        context_len: [B] int32, position of the root, which is the request's last known token.
        status: [B] int32, bits are ORed in. BAD_LENGTH: a slot or length outside the table; that
            sequence is left out, and the request is inert if it is its own.
        seed: the run's seed.
        depth: levels, 1 to 16.
        top_k: nodes kept per level, 1 to 128 (there are at most 32).
        max_ngram: longest suffix that is compared, 1 to 8.
        min_ngram: shortest match that counts, 1 to max_ngram.
        keep_unmatched: keep the nodes in the store (of another drafter) for a request that has no
            match or is inert. False: it gets only its root, or count 0 if it is inert.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        In the other sequence 4 followed 2, 3: the child of the root 3 is 4.

        >>> import numpy as np
        >>> token, parent, depth = np.zeros((3, 1, 2), np.int32)
        >>> score, count = np.zeros((1, 2), np.float32), np.zeros(1, np.int32)
        >>> table = TokenTable(tokens=np.int32([[1, 2, 3, 4], [9, 2, 3, 0]]), slot=np.int32([1]),
        ...                    length=np.int32([4, 3]), group_slots=np.int32([[1, 0]]))
        >>> ngram_propose(table, Nodes(token, parent, score, depth, count),
        ...               Sampling(temperature=np.float32([0]), request=np.int64([0])),
        ...               context_len=np.int32([2]), status=np.zeros(1, np.int32), seed=0, depth=1,
        ...               top_k=1)
        >>> print(token, parent, score.round(2))   # log(4 / 5)
        [[3 4]] [[-1  0]] [[ 0.   -0.22]]

    Source: prompt lookup decoding, Saxena (2023); suffix trees over earlier rollouts, Oliaro et
        al., "SuffixDecoding" (2024); weights and noise are this project's.
    Reference: `tests/reference.py::ngram_propose`.
    """
    _C.ngram_propose(
        table,
        nodes,
        sampling,
        context_len,
        status,
        seed_word(seed),
        depth,
        top_k,
        max_ngram,
        min_ngram,
        keep_unmatched,
        current_stream(table.tokens, stream),
    )
