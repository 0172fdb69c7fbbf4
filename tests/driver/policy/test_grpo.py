"""GRPO's maths, mostly on cases small enough to check by hand."""

import doctest
import functools
import itertools
import math
import operator

import pytest
import torch
from torch.testing import assert_close

from driver.common import numbers
from driver.config.estimators import ESTIMATORS, Estimator
from driver.policy import grpo, packing
from driver.rollout.request import request_id

KINDS = list(ESTIMATORS)


def loss_of(new, old=None, rollout=None, advantage=1.0, **options):
    """`policy_loss` with defaults for the arguments that a test does not set."""
    new = torch.as_tensor(new, dtype=torch.float64)
    old = new.detach() if old is None else torch.as_tensor(old, dtype=torch.float64)
    rollout = old if rollout is None else torch.as_tensor(rollout, dtype=torch.float64)
    advantage = torch.as_tensor(advantage, dtype=torch.float64).expand(new.shape)
    options = {"clip_low": 0.2, "clip_high": 0.3, "is_cap": 2.0} | options
    return grpo.policy_loss(new, old, rollout, advantage, **options)


@pytest.mark.parametrize("module", [grpo, packing, numbers])
def test_docstring_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# -- advantages


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        # Group 7 has rewards 1, 0, 0, 1: mean 1/2, population std 1/2. Group 2 has 3, 0: 3/2, 3/2.
        (
            "grpo",
            [0.5 / 0.5001, -0.5 / 0.5001, 1.5 / 1.5001, -0.5 / 0.5001, 0.5 / 0.5001, -1.5 / 1.5001],
        ),
        ("dr_grpo", [0.5, -0.5, 1.5, -0.5, 0.5, -1.5]),
        ("rloo", [2 / 3, -2 / 3, 3.0, -2 / 3, 2 / 3, -3.0]),
        ("reinforce", [1 - 5 / 6, -5 / 6, 3 - 5 / 6, -5 / 6, 1 - 5 / 6, -5 / 6]),
    ],
)
def test_advantages_by_hand(kind, wanted):
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.0, 1.0, 0.0])
    groups = torch.tensor([7, 7, 2, 7, 7, 2])
    assert_close(grpo.group_advantages(rewards, groups, kind), torch.tensor(wanted))


def test_dapo_advantages_are_those_of_grpo():
    rewards, groups = torch.rand(12), torch.arange(12) % 3
    assert_close(
        grpo.group_advantages(rewards, groups, "dapo"),
        grpo.group_advantages(rewards, groups, "grpo"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_advantage_is_zero_where_all_rewards_are_equal_fault_48(kind):
    # The mean of ten 0.1 misses it by a rounding error, which 1 / (std + eps) would magnify.
    rewards = torch.full((10,), 0.1, dtype=torch.float64)
    assert functools.reduce(operator.add, rewards.tolist()) / 10 != 0.1  # `sum` may compensate
    advantages = grpo.group_advantages(rewards, torch.zeros(10, dtype=torch.long), kind)
    assert advantages.tolist() == [0.0] * 10


@pytest.mark.parametrize("kind", [kind for kind in KINDS if ESTIMATORS[kind].needs_siblings])
def test_an_equal_group_is_zero_and_a_mixed_one_is_not_fault_48(kind):
    rewards, groups = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1]), torch.tensor([0, 1, 0, 1, 0])
    advantages = grpo.group_advantages(rewards, groups, kind)
    assert (advantages == 0).tolist() == [True, False, True, False, True]
    assert grpo.zero_std_groups(rewards, groups).tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_one_and_empty_batches_are_finite(kind):
    alone = grpo.group_advantages(torch.tensor([5.0]), torch.tensor([9]), kind)
    assert alone.tolist() == [0.0]
    empty = torch.zeros(0)
    assert grpo.group_advantages(empty, empty.long(), kind).shape == (0,)
    assert grpo.zero_std_groups(empty, empty.long()).shape == (0,)


