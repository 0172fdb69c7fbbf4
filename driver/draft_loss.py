"""Training the drafter on its own drafts: the unrolled forward over packed pieces of documents.

At unroll step j entry t stands for the j-th token drafted in a row: its hidden input is the
drafter's own output for entry t - 1 at step j - 1, its token the true one. It attends to entries up
to t - j as they are committed (step 0), and to the j entries drafted since. The first j entries of
a piece have no such past and are left out of step j.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from driver.drafter import Drafter
from driver.grpo import CHUNK_LOGITS

LossKind = Literal["soft_ce", "kl", "tv", "hybrid"]

STEP_WEIGHT = 0.8  # of each unroll step against the one before
HYBRID_DECAY = 3.0  # how fast acceptance moves the hybrid loss from KL to TV


@dataclass(frozen=True)
class Teacher:
    """What turns a policy version's final hidden states into its law over the draft vocabulary."""

    version: int
    norm: Tensor  # [H]
    head: Tensor  # [draft_vocab, H]

    def law(self, final: Tensor, eps: float) -> Tensor:
        """Probabilities [n, draft_vocab] after final hidden states [n, H]."""
        normed = F.rms_norm(final, self.norm.shape, self.norm, eps)
        return (normed @ self.head.t()).softmax(-1)


@dataclass(frozen=True)
class DraftBatch:
    """Training entries of several pieces, end to end without padding."""

    embedded: Tensor  # [T, H], the target's embedding of token t + 1
    features: Tensor  # [T, 3H], of position t
    final: Tensor  # [T, H], the target's final hidden state of position t + 1, before its norm
    position: Tensor  # int64 [T], absolute
    lengths: tuple[int, ...]  # of the pieces; pieces never see each other
    teachers: tuple[Teacher, ...]  # of each piece: the policy that recorded it

    def place(self) -> Tensor:
        """int64 [T], index of each entry within its piece."""
        return torch.cat([torch.arange(n, device=self.position.device) for n in self.lengths])

    def runs(self) -> list[tuple[int, int, Teacher]]:
        """(first row, row after the last, teacher) of neighbouring pieces of one policy."""
        runs: list[tuple[int, int, Teacher]] = []
        end = 0
        for length, teacher in zip(self.lengths, self.teachers, strict=True):
            begin, end = end, end + length
            if runs and runs[-1][2] is teacher:
                begin = runs.pop()[0]
            runs.append((begin, end, teacher))
        return runs


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

    def mix(self, acceptance: float) -> tuple[float, float]:
        """Weights of KL and TV at an acceptance in [0, 1]."""
        if self.kind == "hybrid":
            share = math.exp(-HYBRID_DECAY * acceptance)
            return share, 1.0 - share
        return (0.0, 1.0) if self.kind == "tv" else (1.0, 0.0)


