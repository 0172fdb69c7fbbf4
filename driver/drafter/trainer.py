"""The spot trainer: trains the drafter in the time that the rollout's tail leaves idle."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..common.spans import Spans
from ..model.drafter import Drafter
from ..model.kv_cache import KvCache
from ..model.target import TargetModel
from ..rollout.draft_runner import DraftRunner
from ..rollout.pages import pages_for
from ..rollout.scheduler import Sequence
from .buffer import DataBuffer, Document
from .checkpoint import DraftCheckpoints
from .loss import Objective, Teacher, Teachers
from .partition import STOP_S, Beside, Overlap, choose_overlap, measure_overlaps
from .reports import StepReports
from .step import IN_FLIGHT, Bin, DraftStep, Reduce
from .swap import ReadyWeights
from .thread import StepThread

if TYPE_CHECKING:
    from ..config.sections import DrafterConfig, SpotConfig


class SpotTrainer:
    """Micro-steps on recorded features while few requests are active.

    `serial` runs one micro-step between two passes of the tail, `overlapped` a thread beside them
    that stops within a few milliseconds, on a GPU in a partition of its own; `auto` is serial
    unless overlapping was measured to be better; `coordinated` trains when the coordinator says so;
    `off` trains nothing. New weights are handed to the runner between passes only.
    Features, embedding, head and norm of the target are read, never written. A step that fails
    costs the drafter its step and the rollout nothing: the failure is a warning.

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
        self.config = config
        # Makes plain passes while no request runs, for measuring: seconds of one, None where passes
        # are not captured. The engine's, which is built later.
        self.decode: Callable[[], float | None] = lambda: None
        self.buffer = DataBuffer(config.buffer_tokens, config.keep_long, seed, config.spill_tokens)
        if cache.features is not None:
            self.buffer.reserve(cache.features.flatten(0, 1))
        most = max(IN_FLIGHT, config.final_steps)
        self.bin = Bin(config.tokens_per_step, target, drafter_config.rejected_weight, most)
        self._in_flight = IN_FLIGHT  # steps that may be queued
        # Of the final steps: hundreds of small kernels, which need not queue behind large ones.
        self._stream = torch.cuda.Stream(target.device, priority=-1) if self.bin.fixed else None
        objective = Objective(drafter_config.loss, drafter_config.feature_loss)
        self.lr = config.lr or drafter_config.lr
        unroll, horizon = drafter_config.unroll, config.average
        self.step = DraftStep(drafter, self.bin, objective, unroll, self.lr, horizon)
        self.checkpoints: DraftCheckpoints | None = None
        self.beside: Beside | None = None  # how it trains beside the tail
        self.overlap: Overlap | None = None  # what was measured of that
        self.measured: list[Overlap] = []  # of everything tried
        self.serial_step_s = 0.0
        self._measured = False
        self.spans = Spans("drafter")
        self.target_version = self.steps = self.tokens_seen = 0
        self.busy_s = 0.0  # that the host spent on micro-steps in the step that ended
        self._spent_s = 0.0  # and since
        self.reports = StepReports()
        self.teachers = Teachers(target.final_norm, drafter.lm_head.weight)
        self.ready = ReadyWeights(self.step.average.state_dict, runner)
        self.thread = StepThread(self.attempt, self._settle, self._fail)
        self._passes = 0  # of tails
        self.error: BaseException | None = None  # why it pauses

    @property
    def running(self) -> bool:
        """Whether the thread trains."""
        return self.thread.running

    @property
    def stop_s(self) -> float:
        """The longest that a stop took."""
        return self.thread.stop_s

    @property
    def mode(self) -> str:
        """How it trains by now."""
        if self.config.mode == "auto":
            return "serial" if self.beside is None else "overlapped"
        if self.config.mode == "overlapped" and self.bin.fixed and self.beside is None:
            return "serial"  # not measured yet, or there are no partitions
        return self.config.mode

    # ---- what the engine and the loop call ------------------------------------------------------

    def prepare(self) -> None:
        """Makes the graph that the first rollout would wait for, with a drafter that was trained.

        Its documents are of one policy: the steps of a run that starts or goes on have no others.
        """
        if self.bin.fixed and self.config.mode != "off" and self.steps:
            self.capture(0, None)

    def on_finish(self, sequence: Sequence) -> None:
        """Takes a finished sequence's features out of the cache before its pages are freed."""
        if self.config.mode == "off":
            return
        # Page by page: few indices. Nothing here waits for the device, which waits for the next
        # passes.
        count = sequence.context_len
        pages = sequence.pages[: pages_for(count, self.cache.page_size)]
        index = torch.tensor(pages, dtype=torch.int64, pin_memory=self.bin.fixed)
        index = index.to(self.cache.features.device, non_blocking=True)
        features = self.cache.features.index_select(0, index).flatten(0, 1)[:count].clone()
        tokens = torch.from_numpy(np.array(sequence.tokens[: count + 1]))
        self.buffer.add(
            Document(
                tokens,
                features,
                self.target_version,
                tuple(sequence.missed),
                ready=self._event() if self.bin.fixed else None,
            )
        )

    def on_pass(self, active: int, passes: int = 1) -> None:
        """Trains while few requests are active; swaps in what was learned.

        Args:
            active: requests that run or wait.
            passes: made since the last call.
        """
        mode = self.mode
        if mode in ("off", "coordinated") or not 0 < active <= self.config.tail_batch:
            return
        if self.error is None:
            if mode == "serial":
                due = self._passes // self.config.every
                self._passes += passes
                for _ in range(self._passes // self.config.every - due):
                    if not self.attempt():
                        break
                self._settle()
            elif not self.running:
                self.start()
        self.ready.swap()

    def finish(self) -> None:
        """Ends the bubble at once."""
        self.train_on()
        self.take_over()

    def train_on(self) -> None:
        """Ends the bubble but for the final steps, which a GPU makes beside what comes next.

        That must leave the engine's weights and the documents as they are, until `take_over`.
        """
        self.stop()
        if self.config.mode in ("off", "coordinated"):  # there it is over with the last rank
            return
        self._measure()
        self._in_flight = max(IN_FLIGHT, self.config.final_steps)
        with self._aside():
            for _ in range(self.config.final_steps):
                if not self.attempt():
                    break

    def take_over(self) -> None:
        """Waits for the final steps; new vocabulary, swap. The target has its old weights still."""
        self._settle()
        self._in_flight = IN_FLIGHT
        self.stop()
        if self.config.mode == "off":
            return
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if self.config.mode != "coordinated":  # there one rank does it for all
            self.renew()
        if self.checkpoints is not None:
            self.checkpoints.collect(wait=False)
            self.checkpoints.copies.prepare(self._state())
        self.teachers.keep(self.target_version)

    def _aside(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def start(self) -> None:
        """Trains in a thread, in the partition where there is one, until `stop`."""
        if self.beside is None:
            return self.thread.start(None)
        self.thread.start(self.beside.stream, self.beside.duty)

    def stop(self) -> None:
        """Returns once no micro-step runs; what failed in one is a warning here, in the caller."""
        self.thread.stop()
        self.reports.settle(0)
        if self.error is not None:
            error, self.error = self.error, None
            warnings.warn(
                f"spot trainer: a micro-step failed ({type(error).__name__}: {error}); training of"
                f" the drafter paused, drafts go on with version {self.runner.version}",
                stacklevel=2,
            )

    def renew(self) -> None:
        """A vocabulary of what was seen by now, and the weights as they are to the runner."""
        if self.buffer.seen_tokens:
            self.rebuild_vocabulary()
        if self.steps:
            self.swap()

    def close(self) -> None:
        """Ends its threads; the last checkpoint is whole."""
        self.stop()
        if self.checkpoints is not None:
            self.checkpoints.collect()

    def swap(self) -> None:
        """Hands the weights as they are to the runner; not while a thread trains them."""
        self.ready.publish()
        if self.bin.fixed:
            torch.cuda.current_stream().synchronize()
        self.ready.swap()

    def start_step(self, target_version: int) -> None:
        """A new policy is in the target: its head is gathered, the longest old documents kept."""
        self.stop()
        if target_version != self.target_version and not self.teachers.kept(self.target_version):
            self.buffer.clear()  # their teacher went with the old weights
        self.buffer.start_step()
        self.target_version = target_version
        self.busy_s, self._spent_s = self._spent_s, 0.0
        self.drafter.refresh_head(self.target.head)
        if self.runner.version:
            self.runner.refresh_head()
        if self.beside is not None:  # with documents of two policies from here on
            self.capture(self.share(self.beside.rows), self.beside)

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next micro-steps."""
        self.step.set_lr(lr)

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
        self.reports.settle(self._in_flight - 1)
        beside = self.beside if self.thread.here else None
        rows = self.bin.tokens if beside is None else beside.rows
        with self.buffer.lock:
            pieces = self.buffer.sample(rows, self.steps, self.bin.most)
            if not pieces and reduce is None:
                return False
            if reduce is None:
                self.first_vocabulary()
            place = self.target_version, self.share(rows), rows
            loaded = self.bin.load(pieces, *place) if pieces else None
            if any(piece.document.spilled for piece in pieces) and self.bin.fixed:
                self.buffer.read = self._event()
        tokens = sum(piece.length for piece in pieces)
        now, before = self._teachers()
        if reduce is None:
            assert loaded is not None
            if beside is None:
                self.capture(loaded[0], None)
            self.step.run(*loaded, now, before, beside.sms if beside else 0)
        else:
            batch = self.bin.batch(*loaded, now, before) if loaded else None
            means = self.step.backward(batch)
            tokens = reduce([p.grad for p in self.drafter.trainable()], tokens)
            self.step.update(means)
        self.steps += 1
        self.tokens_seen += tokens
        self.reports.note(self.step.report)
        if self.steps % self.config.swap_every == 0:
            self.ready.publish()
        every = self.config.checkpoint_every
        if self.checkpoints is not None and every and self.steps % every == 0:
            self.checkpoints.save(self._state, self.steps)
        self._spent_s += time.perf_counter() - begin
        return True

    def share(self, rows: int) -> int:
        """Of a step's rows, those for documents of the step before."""
        return int(rows * self.config.keep_long)

    def _teachers(self) -> tuple[Teacher, Teacher | None]:
        return self.teachers.now(self.target_version), self.teachers.previous

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def capture(self, split: int, where: Beside | None) -> None:
        """Makes a graph of a step, where there is none."""
        rows = self.bin.tokens if where is None else where.rows
        place = () if where is None else (where.sms, where.stream)
        self.step.capture(split, rows, *self._teachers(), *place)

    def attempt(self) -> bool:
        """A micro-step whose failure is kept for `stop`; False where none was made."""
        try:
            with self.spans("micro_step", version=self.runner.version):
                return self.micro_step()
        except Exception as error:
            self.error = error
            return False

    def _settle(self) -> None:
        """Waits for the micro-steps in flight: time of training, too."""
        begin = time.perf_counter()
        self.reports.settle(0)
        self._spent_s += time.perf_counter() - begin

    def _fail(self, error: BaseException) -> None:
        self.error = error

    def first_vocabulary(self) -> None:
        """Before the first step of all, unless documents are kept with a law over the one there."""
        if self.steps == 0 and self.teachers.previous is None:
            self.rebuild_vocabulary()

    def rebuild_vocabulary(self) -> None:
        """Drafts the tokens seen most often in rollouts, then the lowest ids."""
        spec, before = self.drafter.spec, self.drafter.d2t.clone()
        if spec.draft_vocab < spec.vocab_size:
            self.drafter.set_vocabulary(self.buffer.most_seen(spec.draft_vocab, spec.vocab_size))
            self.drafter.refresh_head(self.target.head)
            self._forget_kept(before)

    def _forget_kept(self, vocabulary: torch.Tensor) -> None:
        """Drops the kept documents, whose teacher's law is over this d2t, if another is there."""
        if not torch.equal(vocabulary, self.drafter.d2t):
            self.buffer.drop_kept()

    # ---- overlap --------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Chooses a partition, once; no request runs meanwhile.

        Its micro-steps see one rollout's documents over and over, so they change nothing.
        """
        wanted = self.bin.fixed and self.config.mode in ("auto", "overlapped")
        if not wanted or self._measured or not self.buffer.num_tokens:
            return
        if self.decode() is None:
            return  # its graphs come with the next rollout
        self._measured = True
        budget, counters = self.config.slowdown, (self.steps, self.tokens_seen)
        try:
            with self.step.idle():
                self.serial_step_s, found = measure_overlaps(self, self.decode, budget)
        except Exception as error:  # whatever it is, there is another way to train
            self.beside = None
            warnings.warn(
                f"spot trainer: no partition of the GPU ({type(error).__name__}: {error}); it"
                " trains between passes instead",
                stacklevel=3,
            )
            return
        finally:
            self.steps, self.tokens_seen = counters
        self.measured = list(found)
        best = choose_overlap(self.measured, self.bin.tokens / self.serial_step_s, budget)
        if best is None and self.config.mode == "overlapped":
            best = min(self.measured, key=lambda overlap: overlap.slowdown)
            warnings.warn(
                f"spot trainer: no partition keeps to spot.slowdown={budget:g}, stops in"
                f" {1e3 * STOP_S:.0f} ms and trains more than between passes; spot.mode=overlapped"
                f" takes {best.sms} multiprocessors, which slow decoding {best.slowdown:.2f} times"
                f" and stop in {1e3 * best.stop_s:.0f} ms",
                stacklevel=3,
            )
        self.overlap = best
        self.beside = None if best is None else found[best]

    # ---- records --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Under the names of the metrics file.

        Loss, acceptance and top-1 are of the weights that are trained, not of their average.
        """
        if not self.running:
            self.reports.settle(0)
        out = {
            **self.reports.last,
            "drafter/version": self.runner.version,
            "drafter/tokens_seen": self.tokens_seen,
            "drafter/busy_s": self.busy_s,
            "drafter/buffer_tokens": self.buffer.num_tokens,
        }
        if self.overlap is not None:
            out["drafter/overlap_slowdown"] = self.overlap.slowdown
            out["drafter/sms"] = self.overlap.sms
            out["drafter/duty"] = self.overlap.duty
            out["drafter/stop_ms"] = 1e3 * self.stop_s
        if self.checkpoints is not None:
            out["drafter/checkpoint_stall_ms"] = 1e3 * self.checkpoints.stall_s
        return out

    def state_dict(self) -> dict[str, Any]:
        """What is trained, its optimizer and counters; recorded documents are not kept.

        So a resumed run lacks the long documents of the step before, and then trains as an unbroken
        one would on the same documents. Tensors are the live ones: save or copy them before the
        next micro-step.
        """
        self.stop()
        return self._state() | {"drafter": self.step.average.state_dict()}

    def _state(self) -> dict[str, Any]:
        """The same without the head, which is the target's."""
        drafter = self.step.average.state_dict()
        del drafter["lm_head.weight"]
        return {
            "drafter": drafter,
            "optimizer": self.step.state_dict(),
            "version": self.runner.version,
            "steps": self.steps,
            "acceptance": float(self.reports.last.get("drafter/acceptance", 0.0)),
            "tokens_seen": self.tokens_seen,
            "seen_tokens": dict(self.buffer.seen_tokens),
            **({"trained": self.step.average.trained} if self.config.average else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a saved state; the target must hold its policy already."""
        self.stop()
        self.ready.drop()
        vocabulary = self.drafter.d2t.clone()
        head = {"lm_head.weight": self.drafter.lm_head.weight}
        trained = state.get("trained", {})  # none: what drafts is trained itself
        self.step.average.load(head | state["drafter"], trained)
        self.step.load_state_dict(state["optimizer"])
        self.steps, self.tokens_seen = state["steps"], state["tokens_seen"]
        self.step.acceptance.fill_(state["acceptance"])
        self.reports.last["drafter/acceptance"] = state["acceptance"]
        self.buffer.seen_tokens.clear()
        self.buffer.seen_tokens.update(state["seen_tokens"])
        self.drafter.refresh_head(self.target.head)
        self._forget_kept(vocabulary)
        if state["version"]:
            self.runner.load(self.step.average.state_dict(), state["version"])

    def resume(self) -> int:
        """Goes on from its own newest checkpoint where that is newer; the micro-steps gained."""
        found = None if self.checkpoints is None else self.checkpoints.latest()
        if found is None or found[0] <= self.steps:
            return 0
        gained = found[0] - self.steps
        self.load_state_dict(found[1])
        return gained
