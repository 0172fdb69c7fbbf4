"""A tensor-parallel group: ranks that hold parts of one model and make the same passes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UserError
from .world import World, backend_of

T = TypeVar("T")
GRACE_S = 10.0  # by which GPUs wait longer, so that the host names the lost rank first

# all_gather_into_tensor is the name before torch 2.13.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in its group of consecutive ranks; by default it holds the whole model.

    `symmetric`: GPUs of one host exchange data through memory that they share, if they can;
    otherwise NCCL does.
    """

    rank: int = 0
    size: int = 1
    world: World = field(default_factory=World)
    group: dist.ProcessGroup | None = None
    symmetric: bool = True

    @staticmethod
    def of(world: World, size: int, symmetric: bool = True) -> TensorParallel:
        """The group of this rank, of `size` ranks; a collective call."""
        check_group(world.size, size)
        if size == 1:
            return TensorParallel(world=world)
        seconds = world.timeout_s + (GRACE_S if world.device.startswith("cuda") else 0.0)
        wait, mine = datetime.timedelta(seconds=seconds), None
        for first in range(0, world.size, size):  # every rank makes every group
            ranks = list(range(first, first + size))
            group = dist.new_group(ranks, timeout=wait, backend=backend_of(world.device))
            mine = group if world.rank in ranks else mine
        return TensorParallel(world.rank % size, size, world, mine, symmetric)

    @property
    def ranks(self) -> list[int]:
        first = self.world.rank - self.rank
        return list(range(first, first + self.size))

    def decide(self, choose: Callable[[], T]) -> T:
        """What the first rank of the group chooses; the others do not call `choose`.

        A choice that depends on time must be one for all ranks, or their passes would differ.
        """
        if self.size == 1:
            return choose()
        box: list[Any] = [choose() if self.rank == 0 else None]
        with self.world.waiting(self.ranks):
            dist.broadcast_object_list(box, src=self.ranks[0], group=self.group)
        return box[0]

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        """Writes the parts of all ranks, in their order, into `out` [size, *part.shape]."""
        with self.world.waiting(self.ranks):
            all_gather(out.flatten(0, 1), part, group=self.group)

    def check(self, begun_s: float) -> None:
        """Raises UserError if a pass begun at `begun_s` (`time.monotonic`) exceeds its time."""
        if self.size == 1 or time.monotonic() < begun_s + self.world.timeout_s:
            return
        backend: Any = self.group
        with self.world.waiting(self.ranks):
            if self.world.device.startswith("cuda"):  # ends the kernels that wait
                backend._get_backend(torch.device(self.world.device)).abort()
            raise RuntimeError("a pass has not ended in time")


def check_group(ranks: int, size: int) -> None:
    """Raises UserError if a number of ranks is no multiple of the size of a group."""
    if ranks % size:
        raise UserError(
            f"engine.tensor_parallel={size}: the number of ranks must be a multiple of it, got"
            f" {ranks}; start with torchrun --nproc-per-node={size} (--dry-run: ranks={size})"
        )
