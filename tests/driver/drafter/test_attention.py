"""The drafter's training attention: both forms against plain loops, values and gradients."""

import pytest
import torch

from driver.drafter import attention as draft_attention
from driver.drafter.attention import Segments, _Chain, _drafted, chain_attention, flash_works
from tests.kit import gpu, needs_gpu, randn

LENGTHS = (5, 1, 9, 2)
HEADS, KV_HEADS, SIZE = 4, 2, 8


def inputs(steps: int, dtype=torch.float64, device="cpu") -> list[torch.Tensor]:
    """q, then keys, then values of each step."""
    shapes = [(sum(LENGTHS), heads, SIZE) for heads in [HEADS] + [KV_HEADS] * 2 * steps]
    return [
        randn(*shape, seed=i).to(device, dtype).requires_grad_() for i, shape in enumerate(shapes)
    ]


def plain(parts: list[torch.Tensor], steps: int) -> torch.Tensor:
    """Row by row and head by head."""
    q, keys, values = parts[0], parts[1 : 1 + steps], parts[1 + steps :]
    rows, begin = [], 0
    for length in LENGTHS:
        for t in range(begin, begin + length):
            heads = []
            for h in range(HEADS):
                g = h * KV_HEADS // HEADS
                seen_k = torch.cat(
                    [keys[0][begin : t + 1, g], *(k[t : t + 1, g] for k in keys[1:])]
                )
                seen_v = torch.cat(
                    [values[0][begin : t + 1, g], *(v[t : t + 1, g] for v in values[1:])]
                )
                heads.append((seen_k @ q[t, h] / SIZE**0.5).softmax(0) @ seen_v)
            rows.append(torch.stack(heads))
        begin += length
    return torch.stack(rows)


def causal(offsets: torch.Tensor) -> torch.Tensor:
    document = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    row = torch.arange(len(document))
    return (document[:, None] == document) & (row[:, None] >= row)


def scores_of(q, k, offsets, scale):
    k = k.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = scale * torch.einsum("thd,shd->hts", q, k)
    return scores.masked_fill(~causal(offsets), float("-inf"))


def dense(q, k, v, offsets, *settings, scale):
    """What the forward pass of FlashAttention returns."""
    scores = scores_of(q, k, offsets, scale)
    v = v.repeat_interleave(HEADS // KV_HEADS, 1)
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1), torch.zeros(2), torch.zeros(0), None


def dense_backward(grad, q, k, v, out, lse, offsets, *settings, scale):
    """What its backward pass computes from the given output and log-sum-exp."""
    wide_k, wide_v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    share = (scores_of(q, k, offsets, scale) - lse[..., None]).exp()
    delta = (grad * out).sum(-1).t()[..., None]
    ds = scale * share * (torch.einsum("thd,shd->hts", grad, wide_v) - delta)
    dk, dv = torch.einsum("hts,thd->shd", ds, q), torch.einsum("hts,thd->shd", share, grad)
    fold = [x.unflatten(1, (KV_HEADS, -1)).sum(2) for x in (dk, dv)]
    return torch.einsum("hts,shd->thd", ds, wide_k), *fold


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_one_block_per_piece_equals_the_plain_loop(steps):
    parts = inputs(steps)
    out = chain_attention(parts[0], parts[1 : 1 + steps], parts[1 + steps :], Segments.of(LENGTHS))
    expected = plain(parts, steps)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = randn(*out.shape, seed=99).double()
    ours, theirs = (torch.autograd.grad(x, parts, grad) for x in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_flash_attention_merged_with_the_chain_equals_the_plain_loop(monkeypatch, steps):
    """The merge and its gradient in float64, on a stand-in for FlashAttention."""
    monkeypatch.setattr(draft_attention, "_flash", dense)
    monkeypatch.setattr(draft_attention, "_flash_backward", dense_backward)
    parts = inputs(steps)
    keys, values = parts[1 : 1 + steps], parts[1 + steps :]
    own, segments = (_drafted(keys), _drafted(values)), Segments.of(LENGTHS)
    out = _Chain.apply(parts[0], keys[0], values[0], *own, segments, SIZE**-0.5)
    expected = plain(parts, steps)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = randn(*out.shape, seed=99).double()
    ours, theirs = (torch.autograd.grad(x, parts, grad) for x in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "fault, reason",
    [(1.0, ""), (1.5, "its result differs by"), (RuntimeError("not compiled in"), "not c")],
)
def test_flash_attention_is_checked_before_it_is_used(monkeypatch, fault, reason):
    """A correct one, one with a wrong backward pass, one that is missing."""

    def flash(*inputs, scale):
        if isinstance(fault, Exception):
            raise fault
        return dense(*inputs, scale=scale)

    def backward(*inputs, scale):
        return tuple(x * fault for x in dense_backward(*inputs, scale=scale))

    monkeypatch.setattr(draft_attention, "_flash", flash)
    monkeypatch.setattr(draft_attention, "_flash_backward", backward)
    shape = torch.device("cpu"), torch.float32, HEADS, KV_HEADS, SIZE
    found = draft_attention._flash_error(*shape)
    assert found.startswith(reason) and bool(found) == bool(reason)
    assert not flash_works(*shape)  # never on a CPU


@gpu
@needs_gpu
@pytest.mark.parametrize("steps", [1, 3])
def test_flash_attention_on_the_gpu_is_within_half_precision(steps):
    """Offsets on the device only, empty pieces at the end, padding in one of them."""
    half = [x.detach().bfloat16().cuda().requires_grad_() for x in inputs(steps)]
    exact = [x.detach().double().cpu().requires_grad_() for x in half]
    bounds = torch.tensor([0, 5, 6, 15, 17, 17, 17], dtype=torch.int32, device="cuda")
    segments = Segments(bounds, 17, ())
    out = chain_attention(half[0], half[1 : 1 + steps], half[1 + steps :], segments)
    expected = plain(exact, steps)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-2, atol=2e-2)
    grad = randn(*out.shape, seed=99)
    ours = torch.autograd.grad(out, half, grad.bfloat16().cuda())
    theirs = torch.autograd.grad(expected, exact, grad.bfloat16().double())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=3e-2, atol=3e-2)
