"""Draft trees: expand a node store level by level, then select the nodes to verify."""

from tlt_ext import _C
from tlt_ext.common import Array, current_stream, seed_word
from tlt_ext.groups import Frontier, Nodes, Sampling, Tree


def tree_capacity(depth: int, top_k: int) -> int:
    """Capacity of a node store for `depth` levels of `top_k` kept nodes.

    Example:
        >>> tree_capacity(3, 2)   # root, 2 children, then twice 2 * 2
        11
    """
    return 1 + top_k + max(0, depth - 1) * top_k * top_k


def expand_tree(
    draft_logits: Array,
    nodes: Nodes,
    frontier: Frontier,
    next_frontier: Frontier,
    sampling: Sampling,
    *,
    root_position: Array,
    status: Array,
    seed: int,
    vocab_size: int,
    slot_base: int = 0,
    d2t: Array | None = None,
    score_temperature: float = 0.0,
    stream: int | None = None,
) -> None:
    """Appends the best children of every frontier node and selects the next frontier among them.

    Children are the top K of `draft logit / T + noise`. The noise is that of the target for the
    token at that position (T = 0: by logit), so a good draft often contains the token that the
    target samples. Ties go to the lower target id. The score of a child is that of its parent plus
    its log-softmax over the draft vocabulary. With F = K = 1, a chain, nothing is ranked, and the
    score of a child is that of its parent.

    Args:
        draft_logits: [B * F, Vd], float32, float16 or bfloat16, Vd at most 2.8 million; row
            b * F + f belongs to frontier.node[b, f]; rows may be strided.
        nodes: new nodes are appended, in frontier order, then in rank order.
        frontier: node and ancestors; `next_frontier` of the previous level.
        next_frontier: of width K, 1 to 128, written: the K new nodes of highest score (ties: lower
            index). ancestors: those of the parent, then the parent's own slot, `slot_base + f`;
            none in the first level. F * K is at most 8,192 on a GPU.
        sampling: temperature and request.
        root_position: [B] int32, absolute position of the root.
        status: [B] int32. NAN_DRAFT: a NaN or +inf logit (never a child); BAD_TOKEN: a d2t entry
            outside the vocabulary (never a child); BAD_TREE: a frontier entry that is not a node
            of depth 0 to 15 (inert); BAD_LENGTH: nodes.count is below 1 or above C - F * K (the
            request is inert).
        seed: the run's seed.
        vocab_size: the target's true vocabulary; without d2t, columns from there on are not read.
        slot_base: in-flight drafter slot of frontier row 0; slots are at most 255.
        d2t: [Vd] int32, target id of each draft id; None = the same ids.
        score_temperature: 0: score by log-softmax(draft logits / T); else by log-softmax of
            (draft logit / T + noise) / score_temperature, 1e-6 to 1e6, which includes the noise in
            the rank.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong, or C < 1 + F * K.

    Example:
        The first level below the root, token 5:

        >>> import numpy as np
        >>> token, parent, depth = np.int32([[[5, 0, 0]], [[-1, 0, 0]], [[0, 0, 0]]])
        >>> score, count = np.zeros((1, 3), np.float32), np.int32([1])
        >>> node, row = np.zeros((2, 1, 2), np.int32)
        >>> chosen = Frontier(node, row, ancestors=np.zeros((1, 2, 16), np.uint8))
        >>> expand_tree(np.float32([[1, 3, 2]]), Nodes(token, parent, score, depth, count),
        ...             Frontier(np.int32([[0]])), chosen,
        ...             Sampling(temperature=np.float32([0]), request=np.int64([0])),
        ...             root_position=np.int32([4]), status=np.zeros(1, np.int32), seed=0,
        ...             vocab_size=3)
        >>> print(token, parent, score.round(2), node)
        [[5 1 2]] [[-1  0  0]] [[ 0.   -0.41 -1.41]] [[1 2]]

    Source: Gumbel-top-k sampling, Kool et al. (2019); dynamic draft trees, Li et al., "EAGLE-2"
        (2024); the shared noise is this project's.
    Reference: `tests/reference.py::expand_tree`.
    """
    _C.expand_tree(
        draft_logits,
        nodes,
        frontier,
        next_frontier,
        sampling,
        root_position,
        status,
        seed_word(seed),
        vocab_size,
        slot_base,
        d2t,
        score_temperature,
        current_stream(draft_logits, stream),
    )


def select_nodes(
    nodes: Nodes,
    tree: Tree,
    *,
    root_position: Array,
    position: Array,
    row_start: Array,
    source: Array,
    num_verify: int,
    stream: int | None = None,
) -> None:
    """Keeps the root and the best `num_verify - 1` connected nodes, as packed rows for the target.

    Nodes are taken by (score descending, index ascending), each only after its parent. As scores
    fall along a path, that is the best connected tree. Of siblings with the same token only the
    first is taken. Nodes with a NaN score, a parent that is not an earlier node, or a depth that is
    not that of the parent plus one are left out. Rows are ordered by (depth, index), so parents
    come first.

    Args:
        nodes: C at most 16,384 on a GPU. A count of 0 (or past C) gives the request no rows.
        tree: of B * num_verify rows, written.
        root_position: [B] int32, absolute position of the root.
        position: [B * num_verify] int32 out: root_position + depth.
        row_start: [B + 1] int32 out, as in `Rows`. Rows past row_start[B] of the other outputs stay
            as they were.
        source: [B * num_verify] int32 out, store index of each row; -1 past row_start[B].
        num_verify: most rows a request, 1 to 128.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        The best three of nodes 0 (the root), 1, 2 and 3 (a child of 1):

        >>> import numpy as np
        >>> tokens, parents, position, source = np.zeros((4, 3), np.int32)
        >>> row_start = np.zeros(2, np.int32)
        >>> nodes = Nodes(token=np.int32([[5, 1, 2, 6]]), parent=np.int32([[-1, 0, 0, 1]]),
        ...               score=np.float32([[0, -1, -3, -2]]), depth=np.int32([[0, 1, 1, 2]]),
        ...               count=np.int32([4]))
        >>> select_nodes(nodes, Tree(tokens, parents, ancestors=np.zeros((3, 16), np.uint8)),
        ...              root_position=np.int32([4]), position=position, row_start=row_start,
        ...              source=source, num_verify=3)
        >>> print(source, tokens, parents, position, row_start)
        [0 1 3] [5 1 6] [-1  0  1] [4 5 6] [0 3]

    Source: Li et al., "EAGLE-2" (2024), re-ranking.
    Reference: `tests/reference.py::select_nodes`.
    """
    _C.select_nodes(
        nodes,
        tree,
        root_position,
        position,
        row_start,
        source,
        num_verify,
        current_stream(nodes.token, stream),
    )
