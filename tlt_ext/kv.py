"""The paged cache of keys, values and features.

Words. A launch has *rows in flight* of several requests, ragged: request b owns rows `row_start[b]`
to `row_start[b + 1] - 1`; later rows of an array are inert. `context_len[b]` slots of a request are
committed. A row's *slot* is where its keys lie in the request's sequence: `context_len[b] +
slot_base[b] +` its index in the request. Slot s is at page `block_table[b, s // page_size]`, offset
`s % page_size`; table entries past the last needed slot are never followed. An *in-flight slot*
is a slot minus `context_len[b]`. A row's *position* is where its token stands in the text.
"""

from tlt_ext import _C
from tlt_ext.common import Array, current_stream


def append_kv(
    qkv: Array,
    q_out: Array,
    k_cache: Array,
    v_cache: Array,
    cos_sin: Array,
    row_start: Array,
    context_len: Array,
    position: Array,
    block_table: Array,
    status: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    slot_base: Array | None = None,
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
        row_start: int32 [requests + 1].
        context_len: int32 [requests].
        position: int32 [rows].
        block_table: int32 [requests, max_pages].
        status: int32 [requests], bits are ORed in: BAD_LENGTH for a position past cos_sin or a slot
            past the table, BAD_PAGE for a page id outside the cache. Such a row writes no k and
            v, and its q_out is 0.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        slot_base: int32 [requests], in-flight slot of the first row; None = 0.
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
        >>> append_kv(qkv, q, k, v, cos_sin, row_start=np.int32([0, 1]), context_len=np.int32([5]),
        ...           position=np.int32([5]), block_table=np.int32([[7, 2]]),
        ...           status=np.zeros(1, np.int32), num_heads=1, num_kv_heads=1)
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
        row_start,
        context_len,
        position,
        block_table,
        status,
        num_heads,
        num_kv_heads,
        slot_base,
        q_norm,
        k_norm,
        eps,
        current_stream(qkv, stream),
    )


def commit_path(
    k_cache: Array,
    v_cache: Array,
    features: Array | None,
    feature_rows: Array | None,
    row_start: Array,
    path: Array,
    num_emitted: Array,
    context_len: Array,
    block_table: Array,
    status: Array,
    *,
    stream: int | None = None,
) -> None:
    """Moves the kept rows' keys, values and features to the next committed slots.

    In-flight slot `path[b, i]` becomes slot `context_len[b] + i` in every layer, then
    `context_len[b]` grows by `num_emitted[b]`.

    Args:
        k_cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim], float32, float16 or
            bfloat16, any strides with a contiguous last axis.
        v_cache: like k_cache.
        features: [num_pages, page_size, dim], any floating dtype, or None.
        feature_rows: [rows, dim], dtype of features: what the rows in flight recorded; None where
            features is.
        row_start: int32 [requests + 1].
        path: int32 [requests, P]: in-flight slots kept, rising from 0; the first `num_emitted[b]`
            entries are valid (`verify_tree` writes them).
        num_emitted: int32 [requests].
        context_len: int32 [requests], updated.
        block_table: int32 [requests, max_pages].
        status: int32 [requests], bits are ORed in: BAD_TREE for a path that does not rise from 0 or
            leaves the request's rows, BAD_LENGTH for a length outside its table, BAD_PAGE for
            a page id outside the cache. Such a request is left untouched.
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
        >>> commit_path(k, v, None, None, row_start=np.int32([0, 4]), path=np.int32([[0, 2]]),
        ...             num_emitted=np.int32([2]), context_len=context_len,
        ...             block_table=np.int32([[0]]), status=np.zeros(1, np.int32))
        >>> print(k[0, 0, 10:12, 0, 0], context_len)
        [1. 3.] [12]

    Source: design of this package.
    Reference: `tests/reference.py::commit_path`.
    """
    _C.commit_path(
        k_cache,
        v_cache,
        features,
        feature_rows,
        row_start,
        path,
        num_emitted,
        context_len,
        block_table,
        status,
        current_stream(k_cache, stream),
    )


def copy_pages(
    cache: Array, source: Array, destination: Array, *, stream: int | None = None
) -> None:
    """Copies whole pages in every layer: a prompt's partial last page, once per sample.

    Args:
        cache: [num_layers, num_pages, ...] of 3 to 6 axes, float32, float16 or bfloat16; layers and
            pages may be strided, a page is contiguous.
        source: int32 [count], page ids.
        destination: int32 [count], page ids; none of them also a source. A pair with an id outside
            the cache is skipped, so lists may be padded with -1.
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
    tokens: Array,
    slot: Array,
    context_len: Array,
    num_new: Array,
    block_table: Array,
    status: Array,
    row_start: Array,
    ids: Array,
    position: Array,
    first: Array,
    last: Array,
    rows: Array,
    *,
    stream: int | None = None,
) -> None:
    """Gathers what a drafter has to catch up on: features of a position beside the next token.

    Request b's entries are the positions t from `context_len[b] - num_new[b]` to
    `context_len[b] - 1`; its rows are packed after those of the requests before it.

    Args:
        features: [num_pages, page_size, dim], float32, float16 or bfloat16, pages and slots may be
            strided.
        tokens: int32 [slots, length], the token at each absolute position of a sequence.
        slot: int32 [requests], each request's row of `tokens`; negative = no rows.
        context_len: int32 [requests].
        num_new: int32 [requests].
        block_table: int32 [requests, max_pages].
        status: int32 [requests], bits are ORed in: BAD_LENGTH for a count that is negative, above
            the request's share of `ids` or above `context_len`, or a token outside `tokens`, and
            there are no rows then; BAD_PAGE for a page id outside features, BAD_LENGTH for a
            position past the table, and that row is 0.
        row_start: int32 [requests + 1], out.
        ids: int32 [requests * M], out: the token of position t + 1; M is the most entries of a
            request. Rows that belong to nobody, past `row_start[-1]`, are 0.
        position: int32 [requests * M], out: t, 0 in rows that belong to nobody.
        first: int32 [requests], out: position of the first entry (`context_len` where there is
            none), which is the drafter's own committed length.
        last: int32 [requests], out: row of the newest entry, 0 where there is none.
        rows: [requests * M, dim], dtype of features, rows may be strided; out. Rows that belong to
            nobody are left as they are.
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
        >>> rows = np.zeros((2, 1), np.float32)
        >>> gather_new_rows(features, tokens, slot=np.int32([0]), context_len=np.int32([10]),
        ...                 num_new=np.int32([2]), block_table=np.int32([[0]]),
        ...                 status=np.zeros(1, np.int32), row_start=row_start, ids=ids,
        ...                 position=position, first=first, last=last, rows=rows)
        >>> print(position, rows.ravel(), ids, first, last, row_start)
        [8 9] [8. 9.] [109 110] [8] [1] [0 2]

    Source: design of this package; the pairing is that of Li et al., "EAGLE" (2024).
    Reference: `tests/reference.py::gather_new_rows`.
    """
    _C.gather_new_rows(
        features,
        tokens,
        slot,
        context_len,
        num_new,
        block_table,
        status,
        row_start,
        ids,
        position,
        first,
        last,
        rows,
        current_stream(features, stream),
    )
