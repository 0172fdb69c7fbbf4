"""The policy's forward pass over a packed row, for training, on the layers of a transformers model.

Parameters and roundings are those of the model's own pass, which reads and writes several times the
memory. There is no [T, T] mask: work grows with the sum of the squares of the documents' lengths,
and a document's result does not depend on the other documents of its row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..model.families import Family, family_of
from ..model.target_weights import DecoderLayer
from .fused import fused
from .host_weights import HostWeights
from .logprobs import LossGradient, token_logprobs
from .packing import packed_positions, tiles_of

if TYPE_CHECKING:
    from .micro_batch import MicroBatch

# Of the attention kernels.
HEAD_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Documents:
    """The layout of D documents in a packed row of T tokens."""

    lengths: tuple[int, ...]
    position: Tensor  # int64 [1, T], from 0 in every document
    tiles: Tensor  # int32 [tiles, 3], see `tiles_of`

    @staticmethod
    def of(lengths: Sequence[int]) -> Documents:
        """The layout of documents of these lengths, on the CPU."""
        return Documents(tuple(lengths), packed_positions(lengths), tiles_of(lengths))


def packed_logprobs(
    model: PreTrainedModel,
    batch: MicroBatch,
    checkpointing: bool = False,
    entropy_grad: bool = False,
    dtype: torch.dtype | None = None,
    loss_gradient: LossGradient | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens of a packed row, and the entropy at them, float32 [M] each.

    Args:
        model: of one of `driver.model.families`, else a UserError is raised.
        batch: M response tokens, on the model's device.
        checkpointing: keep only the inputs of the layers and recompute the rest in the backward
            pass.
        entropy_grad: whether the entropy has a gradient.
        dtype: of the pass; None = the parameters'. Other parameters are copied to it, a layer at a
            time, and their gradients are added to their `grad` in their own dtype.
        loss_gradient: see `token_logprobs`.
    """
    outer = _outer_weights(model, dtype)
    hidden = _hidden(model, outer, batch.input_ids, batch.documents, checkpointing)
    hidden = hidden[batch.rows]  # [M, H]
    head, tokens, temperature = outer.head, batch.tokens, batch.temperature
    return token_logprobs(hidden, head, tokens, temperature, entropy_grad, loss_gradient)


class _OuterWeights(NamedTuple):
    """Weights outside of the layers."""

    embedding: Tensor  # [V, H]
    norm: Tensor  # [H]
    head: Tensor  # [V, H]


def _outer_weights(model: Any, dtype: torch.dtype | None) -> _OuterWeights:
    base, head = model.base_model, model.get_output_embeddings().weight
    embedding, norm = base.embed_tokens.weight, base.norm.weight
    if head is embedding:
        embedding, norm = _in_dtype([[embedding], [norm]], dtype)
        return _OuterWeights(embedding, norm, embedding)
    return _OuterWeights(*_in_dtype([[embedding], [norm], [head]], dtype))


def _hidden(
    model: Any, outer: _OuterWeights, ids: Tensor, documents: Documents, checkpointing: bool
) -> Tensor:
    """Final hidden states of a packed row [T, H], after the final norm."""
    base = model.base_model
    family = family_of(type(model).__name__.removeprefix("FSDP"))  # fully_shard adds it
    # No gradient reaches the padding token here, as in the model's own pass.
    hidden = F.embedding(ids[0], outer.embedding, base.embed_tokens.padding_idx)  # [T, H]
    # [T, 1, head_dim / 2]: the second half of a head has the angles of the first.
    turns = base.rotary_emb(hidden, documents.position)  # cosines and sines, [1, T, head_dim] each
    cos, sin = (x[0].chunk(2, -1)[0].unsqueeze(1) for x in turns)
    for layer in base.layers:
        # A sharded layer has the function as a method, which gathers its parameters.
        run = getattr(layer, "packed_layer", functools.partial(packed_layer, layer))
        hidden = run(hidden, cos, sin, documents, family, checkpointing)
    return _norm(hidden, outer.norm, base.norm.variance_epsilon)


def packed_layer(
    layer: Any,
    hidden: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    documents: Documents,
    family: Family,
    checkpointing: bool = False,
) -> Tensor:
    """One layer of `packed_logprobs`: residual stream [T, H] in and out."""
    if checkpointing:
        return checkpoint(
            packed_layer, layer, hidden, cos, sin, documents, family, use_reentrant=False
        )
    attention, weights = layer.self_attn, _layer_weights(layer, family, hidden.dtype)
    if family.rope_by_layer and not attention.use_rope:
        cos = sin = None
    shape = attention.config
    widths = [shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads]
    epsilon = layer.input_layernorm.variance_epsilon
    norms = (weights.input_norm, weights.q_norm, weights.k_norm)
    q, k, v = _before_attention(
        hidden, cos, sin, *norms, weights.qkv, weights.qkv_bias, widths, epsilon
    )
    attended = attend(q, k, v, documents, attention.scaling).flatten(1)
    output = (weights.output, weights.output_bias)
    return _after_attention(
        hidden, attended, *output, weights.post_norm, weights.gate_up, weights.down, epsilon
    )


