"""Float32 master weights of a model's parameters, which the optimizer updates."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..common.world import World

WIDE = (torch.float32, torch.float64)


class MasterWeights:
    """The trained parameters, and float32 copies of those in half precision.

    Parameters in float32 or float64 are their own masters. With several ranks each may hold a part
    of every master and of the optimizer's state.

    Args:
        model: trained in place: views of its parameters stay valid. The same on all ranks.
        world: ranks whose gradients are added up.
        shard: whether each rank holds only a part.

    Example:
        >>> weights = MasterWeights(torch.nn.Linear(2, 2).bfloat16())
        >>> weights.masters[0].dtype
        torch.float32
    """

    def __init__(self, model: nn.Module, world: World | None = None, shard: bool = False) -> None:
        self.world = world or World()
        self._shards = None
        if shard and self.world.size > 1:
            from ..common.shards import Shards  # slow to import

            self._shards = Shards(self.world.device)
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters: list[Tensor] = [self._master(p) for p in self.params]
        # This rank adds up the gradients of each parameter in the `grad` of these.
        self._sums: list[Any] = self.masters
        if self._shards is not None:
            self._sums = [p if p.dtype in WIDE else SimpleNamespace(grad=None) for p in self.params]

    def _master(self, param: Tensor) -> Tensor:
        if param.dtype in WIDE and self._shards is None:
            return param
        whole = param.detach() if param.dtype in WIDE else param.detach().float()
        return self.part(whole).requires_grad_()

    @property
    def copies(self) -> list[Tensor]:
        """The masters of parameters in half precision."""
        pairs = zip(self.params, self.masters, strict=True)
        return [master for param, master in pairs if param.dtype not in WIDE]

    def together(self) -> AbstractContextManager[None]:
        """A block in which ranks exchange parts; a lost rank is named in the error."""
        return contextlib.nullcontext() if self._shards is None else self.world.together()

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that all ranks have, or all of it without sharding."""
        return whole if self._shards is None else self._shards.part(whole)

    def saved(self, part: Tensor) -> Tensor:
        """The whole tensor for a checkpoint, on rank 0's host; all ranks must call it together."""
        if self._shards is None:
            return part
        whole = self._shards.whole(part)  # one at a time: all at once may not fit on the GPU
        return whole.cpu() if self.world.rank == 0 else whole.new_empty(0)

    def collect_gradients(self) -> None:
        """Adds the parameters' gradients to their sums; call after each backward pass."""
        # In float32: sums in bfloat16 would lose small shares of micro-batches.
        found = [
            (p, s)
            for p, s in zip(self.params, self._sums, strict=True)
            if s is not p and p.grad is not None
        ]
        first = [(p, s) for p, s in found if s.grad is None]
        more = [(p, s) for p, s in found if s.grad is not None]
        for param, total in first:
            total.grad = torch.empty_like(param, dtype=torch.float32)
        if first:
            torch._foreach_copy_(_gradients(s for _, s in first), _gradients(p for p, _ in first))
        if more:
            torch._foreach_add_(_gradients(s for _, s in more), _gradients(p for p, _ in more))
        for param, _ in found:
            param.grad = None

    def sum_gradients(self) -> None:
        """Sets the masters' gradients to the sums over all ranks; call before `step`."""
        if self.world.size == 1:
            return
        for param, total in zip(self.params, self._sums, strict=True):
            if total.grad is None:  # this rank had no micro-batch
                wide = param.dtype if param.dtype in WIDE else torch.float32
                total.grad = torch.zeros_like(param, dtype=wide)
        if self._shards is None:
            self.world.sum_([total.grad for total in self._sums])
            return
        with self.world.together():
            for master, total in zip(self.masters, self._sums, strict=True):
                addend, total.grad = total.grad, None
                master.grad = self._shards.add_up(addend)

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float, lr: float) -> Tensor:
        """Clips the masters' gradients, updates the parameters and clears the gradients.

        A gradient that is not finite is skipped with a warning.

        Args:
            optimizer: over `masters`.
            max_norm: bound of the gradient's norm.
            lr: learning rate of this step.

        Returns:
            The gradient's norm before clipping, float [].
        """
        with self.together():
            norm = nn.utils.clip_grad_norm_(self.masters, max_norm)  # []
            if self._shards is not None:
                norm = self._shards.whole(norm)
            if torch.isfinite(norm):
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
                self._write()
            else:
                warnings.warn("gradient is not finite: this update is skipped", stacklevel=3)
        optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def _write(self) -> None:
        if self._shards is None:
            halves: list[Tensor] = [p for p in self.params if p.dtype not in WIDE]
            if halves:
                torch._foreach_copy_(halves, self.copies)
            return
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(self._shards.whole(master.to(param.dtype)))


def _gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [cast(Tensor, tensor.grad) for tensor in tensors]
