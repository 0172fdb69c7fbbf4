"""Metrics of a step's responses and log-probs, and the warnings that they give rise to."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.errors import SharedWarning
from ..common.world import World
from ..config.estimators import Baseline
from ..rollout.request import Response
from . import grpo
from .micro_batch import MicroBatch

NEAR_ONE = 0.95
# Mean |trainer - rollout| log-prob beyond which the two cannot hold the same weights.
LOGP_ALARM_FLOAT32 = 0.01
LOGP_ALARM_HALF = 0.1


def response_metrics(
    responses: Sequence[Response], rewards: Tensor, groups: Tensor, kept: Tensor
) -> dict[str, float]:
    """Metrics of rewards and lengths over all responses; warns when nearly all were truncated.

    `rewards` are raw, float [N], `groups` int64 [N]. Lengths are of what the model generated. Only
    `frac_reward_zero_std` depends on `kept`, int64 [K], the responses that are trained on.
    """
    lengths = [r.num_generated for r in responses]
    clip_ratio = sum(r.finish == "length" for r in responses) / len(responses)
    if clip_ratio >= NEAR_ONE:
        warnings.warn(
            f"{clip_ratio:.0%} of the responses were cut at the length limit, so hardly any can "
            "be right: raise sampling.max_new_tokens",
            SharedWarning,
            stacklevel=3,
        )
    return {
        "critic/rewards/mean": rewards.mean().item(),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/min": float(min(lengths)),
        "response_length/clip_ratio": clip_ratio,
        "frac_reward_zero_std": _zero_std_share(rewards, groups, kept),
    }


def warn_of_equal_rewards(
    rewards: Tensor, groups: Tensor, kept: Tensor, baseline: Baseline
) -> None:
    """Warns when nearly all sets of responses that share a baseline have equal rewards.

    Arguments are those of `response_metrics`, and the baseline of the advantage estimator.
    """
    whole = baseline == "batch"
    share = _zero_std_share(rewards, torch.zeros_like(groups) if whole else groups, kept)
    if share < NEAR_ONE:
        return
    what = "the batch has" if whole else f"{share:.0%} of the groups have"
    if len(kept) < len(rewards):
        what += " fewer than two trained responses or"
    warnings.warn(
        f"{what} equal rewards, which give no gradient: the task is too hard or too easy for this"
        " policy",
        SharedWarning,
        stacklevel=3,
    )


def logprob_metrics(
    batches: Sequence[MicroBatch],
    dtype: torch.dtype,
    world: World,
    idle: Sequence[Response] = (),
) -> dict[str, float]:
    """Entropy, and the difference between the log-probs of rollout and trainer; {} without tokens.

    Warns when the difference shows that the two hold different weights. `batches` are of this rank,
    with old log-probs and entropy. For `idle`, the responses of the step that are in no batch, the
    negative log-probs are used, whose mean is the entropy.
    """
    sums = torch.zeros(3, dtype=torch.float64)  # tokens, |difference|, entropy
    largest = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        assert batch.old_logprobs is not None and batch.entropy is not None
        difference = (batch.old_logprobs - batch.rollout_logprobs).abs()  # [M]
        parts = (len(difference), difference.sum(), batch.entropy.sum())
        sums += torch.tensor([float(part) for part in parts], dtype=torch.float64)
        if len(difference):
            largest = torch.maximum(largest, difference.max().cpu())  # keeps a NaN
    tokens, distance, entropy = world.add_up(sums).tolist()
    most = torch.stack(world.gather(largest)).max().item()
    if not tokens:
        return {}
    unseen = [x for r in idle for x, g in zip(r.logprobs, r.generated, strict=True) if g]
    half = dtype in (torch.bfloat16, torch.float16)
    mean, alarm = distance / tokens, LOGP_ALARM_HALF if half else LOGP_ALARM_FLOAT32
    if not mean <= alarm:  # a NaN warns too
        warnings.warn(
            f"sampling_logp_difference: rollout and trainer log-probs differ by {mean:.3g} in"
            f" the mean (alarm at {alarm}): the engine does not hold the trainer's weights",
            SharedWarning,
            stacklevel=3,
        )
    return {
        "actor/entropy": (entropy - sum(unseen)) / (tokens + len(unseen)),
        "sampling/sampling_logp_difference/mean": mean,
        "sampling/sampling_logp_difference/max": most,
    }


def _zero_std_share(rewards: Tensor, groups: Tensor, kept: Tensor) -> float:
    return grpo.zero_std_groups(rewards, groups, kept).double().mean().item()
