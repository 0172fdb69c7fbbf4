"""Draft trees: grow a node store level by level, then keep the nodes worth verifying.

A node store is five arrays, `node_token`, `node_parent`, `node_score`, `node_depth` [B, C] and
`node_count` [B]. The caller writes entry 0, the root (the last emitted token; parent -1, score 0,
depth 0), and sets the count to 1; `expand_tree` appends. Entries past the count are scratch.
"""

from tlt_ext import _C
from tlt_ext.common import Array, current_stream


def tree_capacity(depth: int, top_k: int) -> int:
    """How many nodes a store needs for `depth` levels of `top_k` kept nodes.

    Example:
        >>> tree_capacity(3, 2)   # root, 2 children, then twice 2 * 2
        11
    """
    return 1 + top_k + max(0, depth - 1) * top_k * top_k


def expand_tree(
    draft_logits: Array,
    frontier: Array,
    node_token: Array,
    node_parent: Array,
    node_score: Array,
    node_depth: Array,
    node_count: Array,
    next_frontier: Array,
    next_row: Array,
    next_ancestors: Array,
    temperature: Array,
    request: Array,
    root_position: Array,
    status: Array,
    *,
    seed: int,
    slot_base: int,
    vocab_size: int,
    d2t: Array | None = None,
    frontier_ancestors: Array | None = None,
    score_temperature: float = 0.0,
    stream: int | None = None,
) -> None:
    """Appends the best children of every frontier node and picks the next frontier among them.

    Children are the top K of `draft logit / T + noise`, where the noise is the one the target will
    use for that token at that position (T = 0: by logit), so a good draft often proposes the very
    token the target samples. Ties go to the lower target id. A child's score is its parent's plus
    its log-softmax over the draft vocabulary.

    Args:
        draft_logits: [B * F, Vd], float32, float16 or bfloat16; row b * F + f belongs to
            frontier[b, f]; rows may be strided.
        frontier: [B, F] int32, store index of the nodes to expand; -1 = inert.
        node_token, node_parent, node_depth: [B, C] int32; node_score: [B, C] float32;
            node_count: [B] int32. New nodes go behind the count, in frontier order, then rank
            order. C = `tree_capacity(depth, K)` always suffices.
        next_frontier: [B, K] int32 out, the K new nodes of highest cumulative score (ties: lower
            index); -1 where there are fewer.
        next_row: [B, K] int32 out, the row of `draft_logits` that each came from; 0 where inert.
        next_ancestors: [B, K, 16] uint8 out, in-flight drafter slots of each one's ancestors: those
            of its parent, then the parent's own, `slot_base + f`; no ancestors in the first level.
        temperature: [B] float32; 0 = greedy.
        request: [B] int64, noise key of each request.
        root_position: [B] int32, absolute position of the root.
        status: [B] int32. NAN_DRAFT: a NaN or +inf logit (never a child); BAD_TOKEN: a d2t entry
            outside the vocabulary (never a child); BAD_TREE: a frontier entry that is no node of
            depth 0 to 15 (inert); BAD_LENGTH: node_count + F * K is outside 1..C (request inert).
        seed: the run's seed.
        slot_base: in-flight drafter slot of frontier row 0.
        vocab_size: the target's true vocabulary; without d2t, columns from there on are not read.
        d2t: [Vd] int32, target id of each draft id; None = the same ids.
        frontier_ancestors: [B, F, 16] uint8, `next_ancestors` of the level before; None in the
            first level, where the root's drafter entry is committed.
        score_temperature: 0: score by log-softmax(draft logits / T); else by log-softmax of
            (draft logit / T + noise) / score_temperature, which ranks by what the noise favours.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong, or C < 1 + F * K.

    Example:
        The first level below the root, token 5:

        >>> import numpy as np
        >>> node_token, node_parent, node_depth = np.int32([[[5, 0, 0]], [[-1, 0, 0]], [[0, 0, 0]]])
        >>> node_score, node_count = np.zeros((1, 3), np.float32), np.int32([1])
        >>> next_frontier, next_row = np.zeros((2, 1, 2), np.int32)
        >>> expand_tree(np.float32([[1, 3, 2]]), np.int32([[0]]), node_token, node_parent,
        ...             node_score, node_depth, node_count, next_frontier, next_row,
        ...             next_ancestors=np.zeros((1, 2, 16), np.uint8), temperature=np.float32([0]),
        ...             request=np.int64([0]), root_position=np.int32([4]),
        ...             status=np.zeros(1, np.int32), seed=0, slot_base=0, vocab_size=3)
        >>> print(node_token, node_parent, node_score.round(2), next_frontier)
        [[5 1 2]] [[-1  0  0]] [[ 0.   -0.41 -1.41]] [[1 2]]

    Source: Gumbel-top-k sampling, Kool et al. (2019); dynamic draft trees, Li et al., "EAGLE-2"
        (2024); the shared noise is this project's.
    Reference: `tests/reference.py::expand_tree`.
    """
    _C.expand_tree(
        draft_logits,
        frontier,
        node_token,
        node_parent,
        node_score,
        node_depth,
        node_count,
        next_frontier,
        next_row,
        next_ancestors,
        temperature,
        request,
        root_position,
        status,
        seed,
        d2t,
        frontier_ancestors,
        slot_base,
        score_temperature,
        vocab_size,
        current_stream(draft_logits, stream),
    )


