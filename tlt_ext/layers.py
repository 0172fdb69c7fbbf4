"""Layers of a decode step, row-invariant: the bits of a row do not depend on other rows."""

from collections.abc import Sequence

from tlt_ext import _C
from tlt_ext.common import Array, current_stream
from tlt_ext.groups import Rows


def linear_rows(
    x: Array,
    weight: Array,
    out: Array,
    *,
    norm_weight: Array | None = None,
    eps: float = 1e-6,
    bias: Array | None = None,
    residual: Array | None = None,
    parts: int = 8,
    pdl: bool = False,
    stream: int | None = None,
) -> None:
    """Writes `x @ weight.T (+ bias) (+ residual)`, summed in float32 and rounded once.

    The order of the sum depends on K alone, so a row has the same bits alone, in a batch and in a
    prefill. The weights are read once for every 64 rows. float32 has the same bits on CPU and GPU.
    With `norm_weight` the result is bit-identical to `rms_norm` followed by this op, without an
    array in between; on a GPU this is faster for few rows and weights (`driver/model/target.py`).

    K is cut into blocks of 64. Part w of 8 sums the blocks w, w + 8, ..., and the parts are added
    as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). So K can be divided among 1, 2, 4 or 8 ranks: rank
    r of R holds the columns k of x and weight with `k // 64 % 8 // (8 // R) == r`, in ascending
    order, and passes `parts=8 // R`. `fold_partials` adds the sums of the ranks and gives the bits
    of one call.

    Args:
        x: [rows, K], float32, float16 or bfloat16; rows may be strided.
        weight: [N, K], dtype of x; rows may be strided.
        out: [rows, N], dtype of x or float32; rows may be strided; must not overlap x.
        norm_weight: [K], dtype of x; None = no norm.
        eps: of the norm.
        bias: [N], dtype of x.
        residual: [rows, N], dtype of out; may be out itself.
        parts: 8, 4, 2 or 1: parts of K in x. With fewer than 8, out is float32, and norm_weight,
            bias and residual are None.
        pdl: programmatic dependent launch, on a GPU of compute capability 9.0 or higher (no effect
            elsewhere): the launch may begin, and read the weights (the norm's, too) and the bias,
            before the previous kernels on the stream end. The caller promises that none of those
            writes them: launches of this package overlap in chains, so those are all kernels back
            to, and including, the last one of another library. If one of them does, results are
            wrong, and nothing reports it.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        >>> import numpy as np
        >>> x, out = np.float32([[1, 2]]), np.zeros((1, 2), np.float32)
        >>> linear_rows(x, np.float32([[3, 4], [5, 6]]), out)
        >>> print(out)
        [[11. 17.]]

    Source: the layout of `torch.nn.Linear`; the order of the sum is in `csrc/layers/dot.h`, of
    16-bit types on a GPU in `csrc/layers/linear.cuh`.
    Reference: `tests/reference.py::linear_rows`, of `rms_norm`.
    """
    _C.linear_rows(
        x,
        weight,
        out,
        norm_weight,
        eps,
        bias,
        residual,
        parts,
        pdl,
        current_stream(x, stream),
    )


def fold_partials(
    partials: Sequence[Array],
    out: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    flags: Sequence[Array] = (),
    rank: int = 0,
    timeout_s: float = 60.0,
    stream: int | None = None,
) -> None:
    """Adds the partial sums of all ranks as a binary tree, then bias and residual; rounds once.

    With the sums of `linear_rows(parts=8 // R)` of R ranks, out is bit-identical to `linear_rows`
    on one rank, for every R.

    On GPUs of one host, partials and flags may be symmetric memory. With flags the kernel waits
    until the earlier kernels of all ranks on their streams have ended, so no other barrier is
    needed. All ranks make the same calls. A rank may write its partial sums again after its next
    call with flags, on other partial sums.

    Args:
        partials: one float32 [rows, N] for each of 1, 2, 4 or 8 ranks, in their order; rows may be
            strided. Memory of other GPUs that the device can read is allowed.
        out: [rows, N], float32, float16 or bfloat16; rows may be strided.
        bias: [N], float32, float16 or bfloat16.
        residual: [rows, N], dtype of out; may be out itself.
        flags: one int32 [MAX_FOLD_BLOCKS, ranks] for each rank, zeros at first, which every rank
            can write; none = the ranks do not wait. On a GPU only.
        rank: this rank, with flags.
        timeout_s: of a wait for another rank, up to 1e9; then the kernel ends with an error.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a number of arrays, device, layout or shape is wrong.

    Example:
        >>> import numpy as np
        >>> out = np.zeros((1, 2), np.float32)
        >>> fold_partials([np.float32([[1, 2]]), np.float32([[3, 4]])], out)
        >>> print(out)
        [[4. 6.]]

    Source: a tree of eight leaves, as in "Tree-based invariant kernels" (arXiv 2511.17826).
    Reference: `tests/reference.py::fold_partials`.
    """
    _C.fold_partials(
        list(partials),
        out,
        bias,
        residual,
        list(flags),
        rank,
        timeout_s,
        current_stream(out, stream),
    )


