"""A moving average of the drafter's weights: what drafts are made with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..model.drafter import Drafter


class WeightAverage:
    """The weights' mean over the last steps, with exponentially falling shares.

    The spot trainer never lowers its rate, since the policy never stops moving, and its batches are
    small: its weights stray about the best ones, and drafts made with them are worse than those of
    a drafter that was left alone. Their mean stays near the best ones at a rate that still follows
    the policy. Step t of a drafter takes a share of max(1 / horizon, 9 / (10 + t)): a new one's
    random weights are soon forgotten.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992); the
    start is that of tf.train.ExponentialMovingAverage.

    Args:
        drafter: what is trained.
        horizon: steps; 0 = no average, the weights themselves.
    """

    def __init__(self, drafter: Drafter, horizon: int) -> None:
        self.drafter, self.horizon = drafter, horizon
        self.trained = {n: p.detach() for n, p in drafter.named_parameters() if p.requires_grad}
        # Changed in place: a captured step writes there.
        self.values = {n: w.clone() for n, w in self.trained.items()} if horizon else self.trained

    @torch.no_grad()
    def update(self, step: Tensor, skipped: Tensor) -> None:
        """Takes the weights' share in, on the device alone.

        Args:
            step: float32 [], finite steps so far, this one included.
            skipped: float32 [], 1 = the step changed nothing, so neither does this.
        """
        if not self.horizon:
            return
        share = (9 / (10 + step)).clamp_min(1 / self.horizon) * (1 - skipped)
        for name, value in self.values.items():
            value.lerp_(self.trained[name], share)

    def state_dict(self) -> dict[str, Tensor]:
        """A drafter's state with the averaged weights."""
        return {**self.drafter.state_dict(), **self.values}

    def load(self, drafted: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
        """Takes over both, in place.

        Args:
            drafted: a drafter's state with averaged weights.
            trained: the weights that are trained, by name; of a drafter without an average none:
                there they are what drafts.
        """
        self.drafter.load_state_dict({**drafted, **trained})
        for name, value in self.values.items():
            value.copy_(drafted[name] if self.horizon else self.trained[name])
