"""The unrolled forward against a plain loop, and the loss over packed pieces."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from driver.drafter import loss as draft_loss
from driver.drafter.buffer import generated_run
from driver.drafter.loss import (
    STEP_WEIGHT,
    DraftBatch,
    Teacher,
    unroll,
    unrolled_loss,
)
from driver.model.drafter import Drafter, DraftSpec
from tests.driver.drafting import packed_batch
from tests.kit import randn

SPEC = DraftSpec(16, 4, 2, 4, 1e-5, vocab_size=30, intermediate_size=20, draft_vocab=9)
MAX_POSITION = 64


def make_drafter() -> Drafter:
    drafter = Drafter(SPEC, 3).double()
    with torch.no_grad():
        for index, weight in enumerate(drafter.parameters()):
            weight.add_(0.3 * randn(*weight.shape, seed=index).double())
    return drafter


def rope() -> torch.Tensor:
    angles = torch.arange(MAX_POSITION).double()[:, None] * torch.tensor([1.0, 0.1]).double()
    return torch.cat([angles.cos(), angles.sin()], -1)


TEACHERS = [
    Teacher(1 + 0.1 * randn(16, seed=90 + v).double(), randn(9, 16, seed=80 + v).double())
    for v in range(2)
]


def piece(length: int, seed: int, start: int = 0) -> DraftBatch:
    return packed_batch(
        randn(length, 16, seed=seed).double(),
        randn(length, 48, seed=seed + 1).double(),
        randn(length, 16, seed=seed + 2).double(),
        torch.arange(start, start + length),
        (length,),
        (TEACHERS[seed % 2],),
    )


def teacher_of(batch: DraftBatch) -> Teacher:
    (span,) = batch.spans
    return span[2]


def pack(*pieces: DraftBatch) -> DraftBatch:
    joined = {
        name: torch.cat([getattr(p, name) for p in pieces])
        for name in ("embedded", "features", "final", "position")
    }
    return packed_batch(
        **joined,
        lengths=tuple(len(p.position) for p in pieces),
        teachers=tuple(teacher_of(p) for p in pieces),
    )


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + SPEC.rms_eps) * weight


def rotate(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """One head vector [4] by one row of the table."""
    cos, sin = row[:2], row[2:]
    return torch.cat([x[:2] * cos - x[2:] * sin, x[2:] * cos + x[:2] * sin])


def drafted_chain(drafter: Drafter, batch: DraftBatch, t: int, steps: int) -> list[torch.Tensor]:
    """Hidden states of drafting `steps - 1` tokens after the committed entries 0 .. t.

    What inference does, one entry and one head at a time: entry t from its features, then each
    next entry from the drafter's own last output.
    """
    state, table = drafter.state_dict(), rope()
    layer = "midlayer.self_attn."
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for s in range(t + steps):
        hidden = state["fc.weight"] @ batch.features[s] if s <= t else outputs[-1]
        embedded = norm(batch.embedded[s], state["midlayer.input_layernorm.weight"])
        x = torch.cat([embedded, norm(hidden, state["midlayer.hidden_norm.weight"])])
        row = table[batch.position[s]]
        q = (state[f"{layer}q_proj.weight"] @ x).view(4, 4)
        k = (state[f"{layer}k_proj.weight"] @ x).view(2, 4)
        keys.append(torch.stack([rotate(head, row) for head in k]))
        values.append((state[f"{layer}v_proj.weight"] @ x).view(2, 4))
        if s < t:
            continue
        heads = []
        for h in range(4):
            past_k = torch.stack([key[h // 2] for key in keys])
            past_v = torch.stack([value[h // 2] for value in values])
            heads.append((past_k @ rotate(q[h], row) / 2).softmax(0) @ past_v)
        hidden = hidden + state[f"{layer}o_proj.weight"] @ torch.cat(heads)
        y = norm(hidden, state["midlayer.post_attention_layernorm.weight"])
        gate = F.silu(state["midlayer.mlp.gate_proj.weight"] @ y)
        up = state["midlayer.mlp.up_proj.weight"] @ y
        outputs.append(hidden + state["midlayer.mlp.down_proj.weight"] @ (gate * up))
    return outputs


def test_unroll_equals_drafting_one_entry_at_a_time():
    drafter, steps = make_drafter(), 4
    pieces = [piece(7, 10), piece(5, 20, start=30)]
    hidden = list(unroll(drafter, pack(*pieces), rope(), steps))
    compared = 0
    for begin, one in zip((0, 7), pieces, strict=True):
        length = len(one.position)
        for t in range(length):
            chain = drafted_chain(drafter, one, t, min(steps, length - t))
            for step, expected in enumerate(chain):
                torch.testing.assert_close(
                    hidden[step][begin + t], expected, rtol=1e-10, atol=1e-10
                )
                compared += 1
    assert compared == (7 + 6 + 5 + 4) + (5 + 4 + 3 + 2)


def test_loss_is_the_weighted_mean_over_entries_and_steps():
    drafter, batch = make_drafter().requires_grad_(False), piece(3, 1)
    loss, means = unrolled_loss(drafter, batch, rope(), 2)
    total = weights = 0.0
    for step, hidden in enumerate(unroll(drafter, batch, rope(), 2)):
        for t in range(3 - step):
            logits = drafter.lm_head(norm(hidden[t], drafter.norm.weight))
            target = TEACHERS[1].probs(batch.final[t + step], SPEC.rms_eps)
            entropy = -(target * logits.log_softmax(-1)).sum()
            total += STEP_WEIGHT**step * float(entropy)
            weights += STEP_WEIGHT**step
    assert float(loss) == pytest.approx(total / weights, rel=1e-12)
    single, _ = unrolled_loss(drafter, batch, rope(), 1)
    assert float(means[0]) == pytest.approx(float(single), rel=1e-12)


def gradients(drafter: Drafter, batch: DraftBatch, steps: int) -> tuple[float, list[torch.Tensor]]:
    loss, _ = unrolled_loss(drafter, batch, rope(), steps)
    return float(loss.detach()), list(torch.autograd.grad(loss, drafter.trainable()))


def test_packed_equals_single_documents_in_loss_and_gradient():
    """Also pieces of one and two entries, which have no valid rows at later steps."""
    drafter, steps = make_drafter(), 3
    pieces = [piece(6, 1), piece(1, 2), piece(9, 3, start=17), piece(2, 4)]
    weights = [
        sum(STEP_WEIGHT**j * max(0, len(p.position) - j) for j in range(steps)) for p in pieces
    ]
    singles = [gradients(drafter, p, steps) for p in pieces]
    loss, packed = gradients(drafter, pack(*pieces), steps)
    share = [w / sum(weights) for w in weights]
    assert loss == pytest.approx(sum(w * s[0] for w, s in zip(share, singles, strict=True)))
    for index, grad in enumerate(packed):
        expected = sum(w * s[1][index] for w, s in zip(share, singles, strict=True))
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


def test_pieces_do_not_attend_to_each_other():
    drafter = make_drafter()
    own, batches = piece(6, 1), [pack(piece(5, s), piece(6, 1), piece(4, s + 9)) for s in (2, 5)]
    results = [list(unroll(drafter, batch, rope(), 3)) for batch in batches]
    alone = list(unroll(drafter, own, rope(), 3))
    for step in range(3):
        first, second = (result[step][5 : 11 - step] for result in results)
        assert torch.equal(first, second)
        torch.testing.assert_close(first, alone[step][: 6 - step])


def test_rotations_use_absolute_positions():
    """A crop keeps its positions; attention depends on distances only, which a crop keeps too."""
    drafter, near, far = make_drafter(), piece(6, 1), piece(6, 1, start=40)
    jump = replace(near, position=torch.tensor([0, 1, 2, 13, 14, 15]))
    states = [list(unroll(drafter, batch, rope(), 3))[2][:4] for batch in (near, far, jump)]
    torch.testing.assert_close(states[0], states[1], rtol=1e-9, atol=1e-9)
    assert (states[0] - states[2]).abs().max() > 1e-3


def test_the_gradient_reaches_only_the_drafter():
    drafter, batch = make_drafter(), piece(6, 1)
    for name in ("embedded", "features", "final"):
        assert not getattr(batch, name).requires_grad
    unrolled_loss(drafter, batch, rope(), 3)[0].backward()
    assert drafter.lm_head.weight.grad is None
    for name, weight in drafter.named_parameters():
        assert name == "lm_head.weight" or float(weight.grad.abs().sum()) > 0, name


def numbers(drafter: Drafter, batch: DraftBatch) -> tuple[float, float, float]:
    """Mean KL, TV and entropy of the target at unroll step 0, entry by entry."""
    kl = tv = entropy = 0.0
    teacher = teacher_of(batch)
    for t, hidden in enumerate(next(unroll(drafter, batch, rope(), 1))):
        target = teacher.probs(batch.final[t], SPEC.rms_eps)
        draft = drafter.lm_head(norm(hidden, drafter.norm.weight)).softmax(-1)
        kl += float((target * (target / draft).log()).sum())
        tv += float((target - draft).abs().sum()) / 2
        entropy -= float((target * target.log()).sum())
    return tuple(x / len(batch.position) for x in (kl, tv, entropy))


def test_the_loss_equals_its_formula():
    drafter, batch = make_drafter().requires_grad_(False), piece(5, 3)
    kl, tv, entropy = numbers(drafter, batch)
    loss, means = unrolled_loss(drafter, batch, rope(), 1)
    assert float(loss) == pytest.approx(kl + entropy, rel=1e-9)
    assert means[:2].tolist() == pytest.approx([kl + entropy, 1 - tv], rel=1e-9)


def plain_loss(drafter: Drafter, batch: DraftBatch, skipped: tuple[int, ...] = ()) -> torch.Tensor:
    """The loss of two unroll steps, differentiated by autograd.

    Chains that draft the target of a skipped entry end before it.
    """
    total = weights = 0.0
    for step, hidden in enumerate(unroll(drafter, batch, rope(), 2)):
        for t in range(len(batch.position) - step):
            if any(t <= entry <= t + step for entry in skipped):
                continue
            target = teacher_of(batch).probs(batch.final[t + step], SPEC.rms_eps)
            logp = F.linear(
                norm(hidden[t], drafter.norm.weight), drafter.lm_head.weight
            ).log_softmax(-1)
            total = total - STEP_WEIGHT**step * (target * logp).sum()
            weights += STEP_WEIGHT**step
    return total / weights


def test_the_closed_form_gradient_equals_autograd():
    drafter, batch = make_drafter(), piece(5, 3)
    loss, _ = unrolled_loss(drafter, batch, rope(), 2)
    plain = plain_loss(drafter, batch)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-9)
    trained = drafter.trainable()
    # With a factor other than one.
    for ours, theirs in zip(
        torch.autograd.grad(3 * loss, trained), torch.autograd.grad(3 * plain, trained), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_tokens_of_tools_are_context_and_no_targets():
    """Tokens 4, 5 and 9 are a tool's: the targets of entries 2, 3 and 7."""
    drafter, batch = make_drafter(), piece(9, 3)
    run = generated_run(11, [(4, 6), (9, 10)])
    left = torch.arange(9, 0, -1).minimum(run)
    loss, means = unrolled_loss(drafter, replace(batch, left=left), rope(), 2)
    plain = plain_loss(drafter, batch, skipped=(2, 3, 7))
    assert loss.item() == pytest.approx(plain.item(), rel=1e-9)
    trained = drafter.trainable()
    found, wanted = (torch.autograd.grad(x, trained) for x in (loss, plain))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    context = replace(batch, features=batch.features.clone(), left=left)
    context.features[3] += 1.0
    assert unrolled_loss(drafter, context, rope(), 2)[0].item() != loss.item()


