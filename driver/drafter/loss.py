"""Training the drafter on its own drafts: the unrolled forward over packed pieces of documents.

Row t is the chain that drafts from committed entry t: at unroll step j it stands for entry t + j,
the j-th token drafted in a row. Its hidden input is the drafter's own output for entry t + j - 1,
its token the true one (`driver/drafter/attention.py` says what it attends to). A chain that leaves
its piece is left out from there on.

Nothing here reads a number on the host, so a step over bins of fixed size can be captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.drafter import Drafter
from .attention import Documents, chain_attention

LossKind = Literal["soft_ce", "kl", "tv", "hybrid"]

STEP_WEIGHT = 0.8  # of each unroll step against the one before
HYBRID_DECAY = 3.0  # how fast acceptance moves the hybrid loss from KL to TV
CHUNK_LOGITS = 1 << 24  # float32 logits of each model alive at once: 64 MiB


@dataclass(frozen=True)
class Teacher:
    """What turns a policy version's final hidden states into its law over the draft vocabulary."""

    version: int
    norm: Tensor  # [H]
    head: Tensor  # [draft_vocab, H]

    def law(self, final: Tensor, eps: float) -> Tensor:
        """Probabilities [n, draft_vocab] after final hidden states [n, H]."""
        normed = F.rms_norm(final, self.norm.shape, self.norm.to(final.dtype), eps)
        return (normed @ self.head.to(final.dtype).t()).softmax(-1, dtype=_wide(final))


class Teachers:
    """The law of the policy that records now, and of the one before, whose documents are kept.

    Captured steps read their tensors, so those change in place.

    Args:
        norm: [H], of the target; changes with it.
        head: [draft_vocab, H], of the drafter; the same.
    """

    def __init__(self, norm: Tensor, head: Tensor) -> None:
        self._norm, self._head = norm, head
        self.previous: Teacher | None = None

    def now(self, version: int) -> Teacher:
        """Of the policy that is in the target."""
        return Teacher(version, self._norm, self._head)

    def kept(self, version: int) -> bool:
        """Whether the policy before was of this version."""
        return self.previous is not None and self.previous.version == version

    def keep(self, version: int) -> None:
        """The policy in the target is about to be the one before."""
        if self.previous is None:
            self.previous = Teacher(version, self._norm.clone(), self._head.detach().clone())
        else:
            norm, head = self.previous.norm, self.previous.head
            norm.copy_(self._norm)
            head.copy_(self._head.detach())
            self.previous = Teacher(version, norm, head)


@dataclass(frozen=True)
class DraftBatch:
    """Training entries of several pieces, end to end."""

    embedded: Tensor  # [T, H], the target's embedding of token t + 1
    features: Tensor  # [T, 3H], of position t
    final: Tensor  # [T, H], the target's final hidden state of position t + 1, before its norm
    position: Tensor  # int64 [T], absolute
    left: Tensor  # int32 [T], entries of its piece from here on; 0 = padding
    weight: Tensor  # float32 [T], of what the entry predicts
    documents: Documents  # the pieces, and padding
    spans: tuple[tuple[int, int, Teacher], ...]  # (first row, row after the last, who recorded it)

    @staticmethod
    def of(
        embedded: Tensor,
        features: Tensor,
        final: Tensor,
        position: Tensor,
        lengths: Sequence[int],
        teachers: Sequence[Teacher],
        weight: Tensor | None = None,
    ) -> DraftBatch:
        """Pieces of these lengths, each with the policy that recorded it."""
        device = position.device
        left = torch.cat([torch.arange(n, 0, -1, dtype=torch.int32) for n in lengths])
        if weight is None:
            weight = torch.ones(len(position), device=device)
        spans: list[tuple[int, int, Teacher]] = []
        end = 0
        for length, teacher in zip(lengths, teachers, strict=True):
            begin, end = end, end + length
            if spans and spans[-1][2] is teacher:
                begin = spans.pop()[0]
            spans.append((begin, end, teacher))
        documents = Documents.of(tuple(lengths), device)
        return DraftBatch(
            embedded, features, final, position, left.to(device), weight, documents, tuple(spans)
        )


