"""The paged KV cache of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.releasable import ReleasableMemory
from .spec import ModelSpec


@dataclass(frozen=True)
class KvCache:
    """Keys and values of all layers, in pages that block tables point to."""

    k: Tensor  # [num_layers, num_pages, page_size, num_kv_heads, head_dim], dtype of the model
    v: Tensor  # like k
    # [num_pages, page_size, feature_size], the first columns of the target's features, addressed by
    # the same block tables; None if there is no drafter.
    features: Tensor | None
    memory: ReleasableMemory  # theirs and that of the drafter's pages

    @staticmethod
    def allocate(
        spec: ModelSpec,
        *,
        num_pages: int,
        page_size: int,
        feature_size: int = 0,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> KvCache:
        """Allocates a zeroed cache for a model, or a part of it (`TargetModel.shard.spec`).

        A page holds `page_size` consecutive slots of a request. The recorded features have
        `feature_size` columns; 0 = none are recorded.
        """
        memory, dtype = ReleasableMemory(torch.device(device)), dtype or spec.dtype
        shape = (spec.num_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        k, v = (memory.zeros(*shape, dtype=dtype) for _ in range(2))
        features = None
        if feature_size:
            features = memory.zeros(num_pages, page_size, feature_size, dtype=dtype)
        return KvCache(k, v, features, memory)

    def recorded(self, rows: Tensor | None) -> Tensor | None:
        """The columns of a pass's features that are recorded; None if none are."""
        return None if rows is None or self.features is None else rows[:, : self.features.shape[2]]

    def paged_tensors(self) -> list[Tensor]:
        """All tensors that are divided into pages, each [layers, num_pages, ...]."""
        return [self.k, self.v, *([] if self.features is None else [self.features[None]])]

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        return self.k.shape[2]
