"""The paged cache of keys, values and features.

Terms. A launch has *rows in flight* of several requests: request b owns rows `row_start[b]` to
`row_start[b + 1] - 1`; later rows of an array are padding. `context_len[b]` slots of a request are
*committed*. The *slot* of a row is the index of its keys in the request's cache: `context_len[b] +
slot_base[b] +` its index in the request. Slot s is at page `block_table[b, s // page_size]`, offset
`s % page_size`; table entries past the last needed slot are never read. An *in-flight slot* is a
slot minus `context_len[b]`. The *position* of a row is the index of its token in the text.
"""

from tlt_ext import _C
from tlt_ext.common import Array, current_stream
from tlt_ext.groups import NewRows, Rows, TokenTable


def append_kv(
    qkv: Array,
    q_out: Array,
    k_cache: Array,
    v_cache: Array,
    cos_sin: Array,
    rows: Rows,
    *,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 1e-6,
    stream: int | None = None,
) -> None:
    """Rotates q and k by their positions and writes k and v into each row's slot.

    With `q_norm` / `k_norm` each head is RMS-normed first, rounded as `rms_norm` rounds.

    Args:
        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim] = (q | k | v), float32, float16 or
            bfloat16; rows may be strided.
        q_out: [rows, num_heads, head_dim], dtype of qkv; rows and heads may be strided; may be the
            q part of qkv itself.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim], dtype of qkv, any strides with a
            contiguous last axis; head_dim a multiple of 8 up to 256.
        v_cache: like k_cache.
        cos_sin: float32 [max_position, head_dim]: cosines of the head_dim / 2 angles, then sines;
            dimension i is paired with i + head_dim / 2.
        rows: all fields. status: BAD_LENGTH for a position past cos_sin or a slot past the table,
            BAD_PAGE for a page id outside the cache; such a row writes no k and v, and its q_out is
            0.
        q_norm: [head_dim], dtype of qkv, or None.
        k_norm: [head_dim], dtype of qkv, or None.
        eps: added to the mean square.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        One row at position 5 of a request with pages [7, 2] of 4 slots: slot 5 is page 2, offset 1.

        >>> import numpy as np
        >>> qkv = np.arange(3 * 8, dtype=np.float32)[None]
        >>> q, (k, v) = np.zeros((1, 1, 8), np.float32), np.zeros((2, 8, 4, 1, 8), np.float32)
        >>> cos_sin = np.float32([4 * [0] + 4 * [1]] * 6)   # a quarter turn at each position
        >>> rows = Rows(row_start=np.int32([0, 1]), position=np.int32([5]),
        ...             status=np.zeros(1, np.int32), context_len=np.int32([5]),
        ...             block_table=np.int32([[7, 2]]))
        >>> append_kv(qkv, q, k, v, cos_sin, rows)
        >>> print(k[2, 1], v[2, 1])
        [[-12. -13. -14. -15.   8.   9.  10.  11.]] [[16. 17. 18. 19. 20. 21. 22. 23.]]

    Source: Su et al., "RoFormer" (2021), in the half-split pairing of Hugging Face models.
    Reference: `tests/reference.py::append_kv`.
    """
    _C.append_kv(
        qkv,
        q_out,
        k_cache,
        v_cache,
        cos_sin,
        rows,
        q_norm,
        k_norm,
        eps,
        current_stream(qkv, stream),
    )