@dataclass(frozen=True)
class Objective:
    """What a drafter is trained for.

    `soft_ce` is cross-entropy against the target's law, `kl` the same less that law's entropy, `tv`
    the total variation, which is the chance that one draft is rejected, `hybrid` lambda * KL +
    (1 - lambda) * TV with lambda = exp(-3 * acceptance): while little is accepted TV has hardly a
    gradient, and the KL's is what moves.

    Attributes:
        kind: which.
        feature_weight: of a smooth L1 distance between the drafter's hidden state and the target's
            final one, EAGLE's first loss; 0 = none.
    """

    kind: LossKind = "soft_ce"
    feature_weight: float = 0.0

    def combine(self, distance: Tensor, variation: Tensor, acceptance: Tensor) -> Tensor:
        """The loss of rows from their KL (or cross-entropy) and TV, at an acceptance in [0, 1]."""
        if self.kind == "hybrid":
            share = torch.exp(-HYBRID_DECAY * acceptance)
            return share * distance + (1 - share) * variation
        return variation if self.kind == "tv" else distance


def unrolled_loss(
    drafter: Drafter,
    batch: DraftBatch,
    cos_sin: Tensor,
    steps: int,
    objective: Objective = Objective(),  # frozen
    acceptance: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The objective against the target's law, weighted over entries and unroll steps.

    Args:
        drafter: the module.
        batch: packed entries.
        cos_sin: float32 [max_position, head_dim], the target's RoPE table.
        steps: 1 is EAGLE-like, 3 HASS-like, 7 EAGLE-3.
        objective: the loss.
        acceptance: of the drafter so far, in [0, 1]; decides the mix of `hybrid`.

    Returns:
        The scalar loss, and means over the entries of the first step [3]: cross-entropy, one minus
        the total variation, the share of equal favourites.
    """
    wide = _wide(batch.features)
    acceptance = torch.as_tensor(acceptance, dtype=wide, device=batch.left.device)
    hidden = list(unroll(drafter, batch, cos_sin, steps))
    weight = batch.weight.to(wide)
    shares = torch.stack(
        [
            STEP_WEIGHT**step * torch.where(batch.left > step, _ahead(weight, step), 0)
            for step in range(steps)
        ]
    )  # [steps, T]
    total, seen = _against_teachers(drafter, hidden, batch, shares, objective, acceptance)
    cross_entropy, variation, same = seen / (batch.left > 0).sum().clamp_min(1)
    means = torch.stack([cross_entropy, 1 - variation, same])
    return total / shares.sum().clamp_min(1e-9), means


def _wide(x: Tensor) -> torch.dtype:
    """What sums are kept in: float32, or float64 where the input is."""
    return torch.promote_types(x.dtype, torch.float32)


def _against_teachers(
    drafter: Drafter,
    hidden: list[Tensor],
    batch: DraftBatch,
    shares: Tensor,
    objective: Objective,
    acceptance: Tensor,
) -> tuple[Tensor, Tensor]:
    """The weighted loss, summed; sums of cross-entropy, variation, equal favourites at step 0."""
    dtype, wide = batch.final.dtype, shares.dtype
    normed = [drafter.norm(x).to(dtype) for x in hidden]
    head = drafter.lm_head.weight.detach().to(dtype)
    total, seen = shares.new_zeros(()), shares.new_zeros(3)
    for begin, end, teacher in batch.spans:
        part = slice(begin, end)
        told = head, teacher, drafter.spec.rms_eps, batch.final[part], shares[:, part]
        with torch.autocast(head.device.type, enabled=False):  # all is as narrow as it is to be
            loss, values = _AgainstTeacher.apply(
                *told, objective, acceptance, *(x[part] for x in normed)
            )
        total, seen = total + loss, seen + values
    if objective.feature_weight:
        for step, x in enumerate(hidden):
            final = _ahead(batch.final, step).to(wide)
            apart = F.smooth_l1_loss(x.to(wide), final, reduction="none").mean(-1)
            weighted = shares[step] * torch.where(shares[step] > 0, apart, 0)
            total = total + objective.feature_weight * weighted.sum()
    return total, seen


class _AgainstTeacher(torch.autograd.Function):
    """The loss of all unroll steps against a teacher's law, with its gradient made along with it.

    The gradient of every loss is a formula of the two laws, so nothing of [rows, draft_vocab] is
    kept for the backward pass or made again there. A chunk of the teacher's law is made once for
    all steps: row t of step j drafts what row t + j of the law says.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,  # [draft_vocab, H]
        teacher: Teacher,
        eps: float,
        final: Tensor,  # [n, H]
        shares: Tensor,  # [steps, n]
        objective: Objective,
        acceptance: Tensor,
        *normed: Tensor,  # of each step [n, H], behind the drafter's final norm
    ) -> tuple[Tensor, Tensor]:
        total, seen = shares.new_zeros(()), shares.new_zeros(3)
        gradients = [torch.zeros_like(x) for x in normed]
        rows = max(1, CHUNK_LOGITS // len(head))
        for first in range(0, len(final), rows):
            law = teacher.law(final[first : first + rows], eps)  # [m, draft_vocab]
            for step, x in enumerate(normed):
                above = max(0, step - first)  # rows of the law before the first that step drafts
                if above >= len(law):
                    continue
                part = slice(first + above - step, first + len(law) - step)
                share, counted = shares[step, part], shares[step, part] > 0
                loss, by_input, values = _row_losses(
                    x[part], head, law[above:], objective, acceptance, told=step == 0
                )
                # What a share weighs is put to the narrow product, not to rows of the vocabulary.
                weighted = by_input * share[:, None]
                gradients[step][part] = torch.where(counted[:, None], weighted, 0)
                total += (share * torch.where(counted, loss, 0)).sum()
                if step == 0:
                    seen += torch.where(counted, values, 0).sum(-1)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(seen)
        return total, seen

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*[None] * 7, *(x * grad.to(x.dtype) for x in ctx.saved_tensors))


