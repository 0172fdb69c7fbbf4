"""The paged KV cache of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from driver.checkpoint import ModelSpec


@dataclass(frozen=True)
class KvCache:
    """Keys and values of all layers, in pages that block tables point to.

    Attributes:
        k, v: [num_layers, num_pages, page_size, num_kv_heads, head_dim], dtype of the model.
    """

    k: Tensor
    v: Tensor

    @staticmethod
    def allocate(
        spec: ModelSpec,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> KvCache:
        """Makes a zeroed cache.

        Args:
            spec: the model.
            num_pages, page_size: the pool; a page holds `page_size` consecutive slots of a request.
            dtype: of the model; default is the checkpoint's.
            device: of the model.

        Returns:
            The cache.
        """
        shape = (spec.num_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        k, v = (torch.zeros(shape, dtype=dtype or spec.dtype, device=device) for _ in range(2))
        return KvCache(k, v)

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        return self.k.shape[2]