@fused
def _before_attention(
    hidden: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    input_norm: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    qkv: Tensor,
    bias: Tensor | None,
    widths: list[int],
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [T, heads, head_dim] each; without angles none is rotated."""
    x = F.linear(_norm(hidden, input_norm, epsilon), qkv, bias)
    q, k, v = x.unflatten(-1, (sum(widths), -1)).split(widths, 1)
    if q_norm is not None and k_norm is not None:
        q, k = _norm(q, q_norm, epsilon), _norm(k, k_norm, epsilon)
    if cos is not None and sin is not None:
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    # A view of one of them would keep all three, those before RoPE too.
    return q.contiguous(), k.contiguous(), v.contiguous()


@fused
def _after_attention(
    hidden: Tensor,
    attended: Tensor,
    output: Tensor,
    bias: Tensor | None,
    post_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    epsilon: float,
) -> Tensor:
    """Output projection, feed-forward part and both residuals, [T, H]."""
    hidden = hidden + F.linear(attended, output, bias)
    x = _norm(hidden, post_norm, epsilon)
    # Two products: the gradient of a joined one is joined by a kernel that reads its inputs twice.
    gate, up = (F.linear(x, weight) for weight in gate_up.chunk(2))
    return hidden + F.linear(F.silu(gate) * up, down)


def _layer_weights(layer: Any, family: Family, dtype: torch.dtype) -> DecoderLayer:
    """A layer's weights in a dtype; those of one product are joined."""
    attention, mlp = layer.self_attn, layer.mlp
    if family.joined:
        qkv, gate_up = [attention.qkv_proj], [mlp.gate_up_proj]
    else:
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        gate_up = [mlp.gate_proj, mlp.up_proj]
    groups = {
        "input_norm": [layer.input_layernorm.weight],
        "qkv": [part.weight for part in qkv],
        "qkv_bias": [part.bias for part in qkv],
        "q_norm": [attention.q_norm.weight if family.qk_norm else None],
        "k_norm": [attention.k_norm.weight if family.qk_norm else None],
        "output": [attention.o_proj.weight],
        "output_bias": [attention.o_proj.bias],
        "post_norm": [layer.post_attention_layernorm.weight],
        "gate_up": [part.weight for part in gate_up],
        "down": [mlp.down_proj.weight],
    }
    found = {name: parts for name, parts in groups.items() if parts[0] is not None}
    joined = zip(found, _in_dtype(list(found.values()), dtype), strict=True)
    weights: dict[str, Any] = {**dict.fromkeys(groups), **dict(joined)}
    return DecoderLayer(**weights)


def _in_dtype(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype | None) -> Sequence[Tensor]:
    """Each group of weights joined along its rows; copies if dtype or device differs."""
    weights = [weight for group in groups for weight in group]
    host: HostWeights | None = getattr(weights[0], "host", None)
    if host is None and (dtype is None or weights[0].dtype == dtype):
        return [torch.cat(tuple(group)) if len(group) > 1 else group[0] for group in groups]
    return _Copies.apply(dtype, host, [len(group) for group in groups], *weights)


class _Copies(torch.autograd.Function):
    """Transient copies of weights in another dtype.

    The backward pass adds gradients to `grad` in the dtype of the weights: sums in bfloat16 would
    lose small shares. One launch serves a layer, where autograd needs three for each weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        host: HostWeights | None,
        sizes: Sequence[int],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.weights, ctx.rows, copies, targets = weights, [], [], []
        ctx.add, device = (host.add, host.device) if host else (_add_gradients, weights[0].device)
        left = iter(weights)
        for size in sizes:
            parts = list(islice(left, size))
            rows = [len(part) for part in parts]
            shape = (sum(rows), *parts[0].shape[1:])
            copies.append(torch.empty(shape, dtype=dtype, device=device))
            targets += copies[-1].split(rows)
            ctx.rows.append(rows)
        (host.bring if host else torch._foreach_copy_)(targets, weights)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        pairs = zip(grads, ctx.rows, strict=True)
        shares = [share for grad, rows in pairs for share in grad.split(rows)]
        ctx.add(ctx.weights, shares)
        return None, None, None, *(None for _ in ctx.weights)


def _add_gradients(weights: Sequence[Tensor], shares: Sequence[Tensor]) -> None:
    """Adds to `grad` of the weights, in their dtype."""
    pairs = list(zip(weights, shares, strict=True))
    sums = [(w.grad, share) for w, share in pairs if w.grad is not None]
    if sums:
        torch._foreach_add_(*map(list, zip(*sums, strict=True)))
    first = [(w, share) for w, share in pairs if w.grad is None]
    if first:
        new = [torch.empty_like(weight) for weight, _ in first]
        torch._foreach_copy_(new, [share for _, share in first])
        for (weight, _), total in zip(first, new, strict=True):
            weight.grad = total


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float) -> Tensor:
    """Causal attention within each document of a packed row, [T, heads, head_dim].

    `q` is [T, heads, head_dim], `k` and `v` [T, kv_heads, head_dim]; kv_heads divides heads.
    `scale` is the factor of the scores. On a GPU in half precision by `packed_attention`; otherwise
    one call of torch's attention for each document.
    """
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.is_cuda and half and q.shape[-1] in HEAD_SIZES:
        from .packed_attention import packed_attention  # needs Triton

        return packed_attention(q, k, v, documents.tiles, scale)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    parts = [x.transpose(0, 1).unsqueeze(0).split(documents.lengths, dim=2) for x in (q, k, v)]
    attended = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(attended)  # [T, heads, head_dim]


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm that is rounded before the weight, as in the model's own pass and in the engine."""
    return F.rms_norm(x, weight.shape, None, epsilon) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of [T, heads, head_dim] by angles [T, 1, head_dim / 2]."""
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
