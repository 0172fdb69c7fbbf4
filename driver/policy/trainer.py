"""The training side of a step: responses and rewards in, one GRPO update of the policy out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..common.deterministic import deterministic
from ..common.world import World, split_by_length
from ..config.estimators import ESTIMATORS
from ..rollout.request import Response
from . import grpo
from .metrics import logprob_metrics, response_metrics, warn_of_equal_rewards
from .micro_batch import MicroBatch, build_micro_batch, without_responses
from .order import Row, cut, in_order, kept_of, key_of, max_length_of, num_tokens
from .packed_forward import packed_logprobs
from .packing import pack
from .weights import PolicyWeights, is_sharded

if TYPE_CHECKING:
    from ..config.sections import GrpoConfig
    from .early import Ahead

# Share of the length limit over which DAPO's overlong penalty grows.
OVERLONG_SHARE = 0.2
IS_CAP = 2.0  # largest importance weight between rollout and trainer log-probs


class PolicyTrainer:
    """GRPO updates of a causal language model, in place.

    The optimizer works on float32 parameters. Several ranks hold a part each, or all of them.

    Args:
        model: like `transformers.LlamaForCausalLM` with sdpa attention; see `PolicyWeights`.
        cfg: the `grpo.*` part of the configuration.
        load_reference: returns the reference policy; called only when `cfg.kl_coef` is not 0.
        world: ranks that share the work. All call `update` with the same responses and end with the
            same policy.
        device: of the updates; None = the model's. If ranks share the parameters, the model may be
            in host memory before.
        phase: a block of this name is entered for each part of an update, which times it.

    Example:
        >>> trainer = PolicyTrainer(model, cfg.grpo)                # doctest: +SKIP
        >>> metrics = trainer.update(responses, rewards)            # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: GrpoConfig,
        load_reference: Callable[[], nn.Module] | None = None,
        world: World | None = None,
        device: torch.device | None = None,
        phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ):
        self.world = world or World()
        # With dropout the trained policy would not be the one that sampled.
        self.model = model.eval()
        self.cfg, self.phase = cfg, phase
        self.step = 0
        self.reference: nn.Module | None = None
        if cfg.kl_coef:
            assert load_reference is not None
            self.reference = load_reference().eval().requires_grad_(False)
        sharded = is_sharded(self.world.size, cfg)
        self.weights = PolicyWeights(model, self.world, cfg.offload, sharded, device)
        self.params = self.weights.params
        # Weight decay applies to matrices only, not to norms and biases.
        decay = [p for p in self.params if p.dim() > 1]
        plain = [p for p in self.params if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": cfg.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=cfg.lr,
            fused=self.weights.device.type == "cuda",  # one pass over memory
        )
        self.own_old_logprobs = has_own_old_logprobs(cfg)
        # Then a response without advantage adds exactly 0 to loss and gradient.
        self.skips_idle = not (cfg.kl_coef or cfg.entropy_coef)
        self.estimator = ESTIMATORS[cfg.advantage]
        self.loss_norm = self.estimator.loss_norm
        self.clip_high = cfg.clip_high if cfg.clip_high else self.estimator.clip_high

    def update(
        self,
        responses: Sequence[Response],
        rewards: Sequence[float],
        keep: Sequence[bool] | None = None,
        ahead: Sequence[Ahead] | None = None,
    ) -> dict[str, float]:
        """Trains on one step's responses; returns metrics by their names in the log.

        Args:
            responses: sampled without top-k and top-p. Siblings share `request.group`.
            rewards: raw reward of each response.
            keep: which responses are trained on (None: all). The others count in the metrics of
                rewards and lengths only.
            ahead: micro-batches whose gradients are in the sums already (`EarlyGradients`). If the
                update does not begin with them, the sums are discarded.
        """
        raw = torch.tensor(rewards, dtype=torch.float64)  # [N]
        if not ahead:
            self.weights.drop_gradients()  # of an update that failed
        groups = torch.tensor([r.request.group for r in responses])  # [N]
        kept = kept_of(responses, keep)
        trained_on = torch.tensor(kept, dtype=torch.int64)  # [K]
        metrics = response_metrics(responses, raw, groups, trained_on)
        warn_of_equal_rewards(raw, groups, trained_on, self.estimator.baseline)

        device = self.weights.device
        with self.phase("old_log_prob"):
            parts = [in_order(responses, part) for part in cut(kept, self.cfg.minibatches)]
            minibatches: list[Iterable[MicroBatch]] = []
            with deterministic(device), self.weights.together():
                fixed = self.with_fixed_logprobs
                if not self.own_old_logprobs:
                    minibatches = [
                        [*map(fixed, self._micro_batches(responses, part))] for part in parts
                    ]
        with self.phase("update_actor"):
            penalty = self._kl_penalty(minibatches, len(responses))  # [N] or None
            advantages = self.advantages(responses, raw, kept, penalty)  # [N]
            max_length = max_length_of(responses)
            lengths = [[responses[i].num_generated for i in part] for part in parts]
            denominators = [
                grpo.loss_denominator(some, self.loss_norm, max_length) for some in lengths
            ]
            idle: list[Response] = []
            done: Sequence[Ahead] = ()
            if self.own_old_logprobs:  # made one by one while the device is busy
                if self.skips_idle:
                    parts = [[i for i in part if advantages[i]] or part[:1] for part in parts]
                    idle = [responses[i] for i in {*kept}.difference(*parts)]
                if ahead is not None:
                    done = self._usable(ahead, responses, parts, advantages)
                    tokens = sum(num_tokens(responses[i]) for part in parts for i in part)
                    hidden = sum(each.batch.input_ids.shape[1] for each in done if each.hidden)
                    metrics["update/hidden_share"] = hidden / max(1, tokens)
                minibatches = [
                    map(fixed, self._micro_batches(responses, part, len(done))) for part in parts
                ]
            with deterministic(device):
                seen, trained = self._train(minibatches, advantages.to(device), denominators, done)
            metrics |= logprob_metrics(seen, self.weights.dtype, self.world, idle) | trained
        self.step += 1
        return metrics

    def _usable(
        self,
        ahead: Sequence[Ahead],
        responses: Sequence[Response],
        parts: Sequence[Row],
        advantages: Tensor,
    ) -> Sequence[Ahead]:
        """The micro-batches ahead, if the update begins with them; else drops their gradients."""
        rows = [row for part in parts[:1] for row in self.rows(responses, part)]
        keys = [key_of(responses, row, advantages) for row in rows[: len(ahead)]]
        if keys == [each.key for each in ahead]:
            return ahead
        self.optimizer.zero_grad()
        return ()

    def backward(
        self, batches: Iterable[MicroBatch], advantages: Tensor
    ) -> tuple[list[MicroBatch], list[grpo.PolicyLoss]]:
        """Adds the gradient of one optimizer minibatch to the parameters' gradients, as a sum.

        Args:
            batches: the minibatch, or this rank's part of it, cut in any way. One without old
                log-probs gets those computed here.
            advantages: float32 [N], of all responses of the step.

        Returns the micro-batches with old log-probs, and the share of each.
        """
        seen, shares = [], []
        for batch in batches:
            of_tokens, old = advantages[batch.owner], batch.old_logprobs  # [M]
            known = old is None and self.skips_idle  # the gradient by the log-probs
            logprobs, entropy = self.weights.logprobs(
                batch,
                self.cfg.checkpointing,
                self.cfg.entropy_coef > 0,
                partial(_loss_gradient, of_tokens, batch.rollout_logprobs) if known else None,
            )
            if old is None:
                old = logprobs.detach()
                batch = replace(batch, old_logprobs=old, entropy=entropy.detach())
            share = grpo.policy_loss(
                logprobs,
                old,
                batch.rollout_logprobs,
                of_tokens,
                clip_low=self.cfg.clip_low,
                clip_high=self.clip_high,
                is_cap=IS_CAP,
                ref_logprobs=batch.ref_logprobs,
                kl_coef=self.cfg.kl_coef if self.cfg.kl_in == "loss" else 0.0,
                entropy=entropy,
                entropy_coef=self.cfg.entropy_coef,
            )
            share.loss.backward()
            seen.append(batch)
            shares.append(replace(share, loss=share.loss.detach()))
        return seen, shares

    def state_dict(self) -> dict[str, Any]:
        """Counters that a resumed run needs besides the tensors of `PolicyWeights.tensors`."""
        # An update whose gradient is not finite does not count.
        updates = self.optimizer.state.get(self.params[0], {}).get("step", 0)
        return {"step": self.step, "updates": int(updates)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from `state_dict`; the caller then copies the saved values into the tensors."""
        self.step = state["step"]
        self.weights.start_moments(self.optimizer, state["updates"])

    def rows(self, responses: Sequence[Response], part: Sequence[int]) -> list[Row]:
        """The documents of this rank's micro-batches; an empty one has none."""
        lengths = [num_tokens(responses[i]) for i in part]
        # Ranks share tokens, not rows, because a step may have only one or two rows.
        shares = split_by_length(lengths, self.world.size)
        sizes = self.cfg.micro_batch_tokens, self.cfg.tail_tokens
        rows = [pack([lengths[i] for i in mine], *sizes) for mine in shares]
        mine, own = shares[self.world.rank], rows[self.world.rank]
        # Passes are collective calls, so all ranks make equally many.
        empty = max(map(len, rows)) - len(own)
        return [[part[mine[i]] for i in row] for row in own] + [[] for _ in range(empty)]

    def _micro_batches(
        self, responses: Sequence[Response], part: Sequence[int], done: int = 0
    ) -> Iterator[MicroBatch]:
        """The micro-batches of a minibatch but for the first `done`."""
        device = self.weights.device
        for row in self.rows(responses, part)[done:]:
            yield build_micro_batch(responses, row, device) if row else without_responses(device)

    @torch.no_grad()
    def with_fixed_logprobs(self, batch: MicroBatch) -> MicroBatch:
        if not self.own_old_logprobs:
            # The same packing serves the update, so its first ratio is exactly 1.
            old, entropy = self.weights.logprobs(batch)  # [M], [M]
            batch = replace(batch, old_logprobs=old, entropy=entropy)
        if self.reference is not None:
            ref, _ = packed_logprobs(cast(Any, self.reference), batch)  # [M]
            batch = replace(batch, ref_logprobs=ref)
        return batch

    def advantages(
        self,
        responses: Sequence[Response],
        raw: Tensor,
        kept: Row,
        penalty: Tensor | None = None,
    ) -> Tensor:
        """Of each response, [N]; baselines leave out those that are not trained on."""
        advantages, chosen = torch.zeros(len(responses)), torch.tensor(kept, dtype=torch.int64)
        groups = torch.tensor([responses[i].request.group for i in kept], dtype=torch.int64)  # [K]
        shaped = self._shaped_rewards(responses, raw, max_length_of(responses))  # [N]
        advantages[chosen] = grpo.group_advantages(
            shaped[chosen],
            groups,
            self.cfg.advantage,
            None if penalty is None else penalty[chosen],
        )
        return advantages

    def _shaped_rewards(
        self, responses: Sequence[Response], raw: Tensor, max_length: int
    ) -> Tensor:
        if not self.estimator.overlong_penalty:
            return raw
        lengths = torch.tensor([len(r.token_ids) for r in responses])  # [N]
        buffer = max(1, round(OVERLONG_SHARE * max_length))
        return raw + grpo.overlong_penalty(lengths, max_length, buffer)  # [N]

    def _kl_penalty(
        self, minibatches: Sequence[Iterable[MicroBatch]], num_responses: int
    ) -> Tensor | None:
        """`kl_coef` times the sum of k1 over each response, [N]; None unless `kl_in=reward`."""
        if self.reference is None or self.cfg.kl_in != "reward":
            return None
        penalty = torch.zeros(num_responses, dtype=torch.float64)  # [N]
        for batch in (b for part in minibatches for b in part):
            assert batch.old_logprobs is not None and batch.ref_logprobs is not None
            k1 = grpo.kl_estimate(batch.old_logprobs, batch.ref_logprobs, "k1")  # [M]
            penalty.index_add_(0, batch.owner.cpu(), k1.double().cpu())  # [N]
        return self.cfg.kl_coef * self.world.add_up(penalty)  # [N]

    def _train(
        self,
        minibatches: Sequence[Iterable[MicroBatch]],
        advantages: Tensor,
        denominators: Sequence[int],
        ahead: Sequence[Ahead] = (),
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """The micro-batches with old log-probs, and metrics; waits for the device at the end.

        The gradients of `ahead` are in the sums already; only the one minibatch of a step has some.
        """
        lr = self.cfg.lr * min(1.0, (self.step + 1) / max(1, self.cfg.warmup_steps))
        shares: list[grpo.PolicyLoss] = []
        norms: list[Tensor] = []
        for _ in range(self.cfg.epochs):
            seen = []
            for batches, denominator in zip(minibatches, denominators, strict=True):
                with self.weights.together():
                    with_old, some = self.backward(batches, advantages)
                some = [*(each.share for each in ahead), *some]
                seen.append([*(each.batch for each in ahead), *with_old])
                shares += [replace(each, pg_loss=each.pg_loss / denominator) for each in some]
                self.weights.finish_gradients(denominator)
                norms.append(self._optimizer_step(lr))
            minibatches = seen
        sums = torch.zeros(6, dtype=torch.float64)
        for s in shares:
            parts = (s.tokens, s.pg_loss, s.ppo_kl, s.clipped, s.ref_kl, s.clamped)
            sums += torch.tensor([float(part) for part in parts], dtype=torch.float64)
        tokens, pg_loss, ppo_kl, clipped, ref_kl, clamped = self.world.add_up(sums).tolist()
        tokens = max(1, tokens)
        metrics = {
            "actor/pg_loss": pg_loss / max(1, len(norms)),
            "actor/ppo_kl": ppo_kl / tokens,
            "actor/pg_clipfrac": clipped / tokens,
            "actor/logratio_clamped": clamped,
            "actor/grad_norm": float(sum(norms)) / max(1, len(norms)),
            "actor/lr": lr,
        }
        if self.reference is not None:
            metrics["actor/ref_kl"] = ref_kl / tokens
        return [batch for part in minibatches for batch in part], metrics

    def _optimizer_step(self, lr: float) -> Tensor:
        return self.weights.step(self.optimizer, self.cfg.max_grad_norm, lr)


def _loss_gradient(advantages: Tensor, rollout: Tensor, logprobs: Tensor, part: slice) -> Tensor:
    """Of `grpo.policy_loss` by log-probs [m] that are the old ones, so that the ratio is 1."""
    return -advantages[part] * (logprobs - rollout[part]).exp().clamp_max(IS_CAP)


def has_own_old_logprobs(cfg: GrpoConfig) -> bool:
    """Whether the update computes the old log-probs itself, without a forward pass before it.

    The only update of a step starts from the policy that sampled, so its log-probs are the old ones
    and the ratio is 1. KL in the reward needs them before the update.
    """
    before = cfg.kl_coef > 0 and cfg.kl_in == "reward"
    return cfg.epochs == 1 and cfg.minibatches == 1 and not before
