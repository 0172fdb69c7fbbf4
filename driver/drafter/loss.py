"""The training loss of the drafter: an unrolled forward pass over packed pieces of documents.

Row t drafts from committed entry t. At unroll step j it stands for entry t + j, the j-th token
drafted in a row: its hidden input is the drafter's own output for entry t + j - 1, its token the
true one. `driver/drafter/attention.py` describes what it attends to. Rows whose entry t + j is past
the end of the piece are masked.

Nothing here reads a number on the host, so a step over fixed-size arrays can be captured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.drafter import Drafter
from .attention import Segments, chain_attention

STEP_WEIGHT = 0.8  # of each unroll step relative to the one before
CHUNK_LOGITS = 1 << 24  # float32 logits of each model alive at once: 64 MiB


@dataclass(frozen=True)
class Teacher:
    """Maps the final hidden states of a policy to draft-vocabulary probabilities."""

    norm: Tensor  # [H]
    head: Tensor  # [draft_vocab, H]

    def probs(self, final: Tensor, eps: float) -> Tensor:
        """Probabilities [n, draft_vocab] after final hidden states [n, H]."""
        normed = F.rms_norm(final, self.norm.shape, self.norm.to(final.dtype), eps)
        return (normed @ self.head.to(final.dtype).t()).softmax(-1, dtype=_wide(final))


class Teachers:
    """The current policy and the previous one, whose documents are kept for one step.

    Captured steps read these tensors, so they are updated in place: `norm` [H], the final norm of
    the target, and `head` [draft_vocab, H], that of the drafter.
    """

    def __init__(self, norm: Tensor, head: Tensor) -> None:
        self.current = Teacher(norm, head.detach())
        self.previous: Teacher | None = None
        self.previous_version = -1

    def keep(self, version: int) -> None:
        """Copies the current policy; call before the target gets new weights."""
        current, previous = self.current, self.previous
        if previous is None:
            self.previous = Teacher(current.norm.clone(), current.head.clone())
        else:
            previous.norm.copy_(current.norm)
            previous.head.copy_(current.head)
        self.previous_version = version


@dataclass(frozen=True)
class DraftBatch:
    """Training entries of several pieces, concatenated."""

    embedded: Tensor  # [T, H], the target's embedding of token t + 1
    features: Tensor  # [T, 3H], of position t
    final: Tensor  # [T, H], the target's final hidden state of position t + 1, before its norm
    position: Tensor  # int64 [T], absolute
    left: Tensor  # int32 [T], unroll steps to train, to the end of the piece or a tool's token
    segments: Segments  # the pieces, and padding
    spans: tuple[tuple[int, int, Teacher], ...]  # (first row, end row, policy that recorded it)


def unrolled_loss(
    drafter: Drafter, batch: DraftBatch, cos_sin: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """The cross-entropy against the target's distribution, a mean over entries and unroll steps.

    Args:
        cos_sin: float32 [max_position, head_dim], the RoPE table of the target.
        steps: unroll steps: 1 is EAGLE-like, 3 HASS-like, 7 EAGLE-3.

    Returns:
        The scalar loss, weighted by unroll step, and means over the entries of the first step [3]:
        cross-entropy, one minus the total variation (the probability that a draft is accepted),
        top-1 agreement.
    """
    wide = _wide(batch.features)
    hidden = list(unroll(drafter, batch, cos_sin, steps))
    weight = torch.stack(
        [STEP_WEIGHT**step * (batch.left > step).to(wide) for step in range(steps)]
    )  # [steps, T]
    dtype = batch.final.dtype
    normed = [drafter.norm(x).to(dtype) for x in hidden]
    head = drafter.lm_head.weight.detach().to(dtype)
    total, sums = weight.new_zeros(()), weight.new_zeros(3)
    for begin, end, teacher in batch.spans:
        part = slice(begin, end)
        inputs = head, teacher, drafter.spec.rms_eps, batch.final[part], weight[:, part]
        with torch.autocast(head.device.type, enabled=False):  # dtypes are already as intended
            loss, values = _AgainstTeacher.apply(*inputs, *(x[part] for x in normed))
        total, sums = total + loss, sums + values
    cross_entropy, variation, same = sums / (batch.left > 0).sum().clamp_min(1)
    means = torch.stack([cross_entropy, 1 - variation, same])
    return total / weight.sum().clamp_min(1e-9), means


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of sums: float32, or float64 if the input is."""
    return torch.promote_types(x.dtype, torch.float32)


