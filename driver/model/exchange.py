"""What the ranks of a tensor-parallel group exchange in a pass."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tlt_ext

from ..common.symmetric import SymmetricArrays
from ..common.tensor_parallel import GRACE_S, TensorParallel


class Exchange:
    """Gathers a float32 array [rows, width] of each rank, on every rank, by NCCL or Gloo."""

    def __init__(
        self, parallel: TensorParallel, rows: int, width: int, device: torch.device
    ) -> None:
        self.parallel = parallel
        # Zeros: inert rows and missing columns are sent too.
        self.array = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self.every = self.array.new_zeros(parallel.size * self.array.numel())

    def own(self, rows: int) -> Tensor:
        """This rank's array [rows, width], to be written before an exchange."""
        return self.array[:rows]

    def gather(self, rows: int) -> list[Tensor]:
        """The arrays of all ranks, in their order."""
        own, size = self.array[:rows], self.parallel.size
        every = self.every[: size * own.numel()].view(size, *own.shape)
        self.parallel.all_gather(own, every)
        return list(every)

    def fold(self, rows: int, out: Tensor, **addends: Any) -> None:
        """Writes the sum of all ranks' partial sums, plus bias and residual, rounded once.

        Args:
            out: [rows, width].
            addends: `bias`, `residual` of `tlt_ext.fold_partials`.
        """
        tlt_ext.fold_partials(self.gather(rows), out, **addends)


def agree(group: dist.ProcessGroup, value: Any) -> bool:
    """Whether all ranks of a group have the same value; a collective call."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return all(other == value for other in values)


def shared_arrays(
    parallel: TensorParallel, rows: int, width: int, device: torch.device, count: int = 1
) -> Sequence[Exchange | SymmetricArrays]:
    """Arrays [rows, width] of each rank; a collective call.

    Args:
        count: of instances; partial sums need two, which alternate.
    """
    group = parallel.group if parallel.symmetric and device.type == "cuda" else None
    if group is not None and agree(group, socket.gethostname()):
        timeout_s, shared = parallel.world.timeout_s + GRACE_S, None
        try:
            shared = SymmetricArrays.allocate(group, rows, width, device, timeout_s, count)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            warnings.warn(f"GPUs share no memory, so NCCL exchanges sums: {why}", stacklevel=2)
        if agree(group, shared is not None) and shared is not None:
            return shared
    return [Exchange(parallel, rows, width, device)] * count