def test_zero_std_groups_compare_the_responses_that_are_trained_on():
    """Group 3 keeps two different rewards, 5 one response, 7 none, 9 two equal ones."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    groups = torch.tensor([3, 3, 5, 5, 7, 7, 9, 9, 9])
    kept = torch.tensor([0, 1, 2, 6, 7])
    assert grpo.zero_std_groups(rewards, groups, kept).tolist() == [False, True, True, True]
    assert not grpo.zero_std_groups(rewards, groups).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_keeps_its_coefficient_in_groups_of_equal_rewards(kind):
    """Normalised with the rewards, any coefficient would give the same advantages."""
    rewards, groups = torch.full((4,), 0.1), torch.zeros(4, dtype=torch.long)
    kl = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    without_own = ESTIMATORS[kind].baseline == "siblings"
    centred = torch.tensor([2.0, 1.0, 0.0, -3.0]) * (4 / 3 if without_own else 1)
    for coef in (0.001, 0.01, 0.1):
        advantages = grpo.group_advantages(rewards, groups, kind, coef * kl)
        assert_close(advantages, coef * centred)


def test_a_penalty_is_added_to_the_normalised_rewards():
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    penalty = torch.tensor([0.3, 0.1, 0.0, 0.0], dtype=torch.float64)
    with_penalty = grpo.group_advantages(rewards, groups, "grpo", penalty)
    without = grpo.group_advantages(rewards, groups, "grpo")
    assert_close(with_penalty - without, torch.tensor([-0.1, 0.1, 0.0, 0.0]))


def test_a_new_estimator_is_one_entry(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "new", Estimator("siblings", scaled=True))
    rewards, groups = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long)
    centred = grpo.group_advantages(rewards, groups, "rloo").double()
    spread = centred.square().mean().sqrt()
    got = grpo.group_advantages(rewards, groups, "new")
    assert_close(got, (centred / (spread + grpo.STD_EPS)).float())


def test_groups_are_identified_by_id_fault_45():
    # The same prompt twice: merged, the second group would get the advantage -1/4.
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    advantages = grpo.group_advantages(rewards, torch.tensor([0, 0, 1, 1]), "dr_grpo")
    assert advantages.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_leave_one_out_is_finite_where_siblings_agree_fault_46():
    # The siblings of the first response have a spread of 0, which nothing is divided by.
    advantages = grpo.group_advantages(
        torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.zeros(4, dtype=torch.long), "rloo"
    )
    assert_close(advantages, torch.tensor([-1.0, 1 / 3, 1 / 3, 1 / 3]))


# -- rewards


def test_overlong_penalty_is_linear_in_the_buffer():
    lengths = torch.tensor([1, 80, 85, 100, 120])
    assert grpo.overlong_penalty(lengths, 100, 20).tolist() == [0.0, 0.0, -0.25, -1.0, -1.0]


# -- loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "slope"),
    [
        (1.0, 2.0, -2.0, 0, -2.0),
        (1.5, 1.0, -1.3, 1, 0.0),  # clip_high
        (0.5, 1.0, -0.5, 0, -0.5),  # below 1 a good token may always rise
        (0.5, -1.0, 0.8, 1, 0.0),  # clip_low
        (1.5, -1.0, 1.5, 0, 1.5),  # above 1 a bad token may always fall
    ],
)
def test_clip_by_hand(ratio, advantage, loss, clipped, slope):
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    share = loss_of(new, old=[0.0], advantage=advantage)
    share.loss.backward()
    assert share.loss.item() == pytest.approx(loss)
    assert share.clipped.item() == clipped
    assert new.grad.item() == pytest.approx(slope)
    assert share.ppo_kl.item() == pytest.approx(-math.log(ratio))


@pytest.mark.parametrize(("weight", "wanted"), [(0.5, 0.5), (1.0, 1.0), (1.9, 1.9), (4.0, 2.0)])
def test_importance_weight_is_truncated_and_has_no_gradient(weight, wanted):
    new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    share = loss_of(new, rollout=[-1.0 - math.log(weight)])
    share.loss.backward()
    assert share.loss.item() == pytest.approx(-wanted)
    assert new.grad.item() == pytest.approx(-wanted)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("shift", [100.0, -100.0, 1e4, -1e4])
def test_extreme_log_ratios_stay_finite_and_are_counted(shift, advantage):
    """exp(100) is infinite in float32: its gradient in the clipped term would be 0 * inf."""
    new = torch.tensor([-1.0 + shift, -1.0], dtype=torch.float32, requires_grad=True)
    old = torch.full((2,), -1.0)
    share = grpo.policy_loss(
        *(new, old, old, torch.full((2,), advantage)),
        clip_low=0.2, clip_high=0.2, is_cap=2.0, ref_logprobs=old, kl_coef=0.1,
    )  # fmt: skip
    share.loss.backward()
    assert share.loss.isfinite() and new.grad.isfinite().all()
    assert new.grad[1] == -advantage
    assert 0 < share.ref_kl < math.exp(2 * grpo.MAX_LOG_RATIO)
    assert share.clamped == 1


def test_log_ratios_within_the_bound_are_not_clamped():
    share = loss_of([-1.0, -9.0], old=[-9.0, -1.0], ref_logprobs=torch.tensor([-10.0, -0.5]))
    assert share.clamped == 0
    assert share.ppo_kl.item() == pytest.approx(0.0)
    # k3 alone is clamped, where the reference is the one that is far away.
    share = loss_of([-80.0], ref_logprobs=torch.tensor([-1.0]))
    assert share.clamped == 1
    assert share.ref_kl.item() == pytest.approx(math.expm1(10) - 10)


@pytest.mark.parametrize("norm", ["tokens", "constant"])
def test_masked_out_responses_leave_the_denominator_fault_42(norm):
    assert grpo.loss_denominator([3, 5], norm, 10) < grpo.loss_denominator([3, 5, 10], norm, 10)
    assert grpo.loss_denominator([], norm, 10) == 1


def test_constant_denominator_does_not_depend_on_lengths_fault_47():
    cuts = [[3, 5, 1, 10], [1, 1, 1, 1], [10, 10, 10, 10]]
    assert {grpo.loss_denominator(lengths, "constant", 10) for lengths in cuts} == {40}


def test_shares_of_any_cut_add_up_fault_41():
    torch.manual_seed(1)
    new, old, rollout, advantage = torch.randn(4, 12, dtype=torch.float64)
    whole = loss_of(new, old, rollout, advantage)
    for size in (1, 2, 5, 12):
        parts = [
            loss_of(*(t[i : i + size] for t in (new, old, rollout, advantage)))
            for i in range(0, 12, size)
        ]
        assert_close(sum(p.loss for p in parts), whole.loss)
        assert_close(sum(p.ppo_kl for p in parts), whole.ppo_kl)
        assert sum(p.tokens for p in parts) == 12


# -- KL


def exact_kl_gradients(kind):
    """Mean gradient of an estimator in the loss, and those of the reverse and the forward KL."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([1.0, 0.5, -0.2], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    probs = logp.detach().exp()
    estimate = (probs * grpo.kl_estimate(logp, ref, kind)).sum()
    got = torch.autograd.grad(estimate, logits, retain_graph=True)[0]
    true = (logp.exp() * (logp - ref)).sum()
    forward = (ref.exp() * (ref - logp)).sum()
    return got, *(torch.autograd.grad(kl, logits, retain_graph=True)[0] for kl in (true, forward))