def select_nodes(
    node_token: Array,
    node_parent: Array,
    node_score: Array,
    node_depth: Array,
    node_count: Array,
    root_position: Array,
    tokens: Array,
    parents: Array,
    position: Array,
    ancestors: Array,
    source: Array,
    row_start: Array,
    *,
    num_verify: int,
    stream: int | None = None,
) -> None:
    """Keeps the root and the best `num_verify - 1` connected nodes, as packed rows for the target.

    Nodes are taken by (score descending, index ascending), each only after its parent; since scores
    fall along a path that is the best connected tree. Of siblings with one token the first taken
    counts. Nodes with a NaN score, a parent that is not an earlier node, or a depth that is not its
    parent's plus one are left out. Rows are ordered by (depth, index), so parents come first.

    Args:
        node_token, node_parent, node_depth: [B, C] int32; node_score: [B, C] float32;
            node_count: [B] int32; 0 (or a count past C) gives the request no rows.
        root_position: [B] int32, absolute position of the root.
        tokens, parents, position: [B * num_verify] int32 out. parents: row within the request, -1
            at the root. position: root_position + depth.
        ancestors: [B * num_verify, 16] uint8 out: entry j of a row at depth d, j < d, is the row
            within the request of its ancestor at depth j.
        source: [B * num_verify] int32 out, store index of each row; -1 past row_start[B].
        row_start: [B + 1] int32 out: request b owns rows row_start[b] to row_start[b + 1] - 1.
            Rows past row_start[B] of the other outputs stay as they were.
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
        >>> select_nodes(node_token=np.int32([[5, 1, 2, 6]]), node_parent=np.int32([[-1, 0, 0, 1]]),
        ...              node_score=np.float32([[0, -1, -3, -2]]),
        ...              node_depth=np.int32([[0, 1, 1, 2]]), node_count=np.int32([4]),
        ...              root_position=np.int32([4]), tokens=tokens, parents=parents,
        ...              position=position, ancestors=np.zeros((3, 16), np.uint8), source=source,
        ...              row_start=row_start, num_verify=3)
        >>> print(source, tokens, parents, position, row_start)
        [0 1 3] [5 1 6] [-1  0  1] [4 5 6] [0 3]

    Source: Li et al., "EAGLE-2" (2024), re-ranking.
    Reference: `tests/reference.py::select_nodes`.
    """
    _C.select_nodes(
        node_token,
        node_parent,
        node_score,
        node_depth,
        node_count,
        root_position,
        tokens,
        parents,
        position,
        ancestors,
        source,
        row_start,
        num_verify,
        current_stream(node_token, stream),
    )
