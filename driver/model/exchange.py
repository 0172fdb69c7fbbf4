"""What the ranks of a tensor-parallel group exchange in a pass."""

from __future__ import annotations

import socket
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tlt_ext

from ..common.symmetric import SymmetricSums
from ..common.tensor_parallel import GRACE_S, TensorParallel


@dataclass(frozen=True)
class Exchange:
    """Gathers a float32 array of each rank, on every rank."""

    parallel: TensorParallel
    own: Tensor
    every: Tensor

    @staticmethod
    def allocate(parallel: TensorParallel, rows: int, width: int, device: torch.device) -> Exchange:
        """Arrays of at most `rows` rows."""
        # Zeros: inert rows and missing columns are sent too.
        own = torch.zeros(rows, width, dtype=torch.float32, device=device)
        return Exchange(parallel, own, own.new_zeros(parallel.size * own.numel()))

    def partial(self, rows: int) -> Tensor:
        """This rank's array [rows, width], to be written before the exchange."""
        return self.own[:rows]

    def gather(self, rows: int) -> Tensor:
        """The arrays of all ranks, in their order: [size, rows, width]."""
        own, size = self.own[:rows], self.parallel.size
        every = self.every[: size * own.numel()].view(size, *own.shape)
        self.parallel.all_gather(own, every)
        return every

    def fold(self, rows: int, out: Tensor, **addends: Any) -> None:
        """Writes the sum of all ranks' partial sums, plus bias and residual, rounded once.

        Args:
            out: [rows, width].
            addends: `bias`, `residual` of `tlt_ext.fold_partials`.
        """
        tlt_ext.fold_partials(list(self.gather(rows)), out, **addends)


def agree(group: dist.ProcessGroup, value: Any) -> bool:
    """Whether all ranks of a group have the same value; a collective call."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return all(other == value for other in values)


def shared_sums(
    parallel: TensorParallel, rows: int, width: int, device: torch.device
) -> tuple[Exchange, Exchange] | tuple[SymmetricSums, SymmetricSums]:
    """Two places for partial sums [rows, width], which alternate."""
    group = parallel.group if parallel.symmetric and device.type == "cuda" else None
    if group is not None and agree(group, socket.gethostname()):
        timeout_s, shared = parallel.world.timeout_s + GRACE_S, None
        try:
            shared = SymmetricSums.allocate(group, rows, width, device, timeout_s)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            warnings.warn(f"cards share no memory, so NCCL exchanges sums: {why}", stacklevel=2)
        if agree(group, shared is not None) and shared is not None:
            return shared
    sums = Exchange.allocate(parallel, rows, width, device)
    return sums, sums
