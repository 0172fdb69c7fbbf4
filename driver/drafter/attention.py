"""Attention for the unrolled training of the drafter.

Row t drafts from committed entry t. At unroll step j its query is that of entry t + j. It attends
to the committed entries of its document up to t, and to the j entries drafted since, whose keys lie
in the same row. So the first part is plain causal attention at every step, and the second adds j
scores per row.

Sources: Li et al., "EAGLE-3" (2025), for the mask; FlashAttention (Dao, 2023) for the first part.
Its backward pass takes the softmax's log-sum-exp and output as given. With those of the whole row
it returns exactly the first part's share of the gradient (as in Liu et al., "Ring Attention",
2023).
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
TOLERANCE = 0.05  # relative, of half precision against half precision
_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Segments:
    """Boundaries of the pieces in a packed row."""

    offsets: Tensor  # int32 [D + 1], rising, on the device; the last ones may be equal
    longest: int  # upper bound of the length of a piece
    lengths: tuple[int, ...]  # not in a captured step, which reads `offsets`

    @staticmethod
    def of(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Segments:
        """Pieces of known lengths, without padding."""
        bounds = [0, *accumulate(lengths)]
        offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
        return Segments(offsets, max(lengths), tuple(lengths))


def chain_attention(
    q: Tensor, keys: list[Tensor], values: list[Tensor], segments: Segments
) -> Tensor:
    """Attention of unroll step `len(keys) - 1`, [T, heads, head_dim].

    Rows whose entry t + j is past their piece hold meaningless numbers.

    Args:
        q: [T, heads, head_dim], of entry t + j in row t.
        keys, values: of each step so far, [T, kv_heads, head_dim]; row t of step i is entry t + i.
        segments: pieces of the row; entries of different pieces do not attend to each other.
    """
    scale = q.shape[-1] ** -0.5
    if q.is_cuda and flash_works(q.device, q.dtype, q.shape[1], keys[0].shape[1], q.shape[2]):
        return _Chain.apply(
            q, keys[0], values[0], _drafted(keys), _drafted(values), segments, scale
        )
    return _by_segment(q * scale, keys, values, segments.lengths)


@functools.cache
def flash_works(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> bool:
    """Whether FlashAttention supports these shapes on this GPU; checked once, by the reference."""
    if device.type != "cuda" or dtype not in HALF:
        return False
    error = _flash_error(device, dtype, heads, kv_heads, head_dim)
    if error:
        warnings.warn(
            f"drafter: FlashAttention is not available for its training ({error}); it uses a slower"
            " implementation",
            stacklevel=2,
        )
    return not error


@torch.enable_grad()  # the caller may have disabled it
def _flash_error(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> str:
    """Why FlashAttention cannot be used; empty if it can."""
    segments = Segments.of((5, 1, 9), device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(15, heads, head_dim), *[(15, kv_heads, head_dim)] * 4]
    parts = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    q, k, drafted_k, v, drafted_v = (part.requires_grad_() for part in parts)
    scale = head_dim**-0.5
    try:
        ours = _Chain.apply(q, k, v, drafted_k[None], drafted_v[None], segments, scale)
        grads = torch.autograd.grad(ours.float().square().sum(), parts)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    plain = _by_segment(q * scale, [k, drafted_k], [v, drafted_v], segments.lengths)
    expected = torch.autograd.grad(plain.float().square().sum(), parts)
    pairs = zip((ours, *grads), (plain, *expected), strict=True)
    difference = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)
    return "" if difference < TOLERANCE else f"its result differs by {difference:.1%}"


def _drafted(steps: list[Tensor]) -> Tensor:
    """[j, T, kv_heads, head_dim] of the steps after the first."""
    return torch.stack(steps[1:]) if len(steps) > 1 else steps[0].new_zeros(0, *steps[0].shape)


def _by_segment(
    q: Tensor, keys: list[Tensor], values: list[Tensor], lengths: tuple[int, ...]
) -> Tensor:
    """Reference: a masked block per piece and a column of scores per drafted entry; q is scaled."""
    kv_heads = keys[0].shape[1]
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, groups, T, head_dim]
    k, v = ([x.transpose(0, 1) for x in xs] for xs in (keys, values))  # [kv_heads, T, head_dim]

    def pieces(x: Tensor) -> tuple[Tensor, ...]:
        return x.split(lengths, -2)  # the gradient of a split is one concatenation, of slices many

    columns = [pieces((grouped * x[:, None]).sum(-1, keepdim=True)) for x in k[1:]]
    drafted = [pieces(x[:, None]) for x in v[1:]]
    longest = max(lengths)
    ahead = torch.ones(longest, longest, dtype=torch.bool, device=q.device).triu(1)
    outputs = []
    for index, (mine, key, value) in enumerate(
        zip(pieces(grouped), pieces(k[0]), pieces(v[0]), strict=True)
    ):
        length = lengths[index]
        scores = (mine.flatten(1, 2) @ key.mT).unflatten(1, (-1, length))  # [.., groups, L, L]
        scores = scores.masked_fill(ahead[:length, :length], float("-inf"))
        scores = torch.cat([scores, *(column[index] for column in columns)], -1)
        committed, *shares = scores.softmax(-1).split([length, *[1] * len(columns)], -1)
        out = (committed.flatten(1, 2) @ value).unflatten(1, (-1, length))
        for share, own in zip(shares, drafted, strict=True):
            out = out + share * own[index]
        outputs.append(out)
    return torch.cat(outputs, 2).permute(2, 0, 1, 3).flatten(1, 2)


class _Chain(torch.autograd.Function):
    """FlashAttention over the committed entries, merged with the scores of the drafted ones."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        drafted_k: Tensor,  # [j, T, kv_heads, head_dim]
        drafted_v: Tensor,
        segments: Segments,
        scale: float,
    ) -> Tensor:
        bounds, longest = segments.offsets, segments.longest
        # `lse` is the log-sum-exp [heads, T] of the causal attention within pieces.
        out, lse, rng, unused, _ = _flash(
            q, k, v, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
        )
        wide = torch.promote_types(q.dtype, torch.float32)
        grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # [T, kv_heads, groups, head_dim]
        scores = scale * (grouped * drafted_k[:, :, :, None]).sum(-1)  # [j, T, kv_heads, groups]
        mine = lse.to(wide).t()[None]  # [1, T, heads]
        total = torch.cat([mine, scores.flatten(2)]).logsumexp(0)  # [T, heads]
        share = (mine[0] - total).exp()[..., None]
        drafted = (scores.flatten(2) - total).exp()  # [j, T, heads]
        added = drafted.unflatten(2, (k.shape[1], -1))[..., None] * drafted_v[:, :, :, None]
        merged = (share * out + added.sum(0).flatten(1, 2)).to(q.dtype)
        ctx.segments, ctx.scale = segments, scale
        saved = total.t().to(lse.dtype).contiguous(), rng, unused
        ctx.save_for_backward(q, k, v, drafted_k, drafted_v, drafted, merged, *saved)
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, drafted_k, drafted_v, drafted, merged, total, rng, unused = ctx.saved_tensors
        grad, bounds, longest = grad.contiguous(), ctx.segments.offsets, ctx.segments.longest
        dq, dk, dv = _flash_backward(
            grad, q, k, v, merged, total, bounds, bounds, longest, longest, 0.0, True, rng, unused,
            scale=ctx.scale,
        )  # fmt: skip
        if not len(drafted):
            return dq, dk, dv, torch.zeros_like(drafted_k), torch.zeros_like(drafted_v), None, None
        kv_heads, wide = k.shape[1], drafted.dtype

        def grouped(x: Tensor) -> Tensor:
            return x.unflatten(-2, (kv_heads, -1))

        up = grouped(grad.to(wide))  # [T, kv_heads, groups, head_dim]
        delta = (up * grouped(merged)).sum(-1)  # [T, kv_heads, groups]
        shares = drafted.unflatten(2, (kv_heads, -1))  # [j, T, kv_heads, groups]
        ds = ctx.scale * shares * ((up * drafted_v[:, :, :, None]).sum(-1) - delta)
        dq = (dq + (ds[..., None] * drafted_k[:, :, :, None]).sum(0).flatten(1, 2)).to(q.dtype)
        d_drafted_k = (ds[..., None] * grouped(q)).sum(3).to(drafted_k.dtype)
        d_drafted_v = (shares[..., None] * up).sum(3).to(drafted_v.dtype)
        return dq, dk, dv, d_drafted_k, d_drafted_v, None, None
