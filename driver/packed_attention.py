"""Causal attention within each document of a packed row, as a transformers attention function.

No [T, T] mask: work grows with the sum of the documents' squares, and a document's result does not
depend on what it is packed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from driver.packing import packed_positions

NAME = "packed"


def use_packed_attention(model: PreTrainedModel) -> None:
    """Lets `model` take packed rows; other calls are as before.

    Args:
        model: with the attention interface of transformers; changed in place.

    Example:
        >>> use_packed_attention(model)
        >>> model(ids, use_cache=False, **packed_inputs([2, 3]))
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def packed_inputs(lengths: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Any]:
    """What the forward pass of a packed row is called with, besides its ids.

    Args:
        lengths: tokens of each document of the row.
        device: of the model.

    Returns:
        `position_ids` int64 [1, T] that restart at every document, `cu_seq_lens_q` int32 [D + 1],
        `max_length_q`, and an empty mask, so that none is made.

    Example:
        >>> packed_inputs([2, 3])["cu_seq_lens_q"].tolist()
        [0, 2, 5]
    """
    bounds = [0, *accumulate(lengths)]
    return {
        "position_ids": packed_positions(lengths, device),
        "cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32, device=device),
        "max_length_q": max(lengths),
        "attention_mask": torch.empty(1, 1, 0, 0, device=device),
    }


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, with the interface of transformers.

    Args:
        module: the attention layer.
        query: [1, heads, T, head_dim].
        key: [1, kv_heads, T, head_dim].
        value: like key.
        attention_mask: unused in a packed row.
        scaling: of the scores; default 1 / sqrt(head_dim).
        cu_seq_lens_q: int32 [D + 1], bounds of the documents; None = not a packed row.
        max_length_q: tokens of the longest.

    Returns:
        [1, T, heads, head_dim], and None for the weights.

    Source: variable-length FlashAttention (Dao, 2023) on a GPU in half precision; elsewhere one
    call of torch's attention a document.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn  # asks for a recent torch

        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, head_dim]
        bounds, longest = cu_seq_lens_q, max_length_q
        out = varlen_attn(
            q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0)
        )
        return out.unsqueeze(0), None
    lengths = cu_seq_lens_q.diff().tolist()
    parts = [x.split(lengths, dim=2) for x in (query, key, value)]
    documents = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(documents, dim=2).transpose(1, 2), None  # [1, T, heads, head_dim]
