"""Shared by all ops: the array type, streams, status words, threads."""

import enum
import sys
from operator import index
from typing import Any, NoReturn, Protocol

from tlt_ext import _C


def _older_build(name: str) -> NoReturn:
    raise AttributeError(
        f"tlt_ext: {_C.__file__} has no {name}, it was built from older sources: run"
        " `pip install -e .` in the checkout again",
        name=name,
        obj=_C,
    )


vars(_C)["__getattr__"] = _older_build  # after `git pull` without a new build


class Array(Protocol):
    """Any array that exports DLPack: torch.Tensor, cupy.ndarray, numpy.ndarray."""

    def __dlpack__(self, *, stream: int | None = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


class Status(enum.IntFlag):
    """Bits of a per-request status word; an op ORs them in, 0 = no error."""

    OK = 0
    NAN_LOGITS = 1  # a NaN or +inf logit, no finite logit, or a NaN temperature
    BAD_TREE = 2  # a parent or ancestor that is not an earlier row or node
    BAD_TOKEN = 4  # a drafted token or d2t entry outside the vocabulary
    BAD_PAGE = 8  # a page id outside the cache
    BAD_LENGTH = 16  # a length or position outside its table
    NAN_DRAFT = 32  # a NaN or +inf draft logit, or an invalid draft probability


def current_stream(array: Any, stream: int | None) -> int:
    """The CUDA stream to launch on: the one given, else the array library's current one."""
    if stream is not None:
        return stream
    torch: Any = sys.modules.get("torch")
    cupy: Any = sys.modules.get("cupy")
    # `()`: a module that is still being imported has no classes, and no arrays.
    tensor: Any = getattr(torch, "Tensor", ())
    if isinstance(array, tensor):
        return torch.cuda.current_stream(array.device).cuda_stream if array.is_cuda else 0
    if isinstance(array, getattr(cupy, "ndarray", ())):
        return cupy.cuda.get_current_stream().ptr
    return 0


def seed_word(seed: int) -> int:
    """A seed as the native core takes it.

    Raises:
        ValueError: it does not fit into an unsigned 64-bit word.
    """
    if not 0 <= index(seed) < 2**64:
        raise ValueError(f"seed: expected 0 .. 2**64 - 1, got {seed}")
    return index(seed)


def num_threads() -> int:
    """How many threads the CPU kernels use.

    Example:
        >>> num_threads() >= 1
        True
    """
    return _C.num_threads()


def set_num_threads(count: int) -> None:
    """Sets how many threads the CPU kernels use; 0 means every core this process may run on.

    Raises:
        ValueError: count is not 0 to 1024.

    Example:
        >>> set_num_threads(2)
        >>> num_threads()
        2
        >>> set_num_threads(0)
    """
    _C.set_num_threads(count)
