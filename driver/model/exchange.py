"""What the ranks of a tensor-parallel group exchange in a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tlt_ext

from ..common.symmetric import SymmetricSums, on_one_host
from ..common.tensor_parallel import GRACE_S, TensorParallel


@dataclass(frozen=True)
class Exchange:
    """Gathers a float32 array of each rank, on every rank.

    Attributes:
        parallel: the group.
        own: [rows, width], this rank's array.
        every: room for those of all ranks.

    Example:
        >>> part = exchange.partial(rows)             # doctest: +SKIP
        >>> tlt_ext.linear_rows(x, weight, part, parts=4)    # doctest: +SKIP
        >>> exchange.fold(rows, out, residual=hidden)   # doctest: +SKIP
    """

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
            rows: of the sums.
            out: [rows, width].
            addends: `bias`, `residual` of `tlt_ext.fold_partials`.
        """
        tlt_ext.fold_partials(list(self.gather(rows)), out, **addends)


def shared_sums(
    parallel: TensorParallel, rows: int, width: int, device: torch.device
) -> tuple[Exchange, Exchange] | tuple[SymmetricSums, SymmetricSums]:
    """Two places for partial sums, which take turns: on cards of one host their shared memory.

    Args:
        parallel: the group.
        rows: at most, of an exchange.
        width: of a row.
        device: of this rank.
    """
    if device.type == "cuda" and parallel.group is not None and on_one_host(parallel.group):
        timeout_s = parallel.world.timeout_s + GRACE_S
        return SymmetricSums.allocate(parallel.group, rows, width, device, timeout_s)
    sums = Exchange.allocate(parallel, rows, width, device)
    return sums, sums