class _AgainstTeacher(torch.autograd.Function):
    """The loss of all unroll steps against one teacher, with its gradient computed in forward.

    The gradient is a closed form of the two distributions, so nothing of shape
    [rows, draft_vocab] is saved or recomputed for the backward pass. A chunk of the teacher's
    probabilities serves all steps: row t of step j drafts what row t + j of the teacher predicts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,  # [draft_vocab, H]
        teacher: Teacher,
        eps: float,
        final: Tensor,  # [n, H]
        weight: Tensor,  # [steps, n]
        *normed: Tensor,  # of each step [n, H], after the drafter's final norm
    ) -> tuple[Tensor, Tensor]:
        total, sums = weight.new_zeros(()), weight.new_zeros(3)
        gradients = [torch.zeros_like(x) for x in normed]
        rows = max(1, CHUNK_LOGITS // len(head))
        for first in range(0, len(final), rows):
            target = teacher.probs(final[first : first + rows], eps)  # [m, draft_vocab]
            for step, x in enumerate(normed):
                above = max(0, step - first)  # rows of the chunk that no row of this step drafts
                if above >= len(target):
                    continue
                part = slice(first + above - step, first + len(target) - step)
                share, counted = weight[step, part], weight[step, part] > 0
                loss, by_input, values = _row_losses(x[part], head, target[above:], step == 0)
                # The weight multiplies [m, H] here, instead of [m, draft_vocab] before.
                weighted = by_input * share[:, None]
                gradients[step][part] = torch.where(counted[:, None], weighted, 0)
                total += (share * torch.where(counted, loss, 0)).sum()
                if step == 0:
                    sums += torch.where(counted, values, 0).sum(-1)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*[None] * 5, *(x * grad.to(x.dtype) for x in ctx.saved_tensors))


def _row_losses(
    normed: Tensor, head: Tensor, target: Tensor, report: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [m] of rows [m, H] against probabilities [m, draft_vocab], and their gradient [m, H].

    If `report`, cross-entropy, total variation and top-1 agreement [3, m] too.
    """
    logits = normed @ head.t()
    logp = logits.log_softmax(-1, dtype=target.dtype)
    cross_entropy = -(target * logp).sum(-1)
    draft = logp.exp_()
    # The gradient by the logits reuses their memory and dtype.
    difference = torch.sub(draft, target, out=logits)
    values = target.new_empty(0)
    if report:
        variation = torch.linalg.vector_norm(difference, 1, -1, dtype=target.dtype) / 2
        same = (draft.argmax(-1) == target.argmax(-1)).to(target.dtype)
        values = torch.stack([cross_entropy, variation, same])
    return cross_entropy, difference.to(head.dtype) @ head, values


def unroll(drafter: Drafter, batch: DraftBatch, cos_sin: Tensor, steps: int) -> Iterator[Tensor]:
    """Hidden states [T, H] before the final norm, step by step.

    Row t of step j is entry t + j, with the entries up to t committed; valid where `left > j`.
    """
    table = cos_sin[batch.position]  # [T, head_dim]
    embedded = drafter.midlayer.input_layernorm(batch.embedded)
    hidden = drafter.fc(batch.features)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(steps):
        shifted = _ahead(embedded, step), _ahead(table, step)
        hidden = _layer(drafter, batch.segments, *shifted, hidden, keys, values)
        yield hidden


def _ahead(x: Tensor, by: int) -> Tensor:
    """Row t takes row t + by; the last rows repeat the last one."""
    return x if by == 0 else torch.cat([x[by:], x[-1:].expand(min(by, len(x)), *x.shape[1:])])


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """RoPE over [T, heads, head_dim], pairing i with i + head_dim / 2."""
    cos, sin = table[:, None].chunk(2, -1)
    first, second = x.chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


def _layer(
    drafter: Drafter,
    segments: Segments,
    embedded: Tensor,
    table: Tensor,
    hidden: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """One unroll step over [T, H]; appends its K/V to those of the steps before."""
    layer, size = drafter.midlayer, drafter.spec.head_dim
    attention = layer.self_attn
    joined = torch.cat([embedded, layer.hidden_norm(hidden)], -1)  # [T, 2H]
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (project(joined).unflatten(-1, (-1, size)) for project in projections)
    keys.append(_rotate(k, table))
    values.append(v)
    attended = chain_attention(_rotate(q, table), keys, values, segments)
    hidden = hidden + attention.o_proj(attended.flatten(1))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))
