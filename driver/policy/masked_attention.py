"""Attention within the documents of a packed row of fixed length, for CUDA graphs.

All that depends on the documents is in arrays, so one capture serves every row of a length.
FlashAttention reads the length of the longest document on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens of a block of the mask


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Attention of queries [T, heads, head_dim] over keys and values with the heads they share.

    Source: FlexAttention (arXiv 2412.05496), whose gradients are deterministic.
    """
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, T, head_dim]
    attended = _flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)  # [T, heads, head_dim]


@functools.cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # slow to import

    return torch.compile(flex_attention)


def block_mask(position: Tensor) -> BlockMask:
    """The mask of causal attention within documents.

    Args:
        position: int64 [T], from 0 in every document; T is a multiple of `BLOCK`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    start = torch.arange(len(position), device=position.device) - position  # of its document, [T]
    blocks = torch.arange(len(position) // BLOCK, device=position.device)  # [B]
    first, last = start[::BLOCK, None] // BLOCK, start[BLOCK - 1 :: BLOCK, None]  # [B, 1]
    used = (first <= blocks) & (blocks <= blocks[:, None])  # [B, B], of queries, of keys
    full = (last <= blocks * BLOCK) & (blocks < blocks[:, None])  # [B, B], nothing is masked

    def chosen(dense: Tensor) -> tuple[Tensor, Tensor]:
        """Number and indices of the blocks of each row; the kernels read indices in a row."""
        order = dense.int().argsort(dim=-1, descending=True, stable=True)
        return dense.sum(-1).int()[None, None], order.int().contiguous()[None, None]

    def is_seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= start[query])

    partial = used & ~full
    parts = [*chosen(partial), *chosen(full), *chosen(partial.T), *chosen(full.T)]
    names = ("kv", "full_kv", "q", "full_q")
    keys = [key for name in names for key in (f"{name}_num_blocks", f"{name}_indices")]
    tensors: dict[str, Any] = dict(zip(keys, parts, strict=True))
    lengths = len(position), len(position)
    return BlockMask(lengths, **tensors, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=is_seen)
