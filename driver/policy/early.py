"""Gradients of the coming update that are added up before its rollout has ended."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..common.deterministic import deterministic
from ..config.estimators import ESTIMATORS
from ..config.sections import GrpoConfig
from ..rollout.request import Response
from .grpo import PolicyLoss
from .micro_batch import MicroBatch, build_micro_batch
from .order import in_order, kept_of, key_of
from .trainer import PolicyTrainer, has_own_old_logprobs


@dataclass
class Ahead:
    """A micro-batch whose gradient is in the sums."""

    key: list[tuple[int, float]]  # request id and advantage of each document
    batch: MicroBatch
    share: PolicyLoss
    ended: torch.cuda.Event | None  # on a GPU, the end of its work
    hidden: bool = False  # whether the rollout ended later


class EarlyGradients:
    """Computes the first micro-batches of an update while the last responses are generated.

    The policy does not change in a rollout, so their gradients are those of the update, to the bit.
    No other thread may use the trainer during a call.
    """

    def __init__(self, trainer: PolicyTrainer) -> None:
        self.trainer = trainer
        self._done: list[Ahead] = []

    def advance(
        self, responses: Sequence[Response], rewards: Sequence[float], keep: Sequence[bool]
    ) -> bool:
        """Adds up the gradient of the next micro-batch; False if none was computed.

        The last row of the groups waits, since the next group may add documents to it. The
        responses are whole groups, the first ones of the update's order (`in_order`).
        """
        trainer, kept, done = self.trainer, kept_of(responses, keep), len(self._done)
        raw = torch.tensor(rewards, dtype=torch.float64)  # [N]
        advantages = trainer.advantages(responses, raw, kept)  # [N]
        part = in_order(responses, kept)
        if trainer.skips_idle:
            part = [i for i in part if advantages[i]]
        rows = trainer.rows(responses, part)
        if done + 1 >= len(rows):
            return False
        device = trainer.weights.device
        with deterministic(device):
            batch = build_micro_batch(responses, rows[done], device)
            (batch,), (share,) = trainer.backward(
                [trainer.with_fixed_logprobs(batch)], advantages.to(device)
            )
        ended = torch.cuda.current_stream().record_event() if device.type == "cuda" else None
        self._done.append(Ahead(key_of(responses, rows[done], advantages), batch, share, ended))
        return True

    def wait(self) -> None:
        """Waits for the last micro-batch, so that no other is enqueued when the rollout ends."""
        if self._done and self._done[-1].ended is not None:
            self._done[-1].ended.synchronize()

    def mark_hidden(self) -> None:
        """Marks the complete micro-batches; call when the rollout ends."""
        for each in self._done:
            each.hidden = each.ended is None or each.ended.query()

    def take(self) -> list[Ahead]:
        """Hands over the micro-batches; later ones belong to another rollout."""
        done, self._done = self._done, []
        return done

    def discard(self) -> None:
        """Discards the gradients, including those of a micro-batch that failed."""
        self._done = []
        self.trainer.optimizer.zero_grad()


def why_not_early(config: GrpoConfig, ranks: int) -> str:
    """Why the gradients of an update cannot be added up before the rollout ends; "": they can."""
    if ranks > 1:
        return "several ranks make the passes of the update together"
    if config.offload == "all":
        return "grpo.offload=all"
    if not has_own_old_logprobs(config):
        return "grpo.epochs, grpo.minibatches or grpo.kl_in=reward need the whole step first"
    if ESTIMATORS[config.advantage].baseline == "batch":
        return f"the baseline of grpo.advantage={config.advantage} is the whole step"
    return ""
