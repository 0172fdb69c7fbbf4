"""Float32 masters of a model's parameters: what an optimizer works on."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn


class MasterWeights:
    """The parameters that are trained, and float32 copies of those that are of half precision.

    Parameters of float32 and wider are their own masters.

    Args:
        model: trained in place: views of its parameters stay valid.

    Example:
        >>> weights = MasterWeights(torch.nn.Linear(2, 2).bfloat16())
        >>> weights.masters[0].dtype
        torch.float32
    """

    def __init__(self, model: nn.Module) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [
            p if p.dtype in (torch.float32, torch.float64) else p.detach().float().requires_grad_()
            for p in self.params
        ]

        self._copied = [
            (p, m) for p, m in zip(self.params, self.masters, strict=True) if m is not p
        ]

    @property
    def copies(self) -> list[Tensor]:
        """The masters that are not parameters."""
        return [master for _, master in self._copied]

    def collect_gradients(self) -> None:
        """Adds the parameters' gradients to their masters'; call after each backward pass."""
        # Sums over micro-batches stay in float32: bfloat16 would round small shares away.
        pairs = [pair for pair in self._copied if pair[0].grad is not None]
        first = [(p, m) for p, m in pairs if m.grad is None]
        more = [(p, m) for p, m in pairs if m.grad is not None]
        for _, master in first:
            master.grad = torch.empty_like(master)
        # Lists of tensors: a kernel for many of them.
        if first:
            torch._foreach_copy_([m.grad for _, m in first], [p.grad for p, _ in first])
        if more:
            torch._foreach_add_([m.grad for _, m in more], [p.grad for p, _ in more])
        for param, _ in pairs:
            param.grad = None

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float, lr: float) -> Tensor:
        """Clips the masters' gradients, steps and writes the parameters; clears the gradients.

        A gradient that is not finite is a warning and changes nothing.

        Args:
            optimizer: over `masters`.
            max_norm: of the gradient.
            lr: learning rate of this step.

        Returns:
            The gradient's norm before the clipping, float [].
        """
        norm = nn.utils.clip_grad_norm_(self.masters, max_norm)  # []
        if torch.isfinite(norm):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            if self._copied:
                with torch.no_grad():
                    torch._foreach_copy_([p for p, _ in self._copied], self.copies)
        else:
            warnings.warn("gradient is not finite: this update is skipped", stacklevel=3)
        optimizer.zero_grad()
        return norm
