"""The spot trainer: trains the drafter in the time that the rollout's tail leaves idle."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from driver.data_buffer import DataBuffer, Document, Piece
from driver.draft_loss import DraftBatch, Objective, Teacher, unrolled_loss
from driver.drafter import Drafter
from driver.model import TargetModel
from driver.rollout.draft_runner import DraftRunner
from driver.rollout.kv_cache import KvCache
from driver.rollout.scheduler import Sequence
from driver.spans import Spans

if TYPE_CHECKING:
    from driver.sections import DrafterConfig, SpotConfig

# (gradients, tokens of this rank) -> tokens of all.
Reduce = Callable[[list[Tensor], int], int]

SWAP_EVERY = 8  # micro-steps between two versions of the drafter
MAX_GRAD_NORM = 1.0


class SpotTrainer:
    """Micro-steps on recorded features while few requests are active.

    `serial` runs one micro-step between two passes of the tail, `overlapped` a thread beside them
    that stops within one micro-step; `coordinated` trains when `driver.coordinator` says so; `off`
    trains nothing. New weights are handed to the runner
    between passes only. Features, embedding, head and norm of the target are read, never written.
    A step that fails costs the drafter its step and the rollout nothing: the failure is a warning.

    Args:
        drafter: what is trained.
        runner: its twin at inference, which takes over new weights.
        target: the policy.
        cache: the engine's KV cache with the recorded features.
        config: when and how much.
        drafter_config: unroll steps and learning rate.
        seed: of the data order.
    """

    def __init__(
        self,
        drafter: Drafter,
        runner: DraftRunner,
        target: TargetModel,
        cache: KvCache,
        config: SpotConfig,
        drafter_config: DrafterConfig,
        seed: int,
    ) -> None:
        self.drafter, self.runner, self.target, self.cache = drafter, runner, target, cache
        self.config, self.unroll = config, drafter_config.unroll
        self.objective = Objective(drafter_config.loss, drafter_config.feature_loss)
        self.acceptance = 0.0  # of the last micro-step
        self.buffer = DataBuffer(config.buffer_tokens, config.keep_long, seed)
        self.optimizer = torch.optim.AdamW(
            drafter.trainable(),
            lr=drafter_config.lr,
            weight_decay=0.0,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.spans = Spans("drafter")
        self.target_version = 0
        self.steps = self.tokens_seen = 0
        self.busy_s = 0.0  # spent in micro-steps since `start_step`
        self._last: dict[str, float] = {}
        self._previous: Teacher | None = None  # of the documents kept from the step before
        # Weights ready for the runner. One thread appends, the rollout's pops: both are atomic, so
        # a pass never waits for a micro-step.
        self._ready: deque[dict[str, Tensor]] = deque(maxlen=1)
        self._thread: threading.Thread | None = None
        self._passes = 0  # of tails
        self._stop = threading.Event()
        self._error: Exception | None = None

    # ---- what the engine and the loop call ------------------------------------------------------

    def on_finish(self, sequence: Sequence) -> None:
        """Takes a finished sequence's features out of the cache before its pages are freed."""
        if self.config.mode == "off":
            return
        size = self.cache.page_size
        places = [sequence.pages[t // size] * size + t % size for t in range(sequence.context_len)]
        index = torch.tensor(places, dtype=torch.int64, device=self.cache.features.device)
        features = self.cache.features.flatten(0, 1).index_select(0, index)
        tokens = torch.tensor(sequence.tokens[: sequence.context_len + 1])
        self.buffer.add(Document(tokens, features, self.target_version))

    def on_pass(self, active: int, passes: int = 1) -> None:
        """Trains while few requests are active; swaps in what was learned.

        Args:
            active: requests that run or wait.
            passes: made since the last call.
        """
        beside = self.config.mode in ("serial", "overlapped")
        if not beside or not 0 < active <= self.config.tail_batch:
            return
        if self._error is None:
            if self.config.mode == "serial":
                due = self._passes // self.config.every
                self._passes += passes
                for _ in range(self._passes // self.config.every - due):
                    self._attempt()
            elif self._thread is None or not self._thread.is_alive():
                self._stop.clear()
                self._thread = threading.Thread(target=self._work, name="spot-trainer", daemon=True)
                self._thread.start()
        self._swap_ready()

    def finish(self) -> None:
        """Ends the bubble, before the policy is updated: final steps, new vocabulary, swap."""
        self.stop()
        if self.config.mode == "off":
            return
        if self.config.mode != "coordinated":  # there the bubble is over with the last rank
            for _ in range(self.config.final_steps):
                if not self._attempt():
                    break
        self.stop()
        if self.steps:
            self.rebuild_vocabulary()
            self.swap()
        head = self.drafter.lm_head.weight.detach().clone()
        self._previous = Teacher(self.target_version, self.target.final_norm.float().clone(), head)

    def stop(self) -> None:
        """Returns once no micro-step runs; what failed in one is a warning here, in the caller."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            warnings.warn(
                f"spot trainer: a micro-step failed ({type(error).__name__}: {error}); training of"
                f" the drafter paused, drafts go on with version {self.runner.version}",
                stacklevel=2,
            )

    def swap(self) -> None:
        """Hands the weights as they are to the runner; not while a thread trains them."""
        self._publish()
        self._swap_ready()

    def start_step(self, target_version: int) -> None:
        """A new policy is in the target: its head is gathered, the longest old documents kept."""
        self.stop()
        taught = self._previous is not None and self._previous.version == self.target_version
        if target_version != self.target_version and not taught:
            self.buffer.clear()  # their teacher went with the old weights
        self.buffer.start_step()
        self.target_version = target_version
        self.busy_s = 0.0
        self.drafter.refresh_head(self.target.head)
        if self.runner.version:
            self.runner.refresh_head()

    # ---- training -------------------------------------------------------------------------------

    def micro_step(self, reduce: Reduce | None = None) -> bool:
        """One optimizer step on a packed batch.

        Args:
            reduce: averages the gradients over a group of ranks, in place, and tells how many
                tokens the group's batches had; this rank takes part even without data.

        Returns:
            False where there is no data yet.
        """
        begin = time.perf_counter()
        pieces = self.buffer.sample(self.config.tokens_per_step, self.steps)
        if not pieces and reduce is None:
            return False
        if self.steps == 0 and reduce is None:
            self.rebuild_vocabulary()
        tokens = sum(piece.length for piece in pieces)
        metrics = self._backward(pieces)
        if reduce is not None:
            tokens = reduce([p.grad for p in self.drafter.trainable()], tokens)
        self._update(metrics)
        self.steps += 1
        self.tokens_seen += tokens
        if self.steps % SWAP_EVERY == 0:
            self._publish()
        self.busy_s += time.perf_counter() - begin
        return True

    def _backward(self, pieces: Seq[Piece]) -> dict[str, float]:
        """Gradients of a batch, zero where there is none."""
        for weight in self.drafter.trainable():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.zero_()
        if not pieces:
            return {}
        loss, metrics = unrolled_loss(
            self.drafter,
            self._pack(pieces),
            self.target.cos_sin,
            self.unroll,
            self.objective,
            self.acceptance,
        )
        loss.backward()
        return metrics

    def _update(self, metrics: dict[str, float]) -> None:
        norm = clip_grad_norm_(self.drafter.trainable(), MAX_GRAD_NORM)
        if torch.isfinite(norm):
            self.optimizer.step()
            self._last = metrics or self._last
            self.acceptance = metrics.get("drafter/acceptance", self.acceptance)
        else:
            warnings.warn("spot trainer: gradient is not finite: step skipped", stacklevel=2)

    def _attempt(self) -> bool:
        try:
            with self.spans("micro_step", version=self.runner.version):
                return self.micro_step()
        except Exception as error:  # kept for `stop`: the rollout goes on
            self._error = error
            return False

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread; the tail keeps the other cores
        while not self._stop.is_set() and self._attempt():
            pass

    @torch.no_grad()
    def _pack(self, pieces: Seq[Piece]) -> DraftBatch:
        """Pieces end to end; entry t pairs features t with token t + 1 and learns token t + 2."""
        width = 3 * self.target.spec.hidden_size
        tokens, features, final, position, teachers = [], [], [], [], []
        now = Teacher(
            self.target_version, self.target.final_norm.float(), self.drafter.lm_head.weight
        )
        for piece in pieces:
            begin, end = piece.start, piece.start + piece.length
            document = piece.document
            tokens.append(document.tokens[begin + 1 : end + 1])
            features.append(document.features[begin:end, :width])
            final.append(document.features[begin + 1 : end + 1, width:])
            position.append(torch.arange(begin, end))
            teachers.append(now if document.target_version == now.version else self._previous)
            assert teachers[-1].version == document.target_version
        device = self.target.device
        return DraftBatch(
            self.target.embedding.index_select(0, torch.cat(tokens).to(device)).float(),
            torch.cat(features).float(),
            torch.cat(final).float(),
            torch.cat(position).to(device),
            tuple(piece.length for piece in pieces),
            tuple(teachers),
        )

    def rebuild_vocabulary(self) -> None:
        """Drafts the tokens seen most often in rollouts, then the lowest ids."""
        spec = self.drafter.spec
        if spec.draft_vocab < spec.vocab_size:
            seen = self.buffer.seen_tokens
            ranked = sorted(range(spec.vocab_size), key=lambda token: (-seen[token], token))
            self.drafter.set_vocabulary(torch.tensor(sorted(ranked[: spec.draft_vocab])))
            self.drafter.refresh_head(self.target.head)

    def _publish(self) -> None:
        """Readies a copy of the weights for the runner, unless a number in them is not finite."""
        state = {name: value.clone() for name, value in self.drafter.state_dict().items()}
        if all(bool(torch.isfinite(value).all()) for value in state.values()):
            self._ready.append(state)
        else:
            warnings.warn("spot trainer: weights are not finite: not swapped in", stacklevel=2)

    def _swap_ready(self) -> None:
        """Hands ready weights to the runner under a new version; between passes only."""
        if self._ready:
            self.runner.load(self._ready.pop(), self.runner.version + 1)

    # ---- records --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        return {
            **self._last,
            "drafter/version": self.runner.version,
            "drafter/tokens_seen": self.tokens_seen,
            "drafter/busy_s": self.busy_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """What is trained, its optimizer and counters; recorded documents are not kept.

        So a resumed run lacks the long documents of the step before, and then trains as an unbroken
        one would on the same documents. Tensors are the live ones: save or copy them before the
        next micro-step.
        """
        self.stop()
        return {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "version": self.runner.version,
            "steps": self.steps,
            "acceptance": self.acceptance,
            "tokens_seen": self.tokens_seen,
            "seen_tokens": dict(self.buffer.seen_tokens),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a saved state; the target must hold its policy already."""
        self.stop()
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.tokens_seen = state["steps"], state["tokens_seen"]
        self.acceptance = state["acceptance"]
        self.buffer.seen_tokens.clear()
        self.buffer.seen_tokens.update(state["seen_tokens"])
        self.drafter.refresh_head(self.target.head)
        if state["version"]:
            self.runner.load(self.drafter.state_dict(), state["version"])
