"""Tensors whose rows are sharded over the ranks, with torch's `DTensor`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor


class Shards:
    """Shards tensors over all ranks, and joins the shards.

    Args:
        device: device of this rank.
    """

    def __init__(self, device: str) -> None:
        self._mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that all ranks have."""
        rows = distribute_tensor(whole.detach(), self._mesh, [Shard(0)], src_data_rank=None)
        return rows.clone()  # a view would keep the whole

    def add_up(self, addend: Tensor) -> Tensor:
        """This rank's rows of the sum over all ranks; a collective call."""
        addends = DTensor.from_local(addend, self._mesh, [Partial()], run_check=False)
        return addends.redistribute(placements=[Shard(0)])

    @staticmethod
    def whole(part: Tensor) -> Tensor:
        """The whole tensor from the shards of all ranks; a collective call."""
        return part.full_tensor() if isinstance(part, DTensor) else part
