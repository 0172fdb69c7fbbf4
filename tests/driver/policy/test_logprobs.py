"""Log-probs and their gradients against float64, and on cases small enough to check by hand."""

import doctest
import math

import pytest
import torch
from torch.testing import assert_close

from driver.policy import logprobs as chunks
from driver.policy.logprobs import token_logprobs
from tests import kit


def test_temperature_divides_logits_not_logprobs_fault_44():
    logits = torch.tensor([[0.0, math.log(3.0)]])  # at T = 1/2 the odds 3 become 9
    logprobs, _ = token_logprobs(logits, torch.eye(2), torch.tensor([1]), 0.5)
    assert_close(logprobs.exp(), torch.tensor([0.9]))
    plain, _ = token_logprobs(logits, torch.eye(2), torch.tensor([1]), 1.0)
    assert_close(plain.exp(), torch.tensor([0.75]))


def test_entropy_of_known_distributions():
    # A uniform row, and one with tokens whose probability underflows to 0.
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, -1e4, -1e4]])
    _, entropy = token_logprobs(logits, torch.eye(4), torch.tensor([0, 1]), 1.0)
    assert_close(entropy, torch.tensor([math.log(4), math.log(2)]))


def test_entropy_gradient_is_that_of_float64_and_survives_vanishing_probabilities():
    hidden = torch.tensor([[1.0, -2.0, 0.5]])
    head = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    head[4] = 400 * head[4]  # the others underflow to 0 or this one does
    grads = []
    for dtype in (torch.float32, torch.float64):
        x = hidden.clone().to(dtype).requires_grad_()
        token_logprobs(x, head.to(dtype), torch.tensor([1]), 1.0, True)[1].sum().backward()
        grads.append(x.grad.double())
    assert grads[0].isfinite().all()
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)
    plain = token_logprobs(hidden.requires_grad_(), head, torch.tensor([1]), 1.0)[1]
    assert not plain.requires_grad


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_chunks_change_neither_values_nor_gradients(monkeypatch, rows):
    torch.manual_seed(0)
    head = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(11, (7,))
    temperature = 0.7
    weight = torch.randn(7, dtype=torch.float64)
    whole, entropy = token_logprobs(hidden, head, tokens, temperature)
    wanted = torch.autograd.grad((whole * weight).sum(), [hidden, head])
    monkeypatch.setattr(chunks, "CHUNK_LOGITS", rows * 11)
    cut, cut_entropy = token_logprobs(hidden, head, tokens, temperature)
    got = torch.autograd.grad((cut * weight).sum(), [hidden, head])
    assert_close((cut, cut_entropy, *got), (whole, entropy, *wanted))


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("gradients", ["of logprobs", "of both", "in one pass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logprobs_and_gradients_are_those_of_float64(monkeypatch, dtype, gradients, device):
    """Against autograd, in chunks, on rows that are sure, unsure, and rule a token out.

    Half precision rounds no logit of a card, and a gradient once; its logits on the CPU it rounds.
    """
    draw = kit.generator(0)
    hidden, head = torch.randn(37, 24, generator=draw), torch.randn(501, 24, generator=draw)
    hidden[:5] *= 30  # sure of one token
    hidden, head = hidden.to(dtype), head.to(dtype)
    tokens = torch.randint(501, (37,), generator=draw)
    tokens[:3] = (hidden[:3] @ head.T).argmax(-1)
    temperature = 0.7
    weight, entropy_weight = torch.randn(2, 37, generator=draw)
    entropy_grad = gradients == "of both"

    def known(logprobs, part):
        return weight.to(logprobs)[part]

    more = entropy_grad, known if gradients == "in one pass" else None

    def results(dtype, logprobs_of):
        x, w = (t.detach().to(device, dtype).requires_grad_() for t in (hidden, head))
        logprobs, entropy = logprobs_of(x, w, tokens.to(device), temperature)
        loss = (logprobs * weight.to(logprobs)).sum()
        if entropy_grad:
            loss = loss + (entropy * entropy_weight.to(entropy)).sum()
        return [t.double().cpu() for t in (logprobs, entropy, *torch.autograd.grad(loss, [x, w]))]

    def reference(x, w, tokens, temperature):
        logp = torch.log_softmax(x @ w.T / temperature, -1)
        entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, tokens[:, None])[:, 0], entropy

    monkeypatch.setattr(chunks, "CHUNK_LOGITS", 10 * 501)
    got = results(dtype, lambda *a: token_logprobs(*a, *more))
    wanted = results(torch.float64, reference)
    for one, other, rounded in zip(got, wanted, (False, False, True, True), strict=True):
        tolerance = kit.TOLERANCE.get(dtype, 1e-12)
        if dtype == torch.bfloat16 and device != "cpu" and not rounded:
            tolerance = kit.TOLERANCE[torch.float32]
        assert (one - other).norm() <= tolerance * other.norm()
    again = results(dtype, lambda *a: token_logprobs(*a, *more))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_the_gradient_of_a_nearly_certain_token_is_not_rounded_away():
    """1 - p is below half a bfloat16 step of p, and is what this token learns by."""
    head = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    hidden = torch.tensor([[8.0]], dtype=torch.bfloat16, requires_grad=True)
    token_logprobs(hidden, head, torch.tensor([0]), 1.0)[0].sum().backward()
    assert_close(hidden.grad.item(), 1 / (1 + math.exp(8.0)), rtol=1e-2, atol=0.0)


def test_ruled_out_tokens_have_no_gradient():
    head = torch.tensor([[1.0], [0.5], [-math.inf]], requires_grad=True)
    hidden = torch.tensor([[1.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([0]), 1.0, True)
    odds = torch.tensor([1.0, 0.5]).softmax(-1)
    assert_close(entropy[0].item(), -(odds * odds.log()).sum().item())
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), [head])
    assert grad.isfinite().all() and grad[2] == 0 and grad[0] != 0


def test_docstring_examples():
    assert doctest.testmod(chunks).failed == 0
