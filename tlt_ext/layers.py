"""Small-row layers of a decode step, row-invariant: a row's bits never depend on its neighbours."""

from tlt_ext import _C
from tlt_ext.common import Array, current_stream


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
        >>> x = np.array([[3.0, 4.0]], dtype=np.float32)   # rms = sqrt(12.5)
        >>> rms_norm(x, np.ones(2, np.float32), out, eps=0.0)   # out = [[0.8485, 1.1314]]

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    Reference: `tests/reference.py::rms_norm`.
    """
    _C.rms_norm(x, weight, out, eps, current_stream(x, stream))