def test_masked_rows_may_hold_any_values():
    drafter, batch = make_drafter(), piece(5, 3)
    silent = replace(batch, left=torch.tensor([5, 4, 3, 0, 0], dtype=torch.int32))
    loss, means = unrolled_loss(drafter, silent, rope(), 1)
    loss.backward()
    wanted = [w.grad.clone() for w in drafter.trainable()]
    silent.final[3:] = float("nan")
    drafter.zero_grad()
    other, others = unrolled_loss(drafter, silent, rope(), 1)
    other.backward()
    assert loss.item() == other.item() and torch.equal(means, others)
    for w, grad in zip(drafter.trainable(), wanted, strict=True):
        assert torch.equal(w.grad, grad)


def test_chunks_of_the_head_change_neither_loss_nor_gradient(monkeypatch):
    drafter, batch = make_drafter(), pack(piece(6, 1), piece(3, 2), piece(9, 3), piece(2, 5))
    results = []
    for chunk in (1 << 20, 9 * 4, 1):
        monkeypatch.setattr(draft_loss, "CHUNK_LOGITS", chunk)
        loss, _ = unrolled_loss(drafter, batch, rope(), 3)
        results.append((loss.detach(), *torch.autograd.grad(loss, drafter.trainable())))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_teacher_probabilities_are_computed_once_for_all_steps(monkeypatch):
    made, probs = [], Teacher.probs
    monkeypatch.setattr(
        Teacher,
        "probs",
        lambda self, final, eps: (made.append(len(final)), probs(self, final, eps))[1],
    )
    monkeypatch.setattr(draft_loss, "CHUNK_LOGITS", 9 * 4)
    loss, _ = unrolled_loss(make_drafter(), pack(piece(6, 1), piece(5, 2)), rope(), 3)
    loss.backward()
    assert made == [4, 2, 4, 1]  # two policies, four rows per chunk


