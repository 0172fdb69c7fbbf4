"""Advantage estimators: one table for the maths, the trainer and the checks of a configuration.

Sources: DeepSeekMath (arXiv 2402.03300), Dr. GRPO (2503.20783), RLOO (2402.14740), REINFORCE with a
batch baseline, DAPO (2503.14476).
"""

from dataclasses import dataclass
from typing import Literal

Baseline = Literal["group", "siblings", "batch"]
LossNorm = Literal["tokens", "constant"]


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages, and the defaults that belong to it."""

    baseline: Baseline  # mean reward of the group, of its other responses, or of the batch
    scaled: bool = False  # divided by the standard deviation of the group's rewards
    loss_norm: LossNorm = "tokens"  # of the minibatch; or a constant: responses times length limit
    clip_high: float = 0.2  # meaning of `grpo.clip_high=0`
    overlong_penalty: bool = False  # responses near the length limit lose reward

    @property
    def needs_siblings(self) -> bool:
        """Whether a group of one response has nothing to be compared with."""
        return self.baseline != "batch"


ESTIMATORS = {
    "grpo": Estimator("group", scaled=True),
    "dr_grpo": Estimator("group", loss_norm="constant"),
    "rloo": Estimator("siblings"),
    "reinforce": Estimator("batch"),
    "dapo": Estimator("group", scaled=True, clip_high=0.28, overlong_penalty=True),
}
