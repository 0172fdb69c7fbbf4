"""The paged KV cache of a model."""

from __future__ import annotations

import torch
from torch import Tensor

import tlt_ext

from ..common.releasable import ReleasableMemory
from .spec import ModelSpec


class KvCache:
    """Keys and values of all layers, in zeroed pages that block tables point to.

    It is that of a model, or of a part of it (`TargetModel.shard.spec`). A page holds `page_size`
    consecutive slots of a request. The recorded features have `feature_size` columns; 0 = none are
    recorded.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_pages: int,
        page_size: int,
        feature_size: int = 0,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.num_pages, self.page_size, dtype = num_pages, page_size, dtype or spec.dtype
        self.memory = ReleasableMemory(torch.device(device))  # and that of the drafter's pages
        # [num_layers, num_pages, page_size, num_kv_heads, head_dim]
        shape = (spec.num_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        self.k, self.v = (self.memory.zeros(*shape, dtype=dtype) for _ in range(2))
        # [num_pages, page_size, feature_size], the first columns of the target's features,
        # addressed by the same block tables; None if there is no drafter.
        self.features: Tensor | None = None
        if feature_size:
            self.features = self.memory.zeros(num_pages, page_size, feature_size, dtype=dtype)

    def commit(
        self, rows: tlt_ext.Rows, path: Tensor, num_emitted: Tensor, features: Tensor | None
    ) -> None:
        """Commits the accepted rows of a pass, and the columns of `features` that are recorded."""
        if features is not None and self.features is not None:
            features = features[:, : self.features.shape[2]]
        tlt_ext.commit_path(
            self.k,
            self.v,
            rows,
            path=path,
            num_emitted=num_emitted,
            features=self.features,
            feature_rows=features,
        )

    def paged_tensors(self) -> list[Tensor]:
        """All tensors that are divided into pages, each [layers, num_pages, ...]."""
        return [self.k, self.v, *([] if self.features is None else [self.features[None]])]