def test_each_piece_learns_from_the_policy_that_recorded_it():
    drafter, pieces = make_drafter(), [piece(4, 1), piece(3, 2), piece(5, 4), piece(2, 3)]
    batch = pack(*pieces)
    spans = [(b, e, t is TEACHERS[1]) for b, e, t in batch.spans]
    assert spans == [(0, 4, True), (4, 12, False), (12, 14, True)]
    loss, _ = unrolled_loss(drafter, batch, rope(), 1)
    wrong = replace(batch, spans=((0, 14, TEACHERS[0]),))
    assert loss.item() != unrolled_loss(drafter, wrong, rope(), 1)[0].item()


def test_padding_changes_neither_loss_nor_gradient():
    drafter, one = make_drafter(), pack(piece(6, 1), piece(4, 3))
    pad = 7

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.new_zeros(pad, *x.shape[1:])])

    names = ("embedded", "features", "final", "position")
    batch = packed_batch(
        **{name: padded(getattr(one, name)) for name in names},
        lengths=(6, 4, pad),
        teachers=(TEACHERS[1],) * 3,
    )
    batch = replace(batch, left=padded(one.left))
    (loss, grads), (other, others) = (gradients(drafter, b, 3) for b in (one, batch))
    assert loss == pytest.approx(other, rel=1e-12)
    for a, b in zip(grads, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
