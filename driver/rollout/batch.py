"""The device's view of the running requests, rebuilt when membership or pages change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from driver.rollout.scheduler import Sequence


@dataclass(frozen=True)
class Batch:
    """Arrays over the running requests, in the scheduler's order."""

    sequences: list[Sequence]
    temperature: Tensor  # float32 [B]
    top_k: Tensor  # int32 [B]
    top_p: Tensor  # float32 [B]
    request: Tensor  # int64 [B]
    stop_ids: Tensor  # int32 [B, S], -1 = unused
    block_table: Tensor  # int32 [B, pages]
    context_len: Tensor  # int32 [B]
    status: Tensor  # int32 [B]

    def __len__(self) -> int:
        return len(self.sequences)

    def last_tokens(self) -> Tensor:
        """int32 [B]: the root of each request's next pass."""
        last = [s.tokens[-1] for s in self.sequences]
        return torch.tensor(last, dtype=torch.int32, device=self.context_len.device)

    def limits(self) -> Tensor:
        """int32 [B]: tokens each request may still emit."""
        left = [s.remaining for s in self.sequences]
        return torch.tensor(left, dtype=torch.int32, device=self.context_len.device)


def block_table(pages: list[list[int]], device: torch.device) -> Tensor:
    """int32 [B, longest]: page lists side by side; past its end a row holds -1."""
    width = max(1, max((len(row) for row in pages), default=1))
    rows = [row + [-1] * (width - len(row)) for row in pages]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(pages), width)


def build_batch(sequences: list[Sequence], device: torch.device) -> Batch:
    """Gathers the requests' parameters, pages and lengths."""
    params = [s.request.params for s in sequences]
    width = max(1, max((len(p.stop_ids) for p in params), default=1))
    stops = [list(p.stop_ids) + [-1] * (width - len(p.stop_ids)) for p in params]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Batch(
        sequences=list(sequences),
        temperature=torch.tensor([p.temperature for p in params], device=device),
        top_k=ints([p.top_k for p in params]),
        top_p=torch.tensor([p.top_p for p in params], device=device),
        request=torch.tensor([s.request.id for s in sequences], dtype=torch.int64, device=device),
        stop_ids=torch.tensor(stops, dtype=torch.int32, device=device).view(len(stops), width),
        block_table=block_table([s.pages for s in sequences], device),
        context_len=ints([s.context_len for s in sequences]),
        status=torch.zeros(len(sequences), dtype=torch.int32, device=device),
    )
