"""The input rows of a one-layer drafter: a token's embedding beside a hidden state, both normed."""

from tlt_ext import _C
from tlt_ext.common import Array, current_stream


def draft_inputs(
    embedding: Array,
    ids: Array,
    hidden: Array,
    input_norm: Array,
    hidden_norm: Array,
    out: Array,
    *,
    eps: float,
    stream: int | None = None,
) -> None:
    """Joins each row's embedding and hidden state, both RMS-normed with the bits of `rms_norm`.

    Args:
        embedding: [vocab, dim], float32, float16 or bfloat16; rows may be strided.
        ids: int32 [rows]; an id outside the vocabulary counts as an embedding of zeros.
        hidden: [rows, dim], dtype of embedding; rows may be strided.
        input_norm: [dim], dtype of embedding: weight for the embedding.
        hidden_norm: [dim], dtype of embedding: weight for the hidden state.
        out: [rows, 2 * dim], dtype of embedding; rows may be strided; written.
        eps: added to the mean squares.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        >>> import numpy as np
        >>> ones, out = np.float32([1, 1]), np.zeros((1, 4), np.float32)
        >>> draft_inputs(embedding=np.float32([[3, 4]]), ids=np.int32([0]),
        ...              hidden=np.float32([[0, 2]]), input_norm=ones, hidden_norm=ones, out=out,
        ...              eps=0.0)
        >>> print(out.round(3))
        [[0.849 1.131 0.    1.414]]

    Source: Li et al., "EAGLE-3" (2025).
    Reference: `tests/reference.py::draft_inputs`.
    """
    _C.draft_inputs(
        embedding,
        ids,
        hidden,
        input_norm,
        hidden_norm,
        out,
        eps,
        current_stream(embedding, stream),
    )


def draft_level_inputs(
    embedding: Array,
    node_token: Array,
    frontier: Array,
    row: Array,
    root_position: Array,
    hidden: Array,
    input_norm: Array,
    hidden_norm: Array,
    out: Array,
    hidden_out: Array,
    position: Array,
    *,
    depth: int,
    eps: float,
    stream: int | None = None,
) -> None:
    """The input rows of a tree's next level: `draft_inputs` of what `expand_tree` chose.

    Row b * K + f takes the token of node `frontier[b, f]` and the hidden state of its parent.

    Args:
        embedding: [vocab, dim], float32, float16 or bfloat16; rows may be strided.
        node_token: int32 [requests, capacity], the node store's tokens; rows may be strided.
        frontier: int32 [requests, K], store index; inert (negative) entries count as the root.
        row: int32 [requests, K], row of `hidden`; outside of it a hidden state of zeros.
        root_position: int32 [requests].
        hidden: [any, dim], dtype of embedding; rows may be strided.
        input_norm: [dim], dtype of embedding.
        hidden_norm: [dim], dtype of embedding.
        out: [requests * K, 2 * dim], dtype of embedding; rows may be strided; written.
        hidden_out: [requests * K, dim], dtype of embedding, other memory than hidden; written: the
            rows taken, not normed (the layer's residual).
        position: int32 [requests * K], written: `root_position[b] + depth`.
        depth: of the rows' features, one less than that of their nodes.
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
        >>> draft_level_inputs(np.float32([[3, 4], [5, 0]]), node_token=np.int32([[0, 1, 1]]),
        ...                    frontier=np.int32([[2, -1]]), row=np.int32([[1, 0]]),
        ...                    root_position=np.int32([10]), hidden=hidden, input_norm=ones,
        ...                    hidden_norm=ones, out=out, hidden_out=hidden_out, position=position,
        ...                    depth=0, eps=0.0)
        >>> print(out.round(3), position)
        [[1.414 0.    0.849 1.131]
         [0.849 1.131 0.    1.414]] [10 10]

    Source: Li et al., "EAGLE-2" (2024) and "EAGLE-3" (2025).
    Reference: `tests/reference.py::draft_inputs`.
    """
    _C.draft_level_inputs(
        embedding,
        node_token,
        frontier,
        row,
        root_position,
        hidden,
        input_norm,
        hidden_norm,
        out,
        hidden_out,
        position,
        depth,
        eps,
        current_stream(embedding, stream),
    )
