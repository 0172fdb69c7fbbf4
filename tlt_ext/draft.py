"""The input rows of a one-layer drafter: embedding of a token and hidden state, both normed."""

from tlt_ext import _C
from tlt_ext.common import Array, current_stream
from tlt_ext.groups import DraftWeights, Frontier, Nodes, Rows


def draft_inputs(
    weights: DraftWeights,
    ids: Array,
    hidden: Array,
    out: Array,
    *,
    eps: float,
    stream: int | None = None,
) -> None:
    """Concatenates each row's embedding and hidden state after RMS norms (bits of `rms_norm`).

    Args:
        weights: of any floating dtype.
        ids: int32 [rows]; the embedding of an id outside the vocabulary is zeros.
        hidden: [rows, dim], dtype of the weights; rows may be strided.
        out: [rows, 2 * dim], dtype of the weights; rows may be strided; written.
        eps: added to the mean squares.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        >>> import numpy as np
        >>> ones, out = np.float32([1, 1]), np.zeros((1, 4), np.float32)
        >>> draft_inputs(DraftWeights(np.float32([[3, 4]]), ones, ones), np.int32([0]),
        ...              np.float32([[0, 2]]), out, eps=0.0)
        >>> print(out.round(3))
        [[0.849 1.131 0.    1.414]]

    Source: Li et al., "EAGLE-3" (2025).
    Reference: `tests/reference.py::draft_inputs`.
    """
    _C.draft_inputs(weights, ids, hidden, out, eps, current_stream(out, stream))


def draft_level_inputs(
    weights: DraftWeights,
    nodes: Nodes,
    frontier: Frontier,
    hidden: Array,
    rows: Rows,
    *,
    out: Array,
    hidden_out: Array,
    depth: int,
    eps: float,
    stream: int | None = None,
) -> None:
    """The input rows of a tree's next level: `draft_inputs` of the frontier of `expand_tree`.

    Row b * K + f has the token of node `frontier.node[b, f]` and the hidden state of its parent.

    Args:
        weights: of any floating dtype.
        nodes: token, whose rows may be strided.
        frontier: node and row, of width K. A negative node stands for the root; a row outside of
            `hidden` stands for a hidden state of zeros.
        hidden: [any, dim], dtype of the weights; rows may be strided.
        rows: context_len, the roots' positions; position, int32 [requests * K], is written:
            `context_len[b] + depth`.
        out: [requests * K, 2 * dim], dtype of the weights; rows may be strided; written.
        hidden_out: [requests * K, dim], dtype of the weights, other memory than hidden; written:
            the hidden states without norm (the layer's residual).
        depth: depth of the rows' features, one less than that of their nodes.
        eps: added to the mean squares.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        The inputs of nodes 2 (token 1) and, in place of the inert entry, 0 (token 0):

        >>> import numpy as np
        >>> ones, hidden = np.float32([1, 1]), np.float32([[0, 2], [3, 4]])
        >>> out, hidden_out = np.zeros((2, 4), np.float32), np.zeros((2, 2), np.float32)
        >>> position = np.zeros(2, np.int32)
        >>> nodes = Nodes(np.int32([[0, 1, 1]]), None, None, None, None)
        >>> draft_level_inputs(DraftWeights(np.float32([[3, 4], [5, 0]]), ones, ones), nodes,
        ...                    Frontier(node=np.int32([[2, -1]]), row=np.int32([[1, 0]])), hidden,
        ...                    Rows(None, position, None, context_len=np.int32([10])), out=out,
        ...                    hidden_out=hidden_out, depth=0, eps=0.0)
        >>> print(out.round(3), position)
        [[1.414 0.    0.849 1.131]
         [0.849 1.131 0.    1.414]] [10 10]

    Source: Li et al., "EAGLE-2" (2024) and "EAGLE-3" (2025).
    Reference: `tests/reference.py::draft_inputs`.
    """
    _C.draft_level_inputs(
        weights,
        nodes,
        frontier,
        hidden,
        rows,
        out,
        hidden_out,
        depth,
        eps,
        current_stream(out, stream),
    )
