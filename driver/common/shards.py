"""Tensors of which each rank holds some rows, by torch's `DTensor`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor


class Shards:
    """Cuts tensors over all ranks, and puts them together again.

    Args:
        device: where this rank works.
    """

    def __init__(self, device: str) -> None:
        self._mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that all ranks have."""
        rows = distribute_tensor(whole.detach(), self._mesh, [Shard(0)], src_data_rank=None)
        return rows.clone()  # a view would keep the whole

    def add_up(self, addend: Tensor) -> Tensor:
        """This rank's rows of the sum of what all ranks have; they call it together."""
        addends = DTensor.from_local(addend, self._mesh, [Partial()], run_check=False)
        return addends.redistribute(placements=[Shard(0)])

    @staticmethod
    def whole(part: Tensor) -> Tensor:
        """The tensor of which all ranks have rows; they call it together."""
        return part.full_tensor() if isinstance(part, DTensor) else part
