"""Training the drafter on its own drafts: the unrolled forward over packed documents.

At unroll step j entry t stands for the j-th token drafted in a row: its hidden input is the
drafter's own output for entry t - 1 at step j - 1, its token the true one. It attends to entries up
to t - j as they are committed (step 0), and to the j entries drafted since.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from driver.drafter import Drafter

STEP_WEIGHT = 0.8  # of each unroll step against the one before


@dataclass(frozen=True)
class DraftBatch:
    """Packed training entries of several documents."""

    embedded: Tensor  # [T, H], the target's embedding of token t + 1
    features: Tensor  # [T, 3H], of position t
    teacher: Tensor  # [T, H], normed final hidden state of position t + 1 (predicts token t + 2)
    position: Tensor  # int64 [T], absolute
    document: Tensor  # int64 [T], index of the document
    place: Tensor  # int64 [T], index within the packed piece of the document


def unrolled_loss(
    drafter: Drafter, batch: DraftBatch, cos_sin: Tensor, unroll: int
) -> tuple[Tensor, dict[str, float]]:
    """Soft cross-entropy against the target's law over the draft vocabulary.

    Args:
        drafter: the module.
        batch: packed entries.
        cos_sin: float32 [max_position, head_dim], the target's RoPE table.
        unroll: steps; 1 is EAGLE-like, 3 HASS-like, 7 EAGLE-3.

    Returns:
        The scalar loss and `drafter/{loss,top1}` of its first step.
    """
    with torch.no_grad():
        teacher = (batch.teacher @ drafter.lm_head.weight.t()).softmax(-1)  # [T, Vd]
    hidden = drafter.fc(batch.features)  # [T, H]
    total = hidden.new_zeros(())
    weight, weights = 1.0, 0.0
    keys: list[Tensor] = []
    values: list[Tensor] = []
    metrics: dict[str, float] = {}
    for step in range(unroll):
        hidden = _layer(drafter, batch, hidden, keys, values, cos_sin)
        valid = batch.place >= step
        if not bool(valid.any()):
            break
        logits = drafter.lm_head(drafter.norm(hidden[valid]))  # [n, Vd]
        loss = -(teacher[valid] * logits.log_softmax(-1)).sum(-1).mean()
        total = total + weight * loss
        weights += weight
        weight *= STEP_WEIGHT
        if step == 0:
            same = logits.argmax(-1) == teacher[valid].argmax(-1)
            metrics = {
                "drafter/loss": float(loss.detach()),
                "drafter/top1": float(same.float().mean()),
            }
        hidden = _shift(hidden, 1)
    return total / weights, metrics


def _shift(x: Tensor, by: int) -> Tensor:
    """Row t takes row t - by; the first rows, never valid, take zeros."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (by, 0))[: len(x)]


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """RoPE over [T, heads, head_dim] with rotate-half pairing."""
    cos, sin = cos_sin[:, None].to(x.dtype).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _layer(
    drafter: Drafter,
    batch: DraftBatch,
    hidden: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    cos_sin: Tensor,
) -> Tensor:
    """One unroll step; appends its K/V to those of the steps before."""
    spec, layer = drafter.spec, drafter.midlayer
    count = len(hidden)
    joined = torch.cat([layer.input_layernorm(batch.embedded), layer.hidden_norm(hidden)], -1)
    table = cos_sin[batch.position]
    attention = layer.self_attn
    q = _rotate(attention.q_proj(joined).view(count, spec.num_heads, -1), table)
    groups = spec.num_heads // spec.num_kv_heads
    k = _rotate(attention.k_proj(joined).view(count, spec.num_kv_heads, -1), table)
    v = attention.v_proj(joined).view(count, spec.num_kv_heads, -1)
    keys.append(k.repeat_interleave(groups, 1))
    values.append(v.repeat_interleave(groups, 1))
    attended = _attend(batch, q, keys, values)
    hidden = hidden + attention.o_proj(attended.flatten(1))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _attend(batch: DraftBatch, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of unroll step j = len(keys) - 1 over [T, heads, head_dim].

    Committed entries are a masked T x T block; of each later step i a row sees exactly one entry,
    t - j + i, so those scores are a column each.
    """
    step = len(keys) - 1
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("thd,shd->hts", q, keys[0]) * scale
    ahead = batch.place[:, None] - batch.place[None, :]  # how far s lies behind t
    seen = (batch.document[:, None] == batch.document[None, :]) & (ahead >= step)
    # A row before the step's first valid one sees nothing; it attends to itself, unused.
    seen = seen | (torch.eye(len(q), dtype=torch.bool, device=q.device) & ~seen.any(-1, True))
    scores = scores.masked_fill(~seen, float("-inf"))
    columns = [
        (q * _shift(keys[i], step - i)).sum(-1).t()[..., None] * scale for i in range(1, step + 1)
    ]
    probs = torch.cat([scores, *columns], -1).softmax(-1)  # [heads, T, T + j]
    out = torch.einsum("hts,shd->thd", probs[..., : len(q)], values[0])
    for i in range(1, step + 1):
        share = probs[..., len(q) + i - 1].t()[..., None]
        out = out + share * _shift(values[i], step - i)
    return out
