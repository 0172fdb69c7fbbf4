"""A moving average of the drafter's weights, which the engine drafts with."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..model.drafter import Drafter


class WeightAverage:
    """Exponential moving average of the trained weights; with `horizon=0` the weights themselves.

    The spot trainer never lowers its learning rate, since the policy keeps moving, and its batches
    are small, so the weights fluctuate around the optimum and draft worse than their mean. Step t
    has the weight max(1 / horizon, 9 / (10 + t)), so random initial weights are soon forgotten.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992); the
    warm-up is that of tf.train.ExponentialMovingAverage.
    """

    def __init__(self, drafter: Drafter, horizon: int) -> None:
        self.drafter, self.horizon = drafter, horizon
        self.trained = {n: p.detach() for n, p in drafter.named_parameters() if p.requires_grad}
        # Updated in place, since a captured step writes here.
        self.values = {n: w.clone() for n, w in self.trained.items()} if horizon else self.trained

    @torch.no_grad()
    def update(self, step: Tensor, skipped: Tensor) -> None:
        """Adds the current weights, without reading a number on the host.

        `step` is float32 [], finite steps so far, this one included; `skipped` float32 [], 1 = the
        step changed nothing, and the average must not either.
        """
        if not self.horizon:
            return
        share = (9 / (10 + step)).clamp_min(1 / self.horizon) * (1 - skipped)
        for name, value in self.values.items():
            value.lerp_(self.trained[name], share)

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.drafter.state_dict(), **self.values}

    def load(self, drafted: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
        """Loads in place averaged weights, and the trained ones, {} without an average."""
        self.drafter.load_state_dict({**drafted, **trained})
        for name, value in self.values.items():
            value.copy_(drafted[name] if self.horizon else self.trained[name])
