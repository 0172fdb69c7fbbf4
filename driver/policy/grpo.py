"""GRPO as pure maths: rewards to advantages, log-probs to a loss.

Shapes: N responses, G groups, M tokens (any shape works where only M is written).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..config.estimators import ESTIMATORS, Baseline, LossNorm

STD_EPS = 1e-4
# A log-ratio beyond this is clamped before `exp`: exp(10) = 22,026, and exp(89) is infinite.
MAX_LOG_RATIO = 10.0


def zero_std_groups(rewards: Tensor, groups: Tensor, kept: Tensor | None = None) -> Tensor:
    """Mark the groups whose rewards are all equal; they have no reward gradient.

    Args:
        rewards: float [N], raw rewards of the task.
        groups: int64 [N], group id of each response.
        kept: int64 [K], indices of the responses that are trained on (None: all). Only these are
            compared, so a group with fewer than two of them is marked.

    Returns bool [G], in ascending order of group id; its mean is the metric `frac_reward_zero_std`.

    Example:
        >>> zero_std_groups(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([3, 3, 8, 8]))
        tensor([False,  True])
    """
    index, count = _group_index(groups)  # [N], [G]
    chosen = slice(None) if kept is None else kept
    low, high = _group_range(rewards[chosen], index[chosen], len(count))  # [G], [G]
    return low == high  # [G]


def group_advantages(
    rewards: Tensor, groups: Tensor, kind: str, penalty: Tensor | None = None
) -> Tensor:
    """Turn rewards into advantages relative to a baseline made of other responses, float32 [N].

    `grpo` and `dapo`: (r - mean) / (population std + 1e-4) of the group. `dr_grpo`: r - mean.
    `rloo`: r - mean of the siblings; a group of one has no sibling and gets 0. `reinforce`: r -
    mean of the batch. Where all rewards behind a baseline are equal, the advantage is exactly 0 and
    not a rounding error over 1e-4. A penalty, float [N], has the same baseline as the rewards but
    is never divided by a standard deviation: in a group of equal rewards its coefficient would
    cancel.

    Args:
        rewards: float [N].
        groups: int64 [N]. This id alone identifies a group, not the text of its prompt.
        kind: a name in `ESTIMATORS`.
        penalty: subtracted from the normalised rewards, or None.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]), "rloo")
        tensor([ 1.0000, -0.5000, -0.5000])

    Source: DeepSeekMath (arXiv 2402.03300), Dr. GRPO (2503.20783), RLOO (2402.14740), DAPO
    (2503.14476).
    """
    if rewards.numel() == 0:
        return torch.zeros(0)  # [0]
    estimator = ESTIMATORS[kind]
    if estimator.baseline == "batch":
        groups = torch.zeros_like(groups)  # [N]
    values = rewards.double()  # [N]
    index, count = _group_index(groups)  # [N], [G]
    advantages = _centred(values, index, count, estimator.baseline)  # [N]
    if estimator.scaled:
        variance = torch.zeros_like(count).index_add_(0, index, advantages.square()) / count  # [G]
        advantages = advantages / (variance.sqrt() + STD_EPS)[index]  # [N]
    low, high = _group_range(values, index, len(count))  # [G], [G]
    advantages = torch.where((low == high)[index], 0.0, advantages)  # [N]
    if penalty is not None:
        advantages = advantages - _centred(penalty.double(), index, count, estimator.baseline)
    return advantages.float()  # [N]


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft punishment: 0 up to `max_length - buffer` tokens, from there linear to -1.

    `lengths` is int64 [N], the result float64 [N].

    Example:
        >>> overlong_penalty(torch.tensor([80, 90, 100]), 100, 20).tolist()
        [0.0, -0.5, -1.0]

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    return ((max_length - buffer - lengths).double() / buffer).clamp(-1.0, 0.0)  # [N]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens of the policy, float [M].

    k1 belongs in the reward (as a loss its gradient is zero in the mean), k2 in the loss (its
    gradient is that of the reverse KL), k3 in the log (its variance is low, but in the loss its
    gradient would be that of the forward KL). Tokens of another policy need the ratio of the two
    policies as a weight. The log-ratio of k3 is clamped to +-`MAX_LOG_RATIO`.

    Example:
        >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-3.0]), "k2")
        tensor([2.])

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio = logprobs - ref_logprobs  # [M]
    if kind == "k1":
        return log_ratio  # [M]
    if kind == "k2":
        return log_ratio.square() / 2  # [M]
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # [M]
    return torch.expm1(-log_ratio) + log_ratio  # [M]


def loss_denominator(lengths: Iterable[int], norm: LossNorm, max_length: int) -> int:
    """Divisor of the summed loss of a whole optimizer minibatch, at least 1.

    "tokens" counts the sampled tokens of the responses that are trained on, over all micro-batches;
    "constant" is `max_length` times their number.

    Example:
        >>> loss_denominator([3, 5], "tokens", 10), loss_denominator([3, 5], "constant", 10)
        (8, 20)
    """
    lengths = list(lengths)
    if norm == "tokens":
        return max(1, sum(lengths))
    return max(1, max_length * len(lengths))


@dataclass(frozen=True)
class PolicyLoss:
    """A micro-batch's share of the summed loss, and sums over its tokens for the metrics."""

    loss: Tensor  # float32 [], with gradient
    pg_loss: Tensor  # float32 [], the part of it that is neither KL nor entropy
    tokens: int  # their number
    ppo_kl: Tensor  # float32 [], sum of old - new log-probs
    clipped: Tensor  # float32 [], number of tokens whose loss is the clipped one
    ref_kl: Tensor  # float32 [], sum of k3
    clamped: Tensor  # float32 [], number of tokens with a log-ratio beyond MAX_LOG_RATIO


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    is_cap: float,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> PolicyLoss:
    """Clipped policy loss of one micro-batch, summed over its tokens.

    With ratio = exp(new - old), the loss of a token is max(-A ratio, -A clipped ratio), times the
    truncated importance weight min(exp(old - rollout), is_cap), plus `kl_coef` times k2 weighted by
    the ratio (a constant in the gradient), minus `entropy_coef` times the entropy. Log-ratios are
    clamped to +-`MAX_LOG_RATIO`.
    The shares of micro-batches add up to the same gradient however the minibatch is cut. Its
    denominator may be known at its end only, so the caller divides the sum of gradients.

    Args:
        logprobs: float [M], of the policy being updated, with gradient.
        old_logprobs: float [M], of the step-start policy by the same code as `logprobs`.
        rollout_logprobs: float [M], of the step-start policy as the rollout engine computed them.
        advantages: float [M], each response's advantage at its tokens.
        clip_low, clip_high: reach of the ratio below and above 1.
        is_cap: bound of the importance weight.
        ref_logprobs: float [M] of the reference policy, or None.
        kl_coef: weight of k2 in the loss.
        entropy: float [M] of the policy being updated, with gradient, or None.
        entropy_coef: weight of the entropy bonus.

    Returns:
        The share and the sums for its metrics.

    Example:
        >>> x = torch.tensor([-1.0])
        >>> policy_loss(x, x, x, torch.tensor([2.0]),
        ...             clip_low=0.2, clip_high=0.2, is_cap=2.0).loss
        tensor(-2.)

    Source: PPO (arXiv 1707.06347), DAPO's clip-higher (2503.14476), truncated importance sampling
    (F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025).
    """
    log_ratio = logprobs - old_logprobs  # [M]
    # An infinite ratio has the gradient 0 * inf = NaN in the clipped term.
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # [M]
    plain = -advantages * ratio  # [M]
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)  # [M]
    weight = (old_logprobs - rollout_logprobs).exp().clamp_max(is_cap)  # [M]
    pg_loss = (weight * torch.maximum(plain, clipped)).sum()  # []
    loss, ref_kl = pg_loss, logprobs.new_zeros(())  # [], []
    clamped = log_ratio.detach().abs() > MAX_LOG_RATIO  # [M]
    if ref_logprobs is not None:
        # The tokens are the old policy's; the ratio makes them an estimate of the new one's KL.
        drawn = ratio.detach()  # [M]
        loss = loss + kl_coef * (drawn * kl_estimate(logprobs, ref_logprobs, "k2")).sum()  # []
        ref_kl = (drawn * kl_estimate(logprobs.detach(), ref_logprobs, "k3")).sum()  # []
        clamped |= (logprobs.detach() - ref_logprobs).abs() > MAX_LOG_RATIO  # [M]
    if entropy is not None and entropy_coef:
        loss = loss - entropy_coef * entropy.sum()  # []
    return PolicyLoss(
        loss=loss,
        pg_loss=pg_loss.detach(),
        tokens=len(logprobs),
        ppo_kl=(old_logprobs - logprobs).detach().sum(),
        clipped=(clipped > plain).sum().float(),
        ref_kl=ref_kl,
        clamped=clamped.sum().float(),
    )


def _group_index(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Position of each response's group among the sorted ids, int64 [N], and sizes, float64 [G]."""
    _, index, count = groups.unique(return_inverse=True, return_counts=True)  # [N], [G]
    return index, count.double()


def _group_range(rewards: Tensor, index: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest reward of each group, [G] each; 0 and 0 for a group without responses."""
    empty = rewards.new_zeros(num_groups)  # [G]
    low = empty.scatter_reduce(0, index, rewards, "amin", include_self=False)  # [G]
    high = empty.scatter_reduce(0, index, rewards, "amax", include_self=False)  # [G]
    return low, high


def _centred(values: Tensor, index: Tensor, count: Tensor, baseline: Baseline) -> Tensor:
    """Values minus their baseline, float64 [N]."""
    total = torch.zeros_like(count).index_add_(0, index, values)  # [G]
    centred = values - (total / count)[index]  # [N]
    if baseline == "siblings":
        # v - (total - v) / (n - 1), written so that a group of one divides by 1.
        centred = centred * (count / (count - 1).clamp_min(1))[index]  # [N]
    return centred