def test_only_k2_has_the_gradient_of_the_reverse_kl():
    k1, reverse, forward = exact_kl_gradients("k1")
    assert_close(k1, torch.zeros_like(k1))
    assert_close(exact_kl_gradients("k2")[0], reverse)
    assert_close(exact_kl_gradients("k3")[0], forward)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    logp = torch.log_softmax(torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64), 0)
    ref = torch.log_softmax(torch.tensor([1.0, 0.5, -0.2], dtype=torch.float64), 0)
    mean = (logp.exp() * grpo.kl_estimate(logp, ref, kind)).sum()
    assert_close(mean, (logp.exp() * (logp - ref)).sum())


def test_k3_is_logged_and_never_in_the_loss():
    ref = torch.tensor([-2.0], dtype=torch.float64)
    for coef in (0.0, 0.5):
        new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        share = loss_of(new, ref_logprobs=ref, kl_coef=coef)
        share.loss.backward()
        assert share.ref_kl.item() == pytest.approx(math.exp(-1.0) + 1.0 - 1.0)
        assert not share.ref_kl.requires_grad
        # k2 = 1/2 with the slope 1; k3 would be exp(-1) with the slope 1 - exp(-1).
        assert share.loss.item() == pytest.approx(-1.0 + coef / 2)
        assert new.grad.item() == pytest.approx(-1.0 + coef)


@pytest.mark.parametrize("distance", [0.0, 0.3, 1.0])
def test_kl_in_the_loss_is_that_of_the_new_policy_from_tokens_of_the_old_one(distance):
    """Exact means over all tokens: without the ratio both are biased once the policy has moved."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([1.0, 0.5, -0.2], dtype=torch.float64), 0)
    start = logits.detach() + distance * torch.tensor([1.0, -0.5, 0.7], dtype=torch.float64)
    old = torch.log_softmax(start, 0)
    loss, logged = 0.0, 0.0
    for token in range(3):
        new = torch.log_softmax(logits, 0)[token : token + 1]
        at = slice(token, token + 1)
        share = loss_of(new, old[at], advantage=0.0, ref_logprobs=ref[at], kl_coef=1.0)
        loss, logged = (
            loss + old[token].exp() * share.loss,
            logged + old[token].exp() * share.ref_kl,
        )
    (got,) = torch.autograd.grad(loss, logits)
    new = torch.log_softmax(logits, 0)
    kl = (new.exp() * (new - ref)).sum()
    assert_close(got, torch.autograd.grad(kl, logits, retain_graph=True)[0])
    assert_close(logged, kl.detach())


# -- request ids


def test_request_ids_are_62_bits_stable_and_distinct():
    fields = itertools.product(
        ("train", "eval"), (0, 1, 12), ("p1", "p11", "1"), (0, 1, 2, 12), (0, 1)
    )
    ids = [request_id(*f) for f in fields]
    assert len(set(ids)) == len(ids) == 144
    assert all(0 <= i < 2**62 for i in ids)
    assert max(ids) > 2**61
    assert request_id("train", 3, "sums-17", 5) == 4364255885317449466
