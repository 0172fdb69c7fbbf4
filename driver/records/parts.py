"""The part of a checkpoint that ranks write together: one safetensors file each, or several.

Any number of ranks can load it, whatever number saved it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..common.errors import UserError

FILE_BYTES = 1 << 32  # a file is serialized in memory
# A single rank has no process group. Not in a block: threads share the filters.
warnings.filterwarnings("ignore", "torch.distributed is disabled")

Parts = Mapping[str, Mapping[str, Tensor]]


def save_parts(folder: Path, parts: Parts, group: dist.ProcessGroup | None) -> None:
    """Saves tensors; with several ranks a collective call.

    Args:
        folder: exists when the first rank calls.
        parts: tensors by two names; `DTensor`s if several ranks hold parts.
        group: of the ranks; None = there is one.

    Raises:
        UserError: a rank could not write.
    """
    # Slow to import.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    if group is not None:
        dist.barrier(group)  # the first rank has made the folder
    files, total, flat = {}, 0, _flat(parts)
    for name, tensor in flat.items():
        files[name] = 1 + total // FILE_BYTES
        total += tensor.nbytes
    writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    try:
        dcp.save(flat, storage_writer=writer, process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:
        raise UserError(f"{folder}: cannot be written ({_reason(error)})") from error


def load_parts(folder: Path, parts: Parts, group: dist.ProcessGroup | None) -> None:
    """Copies saved values into tensors; with several ranks a collective call.

    Args:
        folder: see `save_parts`.
        parts: tensors by two names, all of which the folder must hold.
        group: of the ranks; None = there is one.

    Raises:
        UserError: a tensor is missing, has another shape or cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(folder))
    try:
        dcp.load(_flat(parts), storage_reader=reader, process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:
        raise UserError(f"{folder}: cannot be read ({_reason(error)})") from error


def _flat(parts: Parts) -> dict[str, Tensor]:
    return {f"{kind}.{name}": x for kind, named in parts.items() for name, x in named.items()}


def _reason(error: Any) -> str:
    """The first error of a rank, in one line."""
    cause, _ = next(iter(error.failures.values()))
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
