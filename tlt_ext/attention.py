"""Attention of ragged rows over a paged cache, for plain decoding, drafting and verifying."""

from tlt_ext import _C
from tlt_ext.common import Array, current_stream
from tlt_ext.groups import Rows


def attention_workspace_bytes(
    *,
    num_requests: int,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_slots: int,
) -> int:
    """Bytes of the workspace of `tree_attention` for arrays of these shapes.

    Args:
        num_requests: entries of context_len.
        num_rows: rows of q.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: of q.
        max_slots: block_table.shape[1] * page_size, whatever the lengths are.

    Returns:
        Bytes; 0 if there are enough blocks without sharing keys among them.

    Raises:
        ValueError: a count is out of range, or the heads do not divide.

    Example:
        >>> attention_workspace_bytes(num_requests=128, num_rows=128, num_heads=32,
        ...                           num_kv_heads=8, head_dim=128, max_slots=4096)
        0

    Source: Dao et al., "Flash-Decoding" (2023), for splitting keys.
    Reference: none, as it does not affect results.
    """
    return _C.attention_workspace_bytes(
        num_requests, num_rows, num_heads, num_kv_heads, head_dim, max_slots
    )


def tree_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    out: Array,
    rows: Rows,
    *,
    ancestors: Array | None = None,
    scale: float | None = None,
    lse: Array | None = None,
    workspace: Array | None = None,
    pdl: bool = False,
    stream: int | None = None,
) -> None:
    """Writes softmax attention of each row over committed slots, its ancestors and itself.

    Keys are taken in position order, so a row's bits depend on its q and its keys alone: not on
    their slots, on how many are committed, or on other rows. Slots, rows in flight and ragged
    requests are described in `tlt_ext.kv`. Query head h reads kv head
    h // (num_heads // num_kv_heads). A GPU takes, in 16 bits, head_dim 64 or 128, pages of 16, 32,
    64 or 128 slots, at most 8 heads a kv head, and data and strides in multiples of 16 bytes.

    Args:
        q: [rows, num_heads, head_dim], float32, float16 or bfloat16; head_dim a multiple of 8 up
            to 256. Rows and heads may be strided.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim], dtype of q, any strides with a
            contiguous last axis; it holds the rows in flight, too (`append_kv`).
        v_cache: like k_cache.
        out: like q. Padding rows keep their values.
        rows: all fields. position: at most context_len + 16 in a tree, the row's slot in a chain.
            status: BAD_PAGE, BAD_LENGTH and BAD_TREE (ancestors not rising, or not before the row)
            make the row's out 0 and its lse -inf.
        ancestors: uint8 [rows, 16], as in `Tree`; the depth of a row is position - context_len.
            None: a chain, where the row at position p sits at slot p and attends to slots 0 .. p.
        scale: factor of the scores; None = 1 / sqrt(head_dim).
        lse: float32 [rows, num_heads] or None; log of the sum of exponentials, natural.
        workspace: uint8 [>= `attention_workspace_bytes`] on a GPU, aligned to 16 bytes, or
            None. With it the keys of a small batch are shared among the multiprocessors; the bits
            are the same. The CPU does not need it.
        pdl: programmatic dependent launch, on a GPU of compute capability 9.0 or higher (no effect
            elsewhere): the launch may read `rows`, ancestors and committed slots of the cache
            before the previous kernels on the stream end; it waits for them before it reads q and
            the slots in flight. The caller promises that none of them writes what is read before
            the wait: launches of this package overlap in chains, so those are all kernels back to,
            and including, the last one of another library. If one of them does, results are wrong,
            or the launch never ends.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        A request with one committed slot 0 and a tree in flight: the root (row 0, slot 1) and two
        siblings (slots 2 and 3). Row 2 attends to slots 0, 1 and 3; with q = 0 its out is the mean
        of their values.

        >>> import numpy as np
        >>> q, out = np.zeros((2, 3, 1, 8), np.float32)
        >>> k, v = np.zeros((2, 1, 4, 1, 8), np.float32)   # one page of 4 slots
        >>> v[0, :, 0] = np.float32([[1], [2], [4], [8]])
        >>> rows = Rows(row_start=np.int32([0, 3]), position=np.int32([1, 2, 2]),
        ...             status=np.zeros(1, np.int32), context_len=np.int32([1]),
        ...             block_table=np.int32([[0]]))
        >>> tree_attention(q, k, v, out, rows, ancestors=np.zeros((3, 16), np.uint8))
        >>> print(out[:, 0, 0].round(3))
        [1.5   2.333 3.667]

    Source: Dao et al., "FlashAttention" (2022), for the softmax over blocks; Miao et al.,
    "SpecInfer" (2024), for tree attention.
    Reference: `tests/reference.py::tree_attention`.
    """
    _C.tree_attention(
        q,
        k_cache,
        v_cache,
        out,
        rows,
        ancestors,
        scale,
        lse,
        workspace,
        pdl,
        current_stream(q, stream),
    )
