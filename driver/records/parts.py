"""The part of a checkpoint that ranks write together: one safetensors file each, or several.

Any number of ranks can load it, whatever number saved it.
"""

import json
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..common.errors import UserError

FILE_BYTES = 1 << 30  # of a file with several tensors
WRITERS = 8  # files of a rank that are written at once
# A single rank has no process group. Not in a block: threads share the filters.
warnings.filterwarnings("ignore", "torch.distributed is disabled")

Parts = Mapping[str, Mapping[str, Tensor]]


def save_parts(folder: Path, parts: Parts, group: dist.ProcessGroup | None) -> None:
    """Saves tensors as torch's distributed checkpoints do; with several ranks a collective call.

    torch's own writer serializes a file in memory, copies it twice and writes one at a time. Parts
    are `DTensor`s if several ranks hold them. Raises UserError on all ranks if one could not write.
    """
    if group is not None:
        dist.barrier(group)  # the first rank has made the folder
    errors = [""]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, 0 if group is None else dist.get_rank(group), _flat(parts))
    except (OSError, SafetensorError) as error:
        errors = [f"{type(error).__name__}: {error}".splitlines()[0]]
    if group is not None:
        mine, errors = errors[0], [""] * dist.get_world_size(group)
        dist.all_gather_object(errors, mine, group)
    if any(errors):
        reason = next(filter(None, errors))
        raise UserError(
            f"{folder}: cannot be written ({reason}); free space or choose another path"
        )


def _write(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    files: dict[int, dict[str, Any]] = {}
    total = 0
    for name, tensor in tensors.items():
        files.setdefault(total // FILE_BYTES, {})[name] = tensor
        total += tensor.nbytes

    def write(number: int, held: Mapping[str, Any]) -> None:
        local = {n: x.to_local() if hasattr(x, "to_local") else x for n, x in held.items()}
        local = {n: x.detach().cpu().contiguous() for n, x in local.items() if x.numel()}
        offsets = {name: {"saved_offsets": _offsets(held[name])} for name in local}
        title = f"shard-{rank + 1:05d}-model-{number:05d}-of-{len(files):05d}.safetensors"
        about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(local, folder / title, about)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(1, len(files) + 1), files.values()))


def _offsets(tensor: Any) -> list[int]:
    """Where this rank's part begins in each dimension of the whole tensor."""
    if not hasattr(tensor, "to_local"):
        return [0] * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

    return list(place(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def load_parts(folder: Path, parts: Parts, group: dist.ProcessGroup | None) -> None:
    """Copies what `save_parts` saved into tensors, or UserError; a collective call of the ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(folder))
    try:
        dcp.load(_flat(parts), storage_reader=reader, process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
        raise UserError(f"{folder}: cannot be read ({reason})") from error


def _flat(parts: Parts) -> dict[str, Tensor]:
    return {f"{kind}.{name}": x for kind, named in parts.items() for name, x in named.items()}