def _row_losses(
    normed: Tensor,
    head: Tensor,
    law: Tensor,
    objective: Objective,
    acceptance: Tensor,
    told: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows [m, H] against laws [m, draft_vocab]: losses [m], their gradient by the rows [m, H];
    and, where told, cross-entropy, variation, equal favourites [3, m]."""
    logits = normed @ head.t()
    logp = logits.log_softmax(-1, dtype=law.dtype)
    cross_entropy = -(law * logp).sum(-1)
    distance = cross_entropy
    if objective.kind in ("kl", "hybrid"):
        distance = cross_entropy - torch.special.entr(law).sum(-1)
    draft = logp.exp_()
    # The gradient of either distance by the logits; as narrow as those, it takes their room.
    apart = torch.sub(draft, law, out=logits)
    variation = torch.linalg.vector_norm(apart, 1, -1, dtype=law.dtype) / 2
    loss = objective.combine(distance, variation, acceptance)
    if objective.kind in ("tv", "hybrid"):
        apart = objective.combine(apart, _variation_by_logits(draft, law), acceptance)
    values = law.new_empty(0)
    if told:
        same = (draft.argmax(-1) == law.argmax(-1)).to(law.dtype)
        values = torch.stack([cross_entropy, variation, same])
    return loss, apart.to(head.dtype) @ head, values


def _variation_by_logits(draft: Tensor, law: Tensor) -> Tensor:
    """Gradient of the total variation by the drafter's logits."""
    by_probability = (draft - law).sign_().div_(2)
    return draft * (by_probability - (draft * by_probability).sum(-1, keepdim=True))


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
        ahead = _ahead(embedded, step), _ahead(table, step)
        hidden = _layer(drafter, batch.documents, *ahead, hidden, keys, values)
        yield hidden


def _ahead(x: Tensor, by: int) -> Tensor:
    """Row t takes row t + by; the last rows take the last one."""
    return x if by == 0 else torch.cat([x[by:], x[-1:].expand(min(by, len(x)), *x.shape[1:])])


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """RoPE over [T, heads, head_dim], pairing i with i + head_dim / 2."""
    cos, sin = table[:, None].chunk(2, -1)
    first, second = x.chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


def _layer(
    drafter: Drafter,
    documents: Documents,
    embedded: Tensor,
    table: Tensor,
    hidden: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """One unroll step over [T, H]; appends its K/V to those of the steps before."""
    layer = drafter.midlayer
    attention, size = layer.self_attn, drafter.spec.head_dim
    joined = torch.cat([embedded, layer.hidden_norm(hidden)], -1)  # [T, 2H]
    q, k, v = (
        project(joined).unflatten(-1, (-1, size))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    keys.append(_rotate(k, table))
    values.append(v)
    attended = chain_attention(_rotate(q, table), keys, values, documents)
    hidden = hidden + attention.o_proj(attended.flatten(1))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))