def commit_path(
    k_cache: Array,
    v_cache: Array,
    rows: Rows,
    *,
    path: Array,
    num_emitted: Array,
    features: Array | None = None,
    feature_rows: Array | None = None,
    stream: int | None = None,
) -> None:
    """Moves the kept rows' keys, values and features to the next committed slots.

    In-flight slot `path[b, i]` becomes slot `context_len[b] + i` in every layer, then
    `context_len[b]` grows by `num_emitted[b]`.

    Args:
        k_cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim], float32, float16 or
            bfloat16, any strides with a contiguous last axis.
        v_cache: like k_cache.
        rows: all fields but position and slot_base; context_len is updated. status: BAD_TREE for a
            path that does not rise from 0 or leaves the request's rows, BAD_LENGTH for a length
            outside its table, BAD_PAGE for a page id outside the cache; such a request is left
            untouched.
        path: int32 [requests, P]: in-flight slots kept, rising from 0; the first `num_emitted[b]`
            entries are valid (`verify_tree` writes them).
        num_emitted: int32 [requests].
        features: [num_pages, page_size, dim], any floating dtype, or None.
        feature_rows: [rows, dim], dtype of features: the features of the rows in flight; None if
            features is None.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        Ten committed slots, path [0, 2]: slot 10 stays, slot 12 moves to 11.

        >>> import numpy as np
        >>> k, v = np.zeros((2, 1, 1, 16, 1, 8), np.float32)   # one layer, one page of 16 slots
        >>> k[0, 0, 10:14, 0, 0] = 1, 2, 3, 4
        >>> context_len = np.int32([10])
        >>> rows = Rows(row_start=np.int32([0, 4]), position=np.int32([10, 11, 11, 12]),
        ...             status=np.zeros(1, np.int32), context_len=context_len,
        ...             block_table=np.int32([[0]]))
        >>> commit_path(k, v, rows, path=np.int32([[0, 2]]), num_emitted=np.int32([2]))
        >>> print(k[0, 0, 10:12, 0, 0], context_len)
        [1. 3.] [12]

    Source: design of this package.
    Reference: `tests/reference.py::commit_path`.
    """
    _C.commit_path(
        k_cache,
        v_cache,
        rows,
        path,
        num_emitted,
        features,
        feature_rows,
        current_stream(k_cache, stream),
    )


def copy_pages(
    cache: Array, source: Array, destination: Array, *, stream: int | None = None
) -> None:
    """Copies whole pages in every layer, for example a prompt's partial last page to each sample.

    Args:
        cache: [num_layers, num_pages, ...] of 3 to 6 axes, float32, float16 or bfloat16; layers and
            pages may be strided, a page is contiguous.
        source: int32 [count], page ids.
        destination: int32 [count], page ids, none of which is also a source. A pair with an id
            outside the cache is skipped, so lists may be padded with -1.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout or shape is wrong.

    Example:
        >>> import numpy as np
        >>> cache = np.float32([[[0], [1], [2], [3]]])   # one layer, four pages
        >>> copy_pages(cache, np.int32([1, 1]), np.int32([2, 3]))
        >>> print(cache.ravel())
        [0. 1. 1. 1.]

    Source: Kwon et al., "PagedAttention" (2023), for copy on write of shared pages.
    Reference: `tests/reference.py::copy_pages`.
    """
    _C.copy_pages(cache, source, destination, current_stream(cache, stream))


def gather_new_rows(
    features: Array,
    rows: Rows,
    table: TokenTable,
    *,
    num_new: Array,
    out: NewRows,
    stream: int | None = None,
) -> None:
    """Gathers the entries that a drafter has yet to write: features of a position, next token.

    Request b has an entry for each position t from `context_len[b] - num_new[b]` to
    `context_len[b] - 1`; its rows are packed after those of the requests before it.

    Args:
        features: [num_pages, page_size, dim], float32, float16 or bfloat16, pages and slots may be
            strided.
        rows: all fields but slot_base; M is the most entries of a request. row_start and position,
            int32 [requests * M], are written; position is t, and 0 in rows of no request. status:
            BAD_LENGTH for a count that is negative, above M or above `context_len`, or a token
            outside `tokens`: the request then has no rows. BAD_PAGE for a page id outside
            features and BAD_LENGTH for a position past the block table: that row is then 0.
        table: tokens and slot.
        num_new: int32 [requests].
        out: written; ids holds the token of position t + 1.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout or shape is wrong.

    Example:
        Two new entries of a request with ten committed slots:

        >>> import numpy as np
        >>> features = np.arange(16, dtype=np.float32).reshape(1, 16, 1)
        >>> tokens = 100 + np.arange(16, dtype=np.int32)[None]
        >>> row_start, ids, position = np.zeros((3, 2), np.int32)
        >>> first, last = np.zeros((2, 1), np.int32)
        >>> out = NewRows(ids, first, last, features=np.zeros((2, 1), np.float32))
        >>> rows = Rows(row_start, position, status=np.zeros(1, np.int32),
        ...             context_len=np.int32([10]), block_table=np.int32([[0]]))
        >>> gather_new_rows(features, rows, TokenTable(tokens, slot=np.int32([0])),
        ...                 num_new=np.int32([2]), out=out)
        >>> print(position, out.features.ravel(), ids, first, last, row_start)
        [8 9] [8. 9.] [109 110] [8] [1] [0 2]

    Source: design of this package; the pairing is that of Li et al., "EAGLE" (2024).
    Reference: `tests/reference.py::gather_new_rows`.
    """
    _C.gather_new_rows(features, rows, table, num_new, out, current_stream(features, stream))
