"""Saves the inputs of an op in a real run, so that it can be timed on real shapes.

`driver.train run.capture=tree_attention:3` writes files to `runs/<name>/captures/`, and
`python -m profiling.kernels.replay runs/<name>/captures` runs them again.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tlt_ext

from ..common.errors import UserError
from ..common.storage import storage_errors

TABLE = "rows.block_table"
# Arrays that the table indexes -> the axis of their pages, from the end.
PAGED = {"k_cache": -4, "v_cache": -4, "features": -3}
LEFT_OUT = ("stream", "workspace")  # the replay creates them


@dataclass(frozen=True)
class Capture:
    """Which inputs are saved."""

    op: str  # name in `tlt_ext`
    step: int  # of training, from 1
    calls: int = 8  # largest number of saved calls, spread over the step

    @staticmethod
    def parse(text: str, steps: int) -> Capture | None:
        """Reads `run.capture`, "op:step" or "", of a run with so many steps.

        Raises:
            UserError: an unknown op, or a step after the last.
        """
        if not text:
            return None
        op, _, step = text.partition(":")
        names = [op.__name__ for op in tlt_ext.OPS if inspect.isfunction(op)]
        if op not in names:
            raise UserError(f"run.capture: the op must be one of {', '.join(names)}, got {op!r}")
        if int(step) > steps:
            raise UserError(f"run.capture={text}: the run ends with step {steps}")
        return Capture(op, int(step))


@contextmanager
def capture_op(capture: Capture, folder: Path) -> Iterator[None]:
    """Saves calls of `capture.op` from Python while the block runs.

    It saves at most `capture.calls` calls, evenly spread over the block, with every array as before
    the call. Of caches it saves only the pages of the call's requests, renumbered. Calls inside a
    CUDA graph cannot be captured, so graphs must be off (`PassRunner.op_by_op`). Calls during the
    recording of a graph have no values yet and are not saved.

    Raises:
        UserError: the disk is full or unwritable.
    """
    op = getattr(tlt_ext, capture.op)
    kept: list[tuple[int, dict[str, Any]]] = []
    count, stride = 0, 1

    @functools.wraps(op)
    def saving(*args: Any, **named: Any) -> Any:
        nonlocal count, stride
        recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not recording:
            if count % stride == 0:
                kept.append((count, copy_arguments(op, args, named)))
            if len(kept) > capture.calls:
                stride *= 2
                kept[:] = [call for call in kept if call[0] % stride == 0]
            count += 1
        return op(*args, **named)

    setattr(tlt_ext, capture.op, saving)
    try:
        yield
    finally:
        setattr(tlt_ext, capture.op, op)
    if not kept:
        warnings.warn(
            f"run.capture={capture.op}:{capture.step}: no Python code called it in this step",
            stacklevel=3,
        )
    folder.mkdir(parents=True, exist_ok=True)
    for index, arguments in kept:
        path = folder / f"{capture.op}-{capture.step:06d}-{index:06d}.pt"
        with storage_errors(path):
            torch.save({"op": capture.op, "arguments": arguments}, path)


def copy_arguments(op: Callable[..., Any], args: Any, named: Any) -> dict[str, Any]:
    """Argument, or `argument.field` of a group, -> value; arrays as copies on the CPU."""
    bound = inspect.signature(op).bind(*args, **named).arguments
    values: dict[str, Any] = {}
    for name, value in bound.items():
        if hasattr(value, "_asdict"):
            values |= {f"{name}.{field}": array for field, array in value._asdict().items()}
        elif name not in LEFT_OUT:
            values[name] = value
    if TABLE in values:
        values = _own_pages(values)
    return {n: _copied(v) if isinstance(v, Tensor) else v for n, v in values.items()}


def _own_pages(values: dict[str, Any]) -> dict[str, Any]:
    """Caches cut down to the pages that the table names, and the table renumbered."""
    caches = {name: values[name] for name in PAGED if isinstance(values.get(name), Tensor)}
    if not caches:
        return values
    name, cache = next(iter(caches.items()))
    table, pages = values[TABLE], cache.shape[PAGED[name]]
    valid = (table >= 0) & (table < pages)  # other entries are beyond a request's length
    own = table[valid].long().unique()
    number = torch.full((pages,), -1, dtype=table.dtype, device=table.device)
    number[own] = torch.arange(len(own), dtype=table.dtype, device=table.device)
    renumbered = torch.where(valid, number[table.long().clamp(0, pages - 1)], -1)
    cut = {name: cache.index_select(PAGED[name], own) for name, cache in caches.items()}
    return values | cut | {TABLE: renumbered}


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU; a view with gaps between its rows keeps them."""
    tensor = tensor.detach()
    size, stride = tensor.shape, tensor.stride()
    if tensor.numel() == 0 or 0 in stride:
        return tensor.to("cpu", copy=True)
    return torch.empty_strided(size, stride, dtype=tensor.dtype).copy_(tensor)
