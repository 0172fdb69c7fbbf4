"""The spot trainer: trains the drafter in the time that the rollout's tail leaves idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_

from driver.data_buffer import DataBuffer, Document, Piece
from driver.draft_loss import DraftBatch, unrolled_loss
from driver.drafter import Drafter
from driver.model import TargetModel
from driver.rollout.draft_runner import DraftRunner
from driver.rollout.kv_cache import KvCache
from driver.rollout.scheduler import Sequence

if TYPE_CHECKING:
    from driver.sections import DrafterConfig, SpotConfig

SWAP_EVERY = 8  # micro-steps between two versions of the drafter
MAX_GRAD_NORM = 1.0


class SpotTrainer:
    """Micro-steps on recorded features while few requests are active.

    `serial` runs one micro-step between two passes of the tail, `overlapped` a thread beside them
    that stops within one micro-step; `off` trains nothing. New weights are handed to the runner
    between passes only. Features, embedding, head and norm of the target are read, never written.

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
        self.buffer = DataBuffer(config.buffer_tokens, config.keep_long, seed)
        self.optimizer = torch.optim.AdamW(
            drafter.trainable(), lr=drafter_config.lr, weight_decay=0.0, betas=(0.9, 0.95)
        )
        self.target_version = 0
        self.steps = self.tokens_seen = 0
        self.busy_s = 0.0  # spent in micro-steps since `start_step`
        self._last: dict[str, float] = {}
        self._since_swap = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()  # held for a micro-step and for a swap
        self.error: BaseException | None = None

    # ---- what the engine calls ------------------------------------------------------------------

    def on_finish(self, sequence: Sequence) -> None:
        """Takes a finished sequence's features out of the cache before its pages are freed."""
        if self.config.mode == "off" or sequence.context_len < 2:
            return
        size = self.cache.page_size
        places = [sequence.pages[t // size] * size + t % size for t in range(sequence.context_len)]
        index = torch.tensor(places, device=self.cache.features.device)
        features = self.cache.features.flatten(0, 1).index_select(0, index)
        tokens = torch.tensor(sequence.tokens[: sequence.context_len + 1])
        self.buffer.add(Document(tokens, features, self.target_version))

    def on_pass(self, active: int) -> None:
        """Trains while few requests are active; swaps in what was learned."""
        if self.config.mode == "off" or not 0 < active <= self.config.tail_batch:
            return
        if self.config.mode == "serial":
            self.micro_step()
        elif self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._work, name="spot-trainer", daemon=True)
            self._thread.start()
        if self._since_swap >= SWAP_EVERY:
            self.swap()

    def finish(self) -> None:
        """Ends the bubble: stops the thread, runs the final steps, swaps the weights in."""
        self.stop()
        if self.config.mode == "off":
            return
        for _ in range(self.config.final_steps):
            if not self.micro_step():
                break
        if self._since_swap:
            self.swap()

    def stop(self) -> None:
        """Returns once no micro-step runs; a thread's error is raised here, in the caller."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise RuntimeError("the spot trainer's thread failed") from error

    def start_step(self, target_version: int) -> None:
        """A new policy: new head, new vocabulary, the longest old documents kept."""
        self.stop()
        self.target_version = target_version
        self.busy_s = 0.0
        self.buffer.start_step()
        self._choose_vocabulary()
        self.drafter.refresh_head(self.target.head)
        if self.runner.version:
            self.swap()

    # ---- training -------------------------------------------------------------------------------

    def micro_step(self) -> bool:
        """One optimizer step on a packed batch; False where there is no data yet."""
        begin = time.perf_counter()
        with self._lock:
            pieces = self.buffer.sample(self.config.tokens_per_step)
            if not pieces:
                return False
            batch = self._pack(pieces)
            loss, metrics = unrolled_loss(self.drafter, batch, self.target.cos_sin, self.unroll)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            clip_grad_norm_(self.drafter.trainable(), MAX_GRAD_NORM)
            self.optimizer.step()
            self.steps += 1
            self._since_swap += 1
            self.tokens_seen += len(batch.position)
            self._last = metrics
        self.busy_s += time.perf_counter() - begin
        return True

    def _work(self) -> None:
        torch.set_num_threads(1)  # the tail keeps the other cores
        try:
            while not self._stop.is_set() and self.micro_step():
                pass
        except BaseException as error:  # handed to `stop`, in the thread that can act on it
            self.error = error

    def _pack(self, pieces: Seq[Piece]) -> DraftBatch:
        """Documents end to end, no padding; entry t pairs features t with token t + 1."""
        width = 3 * self.target.spec.hidden_size
        tokens, features, teacher, position, document, place = [], [], [], [], [], []
        for index, piece in enumerate(pieces):
            begin, end = piece.start, piece.start + piece.length
            recorded = piece.document.features
            tokens.append(piece.document.tokens[begin + 1 : end + 1])
            features.append(recorded[begin:end, :width])
            teacher.append(recorded[begin + 1 : end + 1, width:])
            position.append(torch.arange(begin, end))
            place.append(torch.arange(piece.length))
            document.append(torch.full((piece.length,), index))
        device = self.target.device
        hidden = torch.cat(teacher).float()
        final = torch.nn.functional.rms_norm(
            hidden,
            hidden.shape[-1:],
            self.target.final_norm.float(),
            self.target.spec.rms_norm_eps,
        )
        return DraftBatch(
            self.target.embedding.index_select(0, torch.cat(tokens).to(device)).float(),
            torch.cat(features).float(),
            final,
            torch.cat(position).to(device),
            torch.cat(document).to(device),
            torch.cat(place).to(device),
        )

    def _choose_vocabulary(self) -> None:
        """The tokens seen most often in rollouts, then the lowest ids."""
        spec = self.drafter.spec
        if spec.draft_vocab == spec.vocab_size:
            return
        common = [t for t, _ in self.buffer.seen_tokens.most_common(spec.draft_vocab)]
        chosen = set(common)
        fill = (t for t in range(spec.vocab_size) if t not in chosen)
        ids = common + [next(fill) for _ in range(spec.draft_vocab - len(common))]
        self.drafter.set_vocabulary(torch.tensor(sorted(ids)))

    def swap(self) -> None:
        """Copies the drafter's weights into the runner under a new version."""
        with self._lock:
            self.runner.load(self.drafter.state_dict(), self.runner.version + 1)
            self._since_swap = 0

    # ---- records --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        return {
            **self._last,
            "drafter/version": self.runner.version,
            "drafter/tokens_seen": self.tokens_seen,
        }

    def state_dict(self) -> dict[str, Any]:
        """What is trained, its optimizer and counters; recorded features are not kept."""
        self.stop()
        return {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "version": self.runner.version,
            "steps": self.steps,
            "tokens_seen": self.tokens_seen,
            "seen_tokens": dict(self.buffer.seen_tokens),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.tokens_seen = state["steps"], state["tokens_seen"]
        self.buffer.seen_tokens.update(state["seen_tokens"])
        self.drafter.refresh_head(self.target.head)
        if state["version"]:
            self.runner.load(self.drafter.state_dict(), state["version"])
