"""Scratch memory that callers provide to ops."""

from typing import Any

import torch
from torch import Tensor

import tlt_ext


class Workspace:
    """One array that grows to the largest requested size; None on the CPU, where no op needs it.

    Ops of one stream share it, since none reads what another has left there. Smaller arrays are
    kept, because captured graphs still write to them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._outgrown: list[Tensor] = []

    def take(self, wanted: int) -> Tensor | None:
        """uint8 [>= wanted], zero where it was never used; None for 0 bytes and on the CPU."""
        if wanted == 0 or self.device.type == "cpu":
            return None
        if len(self._bytes) < wanted:
            self._outgrown.append(self._bytes)
            size = max(wanted, 2 * len(self._bytes))
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._bytes

    def for_sampling(self, logits: Tensor) -> Tensor | None:
        return self.take(tlt_ext.sampling_workspace_bytes(len(logits)))

    def for_attention(self, q: Tensor, k_cache: Tensor, block_table: Any) -> Tensor | None:
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
