"""Scratch memory that ops ask of their caller."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tlt_ext


class Workspace:
    """One array that grows to the largest size asked for; None on the CPU, where no op needs it.

    Ops of one stream may share it: what they leave there means nothing to the next. An array that
    was outgrown is kept, since captured graphs go on writing to it.

    Args:
        device: where the ops run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._outgrown: list[Tensor] = []

    def take(self, wanted: int) -> Tensor | None:
        """uint8 of at least `wanted` bytes, zero where it was never used, or None for 0."""
        if wanted == 0 or self.device.type == "cpu":
            return None
        if len(self._bytes) < wanted:
            self._outgrown.append(self._bytes)
            size = max(wanted, 2 * len(self._bytes))
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._bytes

    def for_sampling(self, logits: Tensor) -> Tensor | None:
        """What `verify_tree` wants for these logits."""
        return self.take(tlt_ext.sampling_workspace_bytes(len(logits)))

    def for_attention(self, q: Tensor, k_cache: Tensor, block_table: Any) -> Tensor | None:
        """What `tree_attention` wants for these arrays."""
        if self.device.type == "cpu":
            return None
        return self.take(
            tlt_ext.attention_workspace_bytes(
                num_requests=len(block_table),
                num_rows=q.shape[0],
                num_heads=q.shape[1],
                num_kv_heads=k_cache.shape[2],
                head_dim=q.shape[2],
                max_slots=block_table.shape[1] * k_cache.shape[1],
            )
        )
