"""The policy's forward pass over a packed row, for training, on the layers of a transformers model.

Parameters and roundings are those of the model's own pass. It reads and writes a fraction of the
memory: a norm is one kernel and a product, keys and values are not repeated for the query heads
that share them, and RoPE works on halves without copies. There is no [T, T] mask: work grows with
the sum of the squares of the documents' lengths, and a document's result does not depend on the
other documents of its row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..model.families import Family, family_of
from .packing import packed_positions

# Documents of this many tokens are attended in a call apart from much shorter ones.
LONG_TOKENS = 1024


@dataclass(frozen=True)
class Span:
    """Consecutive documents of a packed row, for one call of attention."""

    tokens: int
    longest: int
    bounds: Tensor  # int32 [documents + 1], where each begins and ends, from the first of the span

    @staticmethod
    def of(lengths: Sequence[int]) -> Span:
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return Span(sum(lengths), max(lengths), bounds)


@dataclass(frozen=True)
class Documents:
    """The layout of D documents in a packed row of T tokens."""

    lengths: tuple[int, ...]
    position: Tensor  # int64 [1, T], from 0 in every document
    spans: tuple[Span, ...]  # in their order

    @staticmethod
    def of(lengths: Sequence[int]) -> Documents:
        """The layout of documents of these lengths, on the CPU.

        Deterministic FlashAttention divides the multiprocessors of a GPU among the documents and
        heads of a call. With many documents each gets one, and a long document then decides the
        time of its call. The long documents at the front of a row are therefore a span apart.

        Example:
            >>> [span.tokens for span in Documents.of([3000, 2000, 900, 20]).spans]
            [5000, 920]
        """
        longest = max(lengths)
        short = [i for i, length in enumerate(lengths) if 2 * length < longest]
        cut = short[0] if short and longest >= LONG_TOKENS else len(lengths)
        spans = tuple(Span.of(part) for part in (lengths[:cut], lengths[cut:]) if part)
        return Documents(tuple(lengths), packed_positions(lengths), spans)


def packed_forward(
    model: PreTrainedModel, ids: Tensor, documents: Documents, checkpointing: bool = False
) -> Tensor:
    """Final hidden states of a packed row.

    Args:
        model: a transformers model of one of `driver.model.families`.
        ids: int64 [1, T], documents end to end.
        documents: their layout, on the model's device.
        checkpointing: keep only the inputs of the layers and recompute the rest in the backward
            pass.

    Returns:
        [T, H], after the final norm.

    Raises:
        UserError: the model is of another family.

    Example:
        >>> packed_forward(model, ids, Documents.of([2, 3]))  # doctest: +SKIP
    """
    base: Any = model.base_model
    family = family_of(type(model).__name__)
    hidden = base.embed_tokens(ids[0])  # [T, H]
    # [T, 1, head_dim / 2]: the second half of a head has the angles of the first.
    turns = base.rotary_emb(hidden, documents.position)  # cosines and sines, [1, T, head_dim] each
    cos, sin = (x[0].chunk(2, -1)[0].unsqueeze(1) for x in turns)
    for layer in base.layers:
        if checkpointing:
            hidden = checkpoint(
                _layer, layer, hidden, cos, sin, documents, family, use_reentrant=False
            )
        else:
            hidden = _layer(layer, hidden, cos, sin, documents, family)
    return _norm(base.norm, hidden)


def _layer(
    layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, documents: Documents, family: Family
) -> Tensor:
    attention, mlp = layer.self_attn, layer.mlp
    x = _norm(layer.input_layernorm, hidden)  # [T, H]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    widths = [part.out_features // attention.head_dim for part in projections]
    qkv = _project(x, *projections).unflatten(-1, (-1, attention.head_dim))
    q, k, v = qkv.split(widths, 1)  # [T, heads, head_dim]
    if family.qk_norm:
        q, k = _norm(attention.q_norm, q), _norm(attention.k_norm, k)
    q, k = _Rotate.apply(q, cos, sin), _Rotate.apply(k, cos, sin)
    # A view of `v` would keep q and k as they were before RoPE.
    attended = attend(q, k, v.contiguous(), documents, attention.scaling)  # [T, heads, head_dim]
    hidden = hidden + attention.o_proj(attended.flatten(1))
    x = _norm(layer.post_attention_layernorm, hidden)  # [T, H]
    gate_up = _project(x, mlp.gate_proj, mlp.up_proj)
    return hidden + mlp.down_proj(_SwiGlu.apply(gate_up))


def _project(x: Tensor, *parts: nn.Linear) -> Tensor:
    """[T, H] through all parts at once: one product forward, and one for the gradient of x."""
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return F.linear(x, weight, bias)


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float) -> Tensor:
    """Causal attention within each document of a packed row.

    Args:
        q: [T, heads, head_dim].
        k: [T, kv_heads, head_dim]; kv_heads divides heads.
        v: like k.
        documents: the layout of the row.
        scale: factor of the scores.

    Returns:
        [T, heads, head_dim].

    Source: variable-length FlashAttention (Dao, 2023) on a GPU in half precision; otherwise one
    call of torch's attention for each document.
    """
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return _by_spans(_attend_on_card, q, k, v, documents, scale)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    parts = [x.transpose(0, 1).unsqueeze(0).split(documents.lengths, dim=2) for x in (q, k, v)]
    attended = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(attended)  # [T, heads, head_dim]


def _by_spans(
    kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, at: Documents, scale: float
) -> Tensor:
    tokens = [span.tokens for span in at.spans]
    parts = zip(at.spans, *(x.split(tokens) for x in (q, k, v)), strict=True)
    attended = [kernel(*part, scale) for part in parts]
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _attend_on_card(span: Span, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    bounds, longest = span.bounds, span.longest
    return _varlen_attention()(
        q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0)
    )


@functools.cache
def _varlen_attention() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # needs a recent torch

    # The kernels always share keys and values among heads; later versions require the flag.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return functools.partial(varlen_attn, enable_gqa=True)
    return varlen_attn


def _norm(module: Any, x: Tensor) -> Tensor:
    return _RmsNorm.apply(x, module.weight, module.variance_epsilon)


class _RmsNorm(torch.autograd.Function):
    """RMS norm that is rounded before the weight, as in the model's own pass and in the engine.

    The gradient is that of the fused norm, which does not round there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps, rstd = eps, None
        if x.is_cuda:  # F.rms_norm would compute the norm again in its backward pass
            out, rstd = torch.ops.aten._fused_rms_norm(x, weight.shape, None, eps)
        else:
            out = F.rms_norm(x, weight.shape, None, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out.mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        if rstd is not None:
            x, grad = x.contiguous(), grad.contiguous()
            fused = torch.ops.aten._fused_rms_norm_backward
            return *fused(grad, x, weight.shape, rstd, weight, [True, True]), None
        x, weight = (saved.detach().requires_grad_() for saved in (x, weight))
        with torch.enable_grad():
            out = F.rms_norm(x, weight.shape, weight, ctx.eps)
        return *torch.autograd.grad(out, (x, weight), grad), None


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up of [T, 2 I], gate first; the gradient is one tensor of that shape."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gated = F.silu(gate)
        ctx.save_for_backward(gate_up, gated)
        return gated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, gated = ctx.saved_tensors
        out = torch.empty_like(gate_up)
        (gate, up), (out_gate, out_up) = gate_up.chunk(2, -1), out.chunk(2, -1)
        torch.mul(grad, gated, out=out_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=out_gate)
        return out


class _Rotate(torch.autograd.Function):
    """RoPE of [T, heads, head_dim] by angles [T, 1, head_dim / 2]; the gradient rotates back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (low, high), (out_low, out_high) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(low, cos, out=out_low).addcmul_(high, sin, value=-sign)
    torch.mul(high, cos, out=out_high).addcmul_(low, sin, value=sign)
    return out