def unrolled_loss(
    drafter: Drafter,
    batch: DraftBatch,
    cos_sin: Tensor,
    steps: int,
    objective: Objective = Objective(),  # noqa: B008 (frozen)
    acceptance: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """The objective against the target's law, weighted over entries and unroll steps.

    Args:
        drafter: the module.
        batch: packed entries.
        cos_sin: float32 [max_position, head_dim], the target's RoPE table.
        steps: 1 is EAGLE-like, 3 HASS-like, 7 EAGLE-3.
        objective: the loss.
        acceptance: of the drafter so far, in [0, 1]; decides the mix of `hybrid`.

    Returns:
        The scalar loss, and `drafter/{loss,top1,acceptance}` of the first step: cross-entropy, the
        share of equal favourites, and one minus the total variation.
    """
    place = batch.place()
    mix = objective.mix(acceptance)
    total, weights, weight = batch.features.new_zeros(()), 0.0, 1.0
    metrics: dict[str, float] = {}
    for step, hidden in enumerate(unroll(drafter, batch, cos_sin, steps)):
        valid = place >= step
        count = int(valid.sum())
        sums = _against_teachers(drafter, hidden, batch, valid, mix, objective.kind == "soft_ce")
        loss = sums[0]
        if objective.feature_weight:
            distance = F.smooth_l1_loss(hidden[valid], batch.final[valid], reduction="none")
            loss = loss + objective.feature_weight * distance.mean(-1).sum()
        total = total + weight * loss
        weights += weight * count
        weight *= STEP_WEIGHT
        if step == 0:
            cross_entropy, variation, same = (sums[1:].detach() / count).tolist()
            metrics["drafter/loss"] = cross_entropy
            metrics["drafter/acceptance"] = 1.0 - variation
            metrics["drafter/top1"] = same
    return total / weights, metrics


def _against_teachers(
    drafter: Drafter,
    hidden: Tensor,
    batch: DraftBatch,
    valid: Tensor,
    mix: tuple[float, float],
    keep_entropy: bool,
) -> Tensor:
    """[4]: sums over the valid rows of loss, cross-entropy, variation, equal favourites.

    Logits of both models are made a chunk of rows at a time, and again in the backward pass.
    """
    rows = max(1, CHUNK_LOGITS // drafter.spec.draft_vocab)
    total = hidden.new_zeros(4)
    for begin, end, teacher in batch.runs():
        chosen = valid[begin:end].nonzero()[:, 0] + begin
        for part in chosen.split(rows):
            inputs = (drafter, teacher, hidden[part], batch.final[part], mix, keep_entropy)
            if len(chosen) <= rows:
                total = total + _chunk(*inputs)
            else:
                total = total + checkpoint(_chunk, *inputs, use_reentrant=False)
    return total


def _chunk(
    drafter: Drafter,
    teacher: Teacher,
    hidden: Tensor,
    final: Tensor,
    mix: tuple[float, float],
    keep_entropy: bool,
) -> Tensor:
    with torch.no_grad():
        law = teacher.law(final, drafter.spec.rms_eps)  # [n, draft_vocab]
        entropy = torch.special.entr(law).sum()
    logp = drafter.lm_head(drafter.norm(hidden)).log_softmax(-1)  # [n, draft_vocab]
    cross_entropy = -(law * logp).sum()
    variation = (law - logp.exp()).abs().sum() / 2
    distance = cross_entropy if keep_entropy else cross_entropy - entropy
    same = (logp.argmax(-1) == law.argmax(-1)).sum().to(logp.dtype)
    loss = mix[0] * distance
    if mix[1]:
        loss = loss + mix[1] * variation
    return torch.stack([loss, cross_entropy.detach(), variation.detach(), same])


def unroll(drafter: Drafter, batch: DraftBatch, cos_sin: Tensor, steps: int) -> Iterator[Tensor]:
    """Hidden states [T, H] before the final norm, step by step; valid where `place >= step`."""
    table = cos_sin[batch.position]  # [T, head_dim]
    embedded = drafter.midlayer.input_layernorm(batch.embedded)
    hidden = drafter.fc(batch.features)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(steps):
        if step:
            hidden = _shift(hidden, 1)
        hidden = _layer(drafter, batch.lengths, embedded, hidden, keys, values, table)
        yield hidden


def _shift(x: Tensor, by: int) -> Tensor:
    """Moves the rows of [..., T, n] down; rows that cross into a next piece are never valid there.

    Row t takes row t - by. An entry that is valid at step j lies at least j rows into its piece,
    and no shift there is larger than j.
    """
    return F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """RoPE over [..., T, head_dim], pairing i with i + head_dim / 2."""
    cos, sin = table.to(x.dtype).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _layer(
    drafter: Drafter,
    lengths: tuple[int, ...],
    embedded: Tensor,
    hidden: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    table: Tensor,
) -> Tensor:
    """One unroll step over [T, H]; appends its K/V to those of the steps before."""
    spec, layer = drafter.spec, drafter.midlayer
    attention, count = layer.self_attn, len(hidden)
    joined = torch.cat([embedded, layer.hidden_norm(hidden)], -1)  # [T, 2H]

    def heads(x: Tensor, *shape: int) -> Tensor:
        return x.view(count, *shape, spec.head_dim).movedim(0, -2)

    groups = spec.num_heads // spec.num_kv_heads
    q = _rotate(heads(attention.q_proj(joined), spec.num_kv_heads, groups), table)
    keys.append(_rotate(heads(attention.k_proj(joined), spec.num_kv_heads), table))
    values.append(heads(attention.v_proj(joined), spec.num_kv_heads))
    attended = _attend(lengths, q * spec.head_dim**-0.5, keys, values)
    hidden = hidden + attention.o_proj(attended.movedim(-2, 0).reshape(count, -1))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _attend(
    lengths: tuple[int, ...], q: Tensor, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """Attention of unroll step j = len(keys) - 1.

    Committed keys are a masked block for each piece; of each later step i a row sees one entry,
    t - j + i, so those scores are a column each.

    Args:
        lengths: of the pieces.
        q: [kv_heads, groups, T, head_dim], scaled.
        keys, values: of each step so far, [kv_heads, T, head_dim].
    """
    step = len(keys) - 1

    def pieces(x: Tensor) -> tuple[Tensor, ...]:
        return x.split(lengths, -2)  # not slices: the gradient of a split is one concatenation

    drafted = [(_shift(keys[i], step - i), _shift(values[i], step - i)) for i in range(1, step + 1)]
    columns = [pieces((q * k[:, None]).sum(-1, keepdim=True)) for k, _ in drafted]
    drafted_v = [pieces(v[:, None]) for _, v in drafted]
    longest = max(lengths)
    ahead = torch.ones(longest, longest, dtype=torch.bool, device=q.device).triu(1 - step)
    outputs = []
    for index, (mine, k, v) in enumerate(
        zip(pieces(q), pieces(keys[0]), pieces(values[0]), strict=True)
    ):
        length = lengths[index]
        scores = (mine.flatten(1, 2) @ k.mT).unflatten(1, (-1, length))  # [kv_heads, groups, L, L]
        scores = scores.masked_fill(ahead[:length, :length], float("-inf"))
        scores = torch.cat([scores, *(column[index] for column in columns)], -1)
        committed, *shares = scores.softmax(-1).split([length, *[1] * step], -1)
        out = (committed.flatten(1, 2) @ v).unflatten(1, (-1, length))
        for share, drafted_value in zip(shares, drafted_v, strict=True):
            out = out + share * drafted_value[index]
        outputs.append(out)
    return torch.cat(outputs, 2)
