"""Noise by the minima of groups of eight ids: its bits, its distribution, its tail."""

import math

import numpy as np
import pytest
import torch

from tests import kit, reference
from tests.csrc.test_sampling import many
from tlt_ext import _C

each_device = kit.each_device
SPAN = 1024  # ids whose groups share 32 calls of Philox


@pytest.mark.parametrize(
    ("seed", "request_id", "position"), [(0, 0, 0), (2**64 - 1, 2**62 - 1, 2**31 - 1), (5, 7, 3)]
)
def test_target_noise_equals_its_reference(seed, request_id, position):
    expected = reference.target_noise(seed, request_id, position, 3 * SPAN)
    noise = [_C.target_noise(seed, request_id, position, id) for id in range(3 * SPAN)]
    assert noise == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)


def test_noise_is_independent_between_ids_and_positions():
    """No pair of ids shares noise, whatever part of a call of Philox serves it."""
    ids = 3 * SPAN
    noise = torch.stack([reference.target_noise(3, 1, position, ids) for position in range(600)])
    z = (noise - noise.mean(0)) / noise.std(0)
    ids_apart = {1, 2, 4, 7, 8, 16, 256, 512, 1024}
    for apart in ids_apart:
        correlation = (z[:, apart:] * z[:, :-apart]).mean(0)
        assert correlation.abs().max() < 6 / math.sqrt(600)
    assert noise.flatten().unique().numel() > 0.999 * noise.numel()


# ---- distribution ----------------------------------------------------------------------------

# Three groups, the last one of six ids, with likely ids in each.
LOGITS = 1.3 * torch.sin(torch.arange(22.0) * 2.4)
DRAWS = 1_000_000


def draws(bug: str = "", count: int = 150_000) -> torch.Tensor:
    """Winners of `LOGITS`, of the noise's definition on random words, with a bug if it is named."""
    rng = np.random.default_rng(1)
    word = rng.integers(0, 2**32, (count, 3), np.uint32)
    rest = reference.exponential(rng.integers(0, 2**32, (count, 3, 8), np.uint32))
    if bug == "overlap":  # two groups share a word
        word[:, 1] = word[:, 0]
    place = torch.from_numpy(word.astype(np.int64)) & 7
    if bug == "index":
        place = (place - 1).clamp_min(0)
    smallest = reference.exponential(word >> 3, bits=29)[..., None] / 8
    fresh = rest if bug == "minimum" else smallest + rest
    x = torch.where(place[..., None] == torch.arange(8), smallest, fresh)
    return (LOGITS.double() - x.flatten(1)[:, : len(LOGITS)].log()).argmax(1)


@pytest.mark.parametrize("bug", ["", "index", "minimum", "overlap"])
def test_chi_square_catches_a_planted_bug(bug):
    probs = torch.softmax(LOGITS.double(), 0)
    if not bug:
        return kit.assert_distribution(draws(), probs)
    with pytest.raises(AssertionError):
        kit.assert_distribution(draws(bug), probs)


@pytest.mark.usefixtures("each_device")
def test_a_million_draws_over_several_groups_follow_the_target():
    kit.assert_distribution(many(LOGITS, seed=2).tokens, torch.softmax(LOGITS.double(), 0))


@pytest.mark.usefixtures("each_device")
def test_two_distributions_with_the_same_noise_agree_as_often_as_gumbel_max_does():
    """P(agree) = sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    other = LOGITS + 0.8 * torch.cos(torch.arange(22.0) * 1.7)
    p, q = (torch.softmax(x.double(), 0) for x in (LOGITS, other))
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    expected = float((1 / ratios.sum(1)).sum())
    agree = float((many(LOGITS, seed=4).tokens == many(other, seed=4).tokens).double().mean())
    assert 0.5 < expected < 0.9
    assert abs(agree - expected) < 4 * math.sqrt(expected * (1 - expected) / DRAWS)


# ---- tail ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [20, 25, 30, 32])
def test_large_noise_has_the_right_frequency(bits):
    """The share of words with which one id has noise above bits * ln 2 is 2^-bits."""
    id, limit = 3, 2.0**-bits
    low, high = 0, 2**29  # the minimum of a group grows with the upper 29 bits of its word
    while low < high:
        middle = (low + high) // 2
        if _C.group_exponential(middle << 3 | id, 0, id) < limit:
            low = middle + 1
        else:
            high = middle
    assert low / 2**29 / 8 == pytest.approx(limit, rel=2e-6 if bits < 30 else 0.01, abs=2.0**-34)
    # Beside the minimum the noise is smaller, and not by a step of 32 bits.
    beside = _C.group_exponential(0 << 3 | 2, 0, id)
    assert beside == pytest.approx(2.0**-33 + 2.0**-33)


@pytest.mark.usefixtures("each_device")
def test_unlikely_ids_are_drawn_as_often_as_they_should_be():
    """8,191 ids of probability 2.5e-7 each beside one that is nearly certain."""
    logits, draws = torch.full((8192,), -15.2), 50_000
    logits[5000] = 0.0
    tokens = many(logits, draws, seed=1).tokens
    others = tokens[tokens != 5000]
    expected = draws * 8191 * math.exp(-15.2)
    assert abs(len(others) - expected) < 4 * math.sqrt(expected)
    assert len(others.unique()) > 0.95 * len(others)
    kit.assert_distribution(others % 8, torch.full((8,), 1 / 8))
