"""Attention of the drafter's unrolled training: committed entries and the chain's own.

Row t is the chain that drafts from committed entry t. At unroll step j its query is that of entry
t + j; it attends to the committed entries of its document up to t, and to the j entries that the
chain has drafted since, whose keys lie in the same row. So the first part is plain causal attention
at every step, and the second adds j scores a row.

Sources: Li et al., "EAGLE-3" (2025), for the mask; FlashAttention (Dao, 2023) for the first part.
Its backward pass takes the softmax's log-sum-exp and output as given, so with those of the whole
row it returns exactly the first part's share of the gradient (as in Liu et al., "Ring Attention",
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


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed row begin.

    Attributes:
        offsets: int32 [D + 1], rising, on the device of the rows; the last ones may be equal.
        longest: entries of the longest at most.
        lengths: of the documents, where the host knows them; a captured step reads `offsets` only.
    """

    offsets: Tensor
    longest: int
    lengths: tuple[int, ...] = ()

    @staticmethod
    def of(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Documents:
        """Documents of known lengths, without padding."""
        bounds = [0, *accumulate(lengths)]
        offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
        return Documents(offsets, max(lengths), tuple(lengths))


def chain_attention(
    q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents
) -> Tensor:
    """Attention of unroll step `len(keys) - 1`.

    Args:
        q: [T, heads, head_dim] of entry t + j in row t.
        keys, values: of each step so far, [T, kv_heads, head_dim]; row t of step i is entry t + i.
        documents: rows of different ones do not see each other.

    Returns:
        [T, heads, head_dim]. A row whose chain has left its document holds numbers without meaning.

    Raises:
        ValueError: where FlashAttention does not serve, the host must know the lengths.
    """
    scale = q.shape[-1] ** -0.5
    if q.is_cuda and flash_works(q.device, q.dtype, q.shape[1], keys[0].shape[1], q.shape[2]):
        return _Chain.apply(q, keys[0], values[0], _own(keys), _own(values), documents, scale)
    if not documents.lengths:
        raise ValueError("documents.lengths: wanted for attention without FlashAttention")
    return _by_document(q * scale, keys, values, documents.lengths)


@functools.cache
def flash_works(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> bool:
    """Whether FlashAttention serves these shapes here; tried once, against the plain form.

    Args:
        device: a GPU; on others it never does.
        dtype: of queries, keys and values.
        heads, kv_heads, head_dim: of the drafter.
    """
    if device.type != "cuda" or dtype not in HALF:
        return False
    fault = _flash_fault(device, dtype, heads, kv_heads, head_dim)
    if fault:
        warnings.warn(
            f"drafter: no FlashAttention for its training here ({fault}); it trains op by op,"
            " slower",
            stacklevel=2,
        )
    return not fault


@torch.enable_grad()  # whatever asks first
def _flash_fault(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> str:
    """Why FlashAttention does not serve; empty where it does."""
    documents = Documents.of((5, 1, 9), device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(15, heads, head_dim), *[(15, kv_heads, head_dim)] * 4]
    parts = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    q, k, own_k, v, own_v = (part.requires_grad_() for part in parts)
    scale = head_dim**-0.5
    try:
        ours = _Chain.apply(q, k, v, own_k[None], own_v[None], documents, scale)
        grads = torch.autograd.grad(ours.float().square().sum(), parts)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    plain = _by_document(q * scale, [k, own_k], [v, own_v], documents.lengths)
    wanted = torch.autograd.grad(plain.float().square().sum(), parts)
    pairs = zip((ours, *grads), (plain, *wanted), strict=True)
    wrong = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)
    return "" if wrong < TOLERANCE else f"it differs by {wrong:.1%}"


def _own(steps: list[Tensor]) -> Tensor:
    """[j, T, kv_heads, head_dim] of the steps after the first."""
    return torch.stack(steps[1:]) if len(steps) > 1 else steps[0].new_zeros(0, *steps[0].shape)


def _by_document(
    q: Tensor, keys: list[Tensor], values: list[Tensor], lengths: tuple[int, ...]
) -> Tensor:
    """One masked block a document and one column of scores a drafted entry; q is scaled."""
    kv_heads = keys[0].shape[1]
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, groups, T, head_dim]
    k, v = ([x.transpose(0, 1) for x in xs] for xs in (keys, values))  # [kv_heads, T, head_dim]

    def pieces(x: Tensor) -> tuple[Tensor, ...]:
        return x.split(lengths, -2)  # not slices: the gradient of a split is one concatenation

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


def _flash(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float) -> tuple[Any, ...]:
    """Causal attention within documents: output, log-sum-exp [heads, T], what backward wants."""
    bounds, longest = documents.offsets, documents.longest
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )
    return out, lse, rng, unused


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rng: Tensor,
    unused: Tensor,
    documents: Documents,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    bounds, longest = documents.offsets, documents.longest
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, bounds, bounds, longest, longest, 0.0, True, rng, unused,
        scale=scale,
    )  # fmt: skip


class _Chain(torch.autograd.Function):
    """FlashAttention over the committed entries, merged with the chain's own scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor,  # [j, T, kv_heads, head_dim]
        own_v: Tensor,
        documents: Documents,
        scale: float,
    ) -> Tensor:
        out, lse, rng, unused = _flash(q, k, v, documents, scale)
        wide = torch.promote_types(q.dtype, torch.float32)
        grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # [T, kv_heads, groups, head_dim]
        scores = scale * (grouped * own_k[:, :, :, None]).sum(-1)  # [j, T, kv_heads, groups]
        mine = lse.to(wide).t()[None]  # [1, T, heads]
        total = torch.cat([mine, scores.flatten(2)]).logsumexp(0)  # [T, heads]
        share = (mine[0] - total).exp()[..., None]
        own = (scores.flatten(2) - total).exp()  # [j, T, heads]
        added = own.unflatten(2, (k.shape[1], -1))[..., None] * own_v[:, :, :, None]
        merged = (share * out + added.sum(0).flatten(1, 2)).to(q.dtype)
        ctx.documents, ctx.scale = documents, scale
        saved = total.t().to(lse.dtype).contiguous(), rng, unused
        ctx.save_for_backward(q, k, v, own_k, own_v, own, merged, *saved)
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, own, merged, total, rng, unused = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = _flash_backward(
            grad, q, k, v, merged, total, rng, unused, ctx.documents, ctx.scale
        )
        if not len(own):
            return dq, dk, dv, torch.zeros_like(own_k), torch.zeros_like(own_v), None, None
        kv_heads, wide = k.shape[1], own.dtype

        def grouped(x: Tensor) -> Tensor:
            return x.unflatten(-2, (kv_heads, -1))

        up = grouped(grad.to(wide))  # [T, kv_heads, groups, head_dim]
        delta = (up * grouped(merged)).sum(-1)  # [T, kv_heads, groups]
        shares = own.unflatten(2, (kv_heads, -1))  # [j, T, kv_heads, groups]
        ds = ctx.scale * shares * ((up * own_v[:, :, :, None]).sum(-1) - delta)
        dq = (dq + (ds[..., None] * own_k[:, :, :, None]).sum(0).flatten(1, 2)).to(q.dtype)
        d_own_k = (ds[..., None] * grouped(q)).sum(3).to(own_k.dtype)
        d_own_v = (shares[..., None] * up).sum(3).to(own_v.dtype)
        return dq, dk, dv, d_own_k, d_own_v, None, None