def linear_silu_mul(
    x: Array,
    weight: Array,
    out: Array,
    *,
    norm_weight: Array | None = None,
    eps: float = 1e-6,
    pdl: bool = False,
    stream: int | None = None,
) -> None:
    """`silu_mul` of `linear_rows(x)`, with the same bits, without the array (gate | up) in between.

    Args:
        x: [rows, K], float32, float16 or bfloat16; rows may be strided.
        weight: [2 * N, K], dtype of x: the rows of gate, then those of up; rows may be strided.
        out: [rows, N], dtype of x; rows may be strided; must not overlap x.
        norm_weight: [K], dtype of x, as in `linear_rows`.
        eps: of the norm.
        pdl: as in `linear_rows`.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        >>> import numpy as np
        >>> x, out = np.float32([[1]]), np.zeros((1, 1), np.float32)
        >>> linear_silu_mul(x, np.float32([[1], [2]]), out)
        >>> print(out.round(4))   # silu(1) = 0.7311, times 2
        [[1.4621]]

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), SwiGLU.
    Reference: `tests/reference.py::silu_mul` of `linear_rows`.
    """
    _C.linear_silu_mul(x, weight, out, norm_weight, eps, pdl, current_stream(x, stream))


def rms_norm(
    x: Array, weight: Array, out: Array, *, eps: float = 1e-6, stream: int | None = None
) -> None:
    """Writes `x / sqrt(mean(x^2) + eps) * weight` row by row.

    The normed value is rounded to x's dtype before the weight, as Hugging Face models do.

    Args:
        x: [rows, dim], float32, float16 or bfloat16; rows may be strided.
        weight: [dim], dtype of x.
        out: [rows, dim], dtype of x; may be x itself.
        eps: added to the mean square.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        >>> import numpy as np
        >>> x, out = np.float32([[3, 4]]), np.zeros((1, 2), np.float32)
        >>> rms_norm(x, np.float32([1, 1]), out, eps=0.0)
        >>> print(out.round(4))   # over sqrt(12.5)
        [[0.8485 1.1314]]

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    Reference: `tests/reference.py::rms_norm`.
    """
    _C.rms_norm(x, weight, out, eps, current_stream(x, stream))


def silu_mul(x: Array, out: Array, *, stream: int | None = None) -> None:
    """Writes `silu(gate) * up` for rows `gate | up`.

    silu(gate) is rounded to x's dtype before the product, as Hugging Face models do.

    Args:
        x: [rows, 2 * dim], float32, float16 or bfloat16; rows may be strided.
        out: [rows, dim], dtype of x; may be the gate half of x itself.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        >>> import numpy as np
        >>> x, out = np.float32([[1, 2]]), np.zeros((1, 1), np.float32)
        >>> silu_mul(x, out)
        >>> print(out.round(4))   # silu(1) = 0.7311, times 2
        [[1.4621]]

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), SwiGLU.
    Reference: `tests/reference.py::silu_mul`.
    """
    _C.silu_mul(x, out, current_stream(x, stream))


def linear_append(
    x: Array,
    weight: Array,
    q_out: Array,
    k_cache: Array,
    v_cache: Array,
    cos_sin: Array,
    rows: Rows,
    *,
    norm_weight: Array | None = None,
    eps: float = 1e-6,
    bias: Array | None = None,
    pdl: bool = False,
    pdl_tables: bool = False,
    stream: int | None = None,
) -> None:
    """`append_kv` of `linear_rows(x)`, with the same bits, without the array (q | k | v).

    A GPU processes 16 rows at a time, so with many rows or large weights the two ops are faster;
    16-bit rows must start at and span multiples of 16 bytes there.

    Args:
        x: [rows, K], float32, float16 or bfloat16; rows may be strided.
        weight: [(num_heads + 2 * num_kv_heads) * head_dim, K] = (q | k | v), dtype of x; rows may
            be strided.
        q_out: [rows, num_heads, head_dim], dtype of x; rows and heads may be strided; must not
            overlap x.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim], dtype of x, as in `append_kv`.
        v_cache: like k_cache.
        cos_sin: float32 [max_position, head_dim]: cosines, then sines, as in `append_kv`.
        rows: all fields, as in `append_kv`.
        norm_weight: [K], dtype of x, as in `linear_rows`.
        eps: of the norm.
        bias: [(num_heads + 2 * num_kv_heads) * head_dim], dtype of x.
        pdl: as in `linear_rows`.
        pdl_tables: with `pdl`, the launch may also read `rows` and cos_sin, and set bits of status,
            before the previous kernels on the stream end. The promise of `pdl` then covers them,
            too. If it is broken, rows may be written to slots of other requests.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        The row of the example of `append_kv`, without rotation (cosines 1, sines 0):

        >>> import numpy as np
        >>> x, weight = np.float32([[3, 4]]), np.ones((3 * 8, 2), np.float32)
        >>> q, (k, v) = np.zeros((1, 1, 8), np.float32), np.zeros((2, 8, 4, 1, 8), np.float32)
        >>> cos_sin = np.float32([4 * [1] + 4 * [0]] * 6)
        >>> rows = Rows(row_start=np.int32([0, 1]), position=np.int32([5]),
        ...             status=np.zeros(1, np.int32), context_len=np.int32([5]),
        ...             block_table=np.int32([[7, 2]]))
        >>> linear_append(x, weight, q, k, v, cos_sin, rows)
        >>> print(q[0], k[2, 1])
        [[7. 7. 7. 7. 7. 7. 7. 7.]] [[7. 7. 7. 7. 7. 7. 7. 7.]]

    Source: `linear_rows`, then `append_kv`.
    Reference: `tests/reference.py::append_kv` of `linear_rows`.
    """
    _C.linear_append(
        x,
        weight,
        q_out,
        k_cache,
        v_cache,
        cos_sin,
        rows,
        norm_weight,
        eps,
        bias,
        pdl,
        pdl_tables,
        current_stream(x, stream),
    )
