"""Training the drafter on its own drafts: the unrolled forward over packed pieces of documents.

At unroll step j entry t stands for the j-th token drafted in a row: its hidden input is the
drafter's own output for entry t - 1 at step j - 1, its token the true one. It attends to entries up
to t - j as they are committed (step 0), and to the j entries drafted since. The first j entries of
a piece have no such past and are left out of step j.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from driver.drafter import Drafter

STEP_WEIGHT = 0.8  # of each unroll step against the one before


@dataclass(frozen=True)
class DraftBatch:
    """Training entries of several pieces, end to end without padding."""

    embedded: Tensor  # [T, H], the target's embedding of token t + 1
    features: Tensor  # [T, 3H], of position t
    teacher: Tensor  # [T, draft_vocab], the target's probabilities of token t + 2
    position: Tensor  # int64 [T], absolute
    lengths: tuple[int, ...]  # of the pieces; pieces never see each other

    def place(self) -> Tensor:
        """int64 [T], index of each entry within its piece."""
        return torch.cat([torch.arange(n, device=self.position.device) for n in self.lengths])


def unrolled_loss(
    drafter: Drafter, batch: DraftBatch, cos_sin: Tensor, steps: int
) -> tuple[Tensor, dict[str, float]]:
    """Soft cross-entropy against the target's law, weighted over entries and unroll steps.

    Args:
        drafter: the module.
        batch: packed entries.
        cos_sin: float32 [max_position, head_dim], the target's RoPE table.
        steps: 1 is EAGLE-like, 3 HASS-like, 7 EAGLE-3.

    Returns:
        The scalar loss, and `drafter/{loss,top1}` of the first step.
    """
    place = batch.place()
    total, weights, weight = batch.features.new_zeros(()), 0.0, 1.0
    metrics: dict[str, float] = {}
    for step, hidden in enumerate(unroll(drafter, batch, cos_sin, steps)):
        valid = (place >= step).nonzero()[:, 0]
        logits = drafter.lm_head(drafter.norm(hidden[valid]))  # [n, draft_vocab]
        teacher = batch.teacher[valid]
        loss = -(teacher * logits.log_softmax(-1)).sum()
        total = total + weight * loss
        weights += weight * len(valid)
        weight *= STEP_WEIGHT
        if step == 0:
            same = logits.argmax(-1) == teacher.argmax(-1)
            metrics["drafter/loss"] = float(loss.detach()) / len(valid)
            metrics["drafter/top1"] = float(same.float().mean())
    return total / weights, metrics


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
