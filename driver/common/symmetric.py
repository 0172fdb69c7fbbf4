"""Arrays in memory that the GPUs of one host share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tlt_ext
from tlt_ext.limits import MAX_FOLD_BLOCKS


@dataclass(frozen=True)
class SymmetricArrays:
    """A float32 array of each rank, which the kernels of all ranks read.

    With two instances that alternate a rank writes its next sums while others read its last ones.
    All ranks make the same calls, on one stream each.

    Example:
        >>> tlt_ext.linear_rows(x, weight, sums.own(rows), parts=4)  # doctest: +SKIP
        >>> sums.fold(rows, out, residual=hidden)                    # doctest: +SKIP
    """

    rank: int  # of this process in the group
    arrays: Sequence[Tensor]  # by rank, [rows, width]
    flags: Sequence[Tensor]  # by rank, of `tlt_ext.fold_partials`
    timeout_s: float  # of a wait for another rank; then the kernel ends with an error
    memory: tuple[Tensor, Any]  # of this rank, and its handle

    @staticmethod
    def allocate(
        group: dist.ProcessGroup,
        rows: int,
        width: int,
        device: torch.device,
        timeout_s: float,
        count: int = 2,
    ) -> tuple[SymmetricArrays, ...]:
        """`count` instances that share flags, for up to `rows` rows; a collective call.

        Raises RuntimeError if the processes cannot share memory of their GPUs.
        """
        # Nothing here uses multicast memory, which fails on hosts without a fabric manager.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        from torch.distributed import _symmetric_memory as symmetric

        size, numel = group.size(), rows * width
        words = count * numel + MAX_FOLD_BLOCKS * size
        memory = symmetric.empty(words, dtype=torch.float32, device=device)
        handle: Any = symmetric.rendezvous(memory, group)
        memory.zero_()
        handle.barrier()  # no rank writes before all are zero
        torch.cuda.synchronize(device)

        def of_all(shape: tuple[int, int], dtype: torch.dtype, at: int) -> list[Tensor]:
            return [handle.get_buffer(r, shape, dtype, at) for r in range(size)]

        flags = of_all((MAX_FOLD_BLOCKS, size), torch.int32, count * numel)
        return tuple(
            SymmetricArrays(
                group.rank(),
                of_all((rows, width), torch.float32, at * numel),
                flags,
                timeout_s,
                (memory, handle),
            )
            for at in range(count)
        )

    def own(self, rows: int) -> Tensor:
        """This rank's array [rows, width], to be written before an exchange."""
        return self.arrays[self.rank][:rows]

    def gather(self, rows: int) -> list[Tensor]:
        """The arrays of all ranks, to be read by the next kernels.

        A rank may write its array again after the next exchange of another instance.
        """
        few = [array[:1, :4] for array in self.arrays]
        self._fold(few, torch.empty_like(few[self.rank]))  # only its wait matters
        return [array[:rows] for array in self.arrays]

    def fold(self, rows: int, out: Tensor, **addends: Any) -> None:
        """Writes the sum of all ranks plus `bias` and `residual`, rounded once, to `out`."""
        self._fold([array[:rows] for array in self.arrays], out, **addends)

    def _fold(self, partials: Sequence[Tensor], out: Tensor, **addends: Any) -> None:
        waits: Any = {"flags": self.flags, "rank": self.rank, "timeout_s": self.timeout_s}
        tlt_ext.fold_partials(partials, out, **waits, **addends)
