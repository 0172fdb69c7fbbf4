"""The spot trainer: trains the drafter in GPU time that the tail of the rollout leaves idle."""

import time
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from ..common.spans import Spans
from ..config.sections import DrafterConfig, SpotConfig
from ..model.drafter import Drafter
from ..model.kv_cache import KvCache
from ..model.target import TargetModel
from ..rollout.draft_runner import DraftRunner
from ..rollout.observer import RolloutObserver
from ..rollout.request import RunningRequest
from ..rollout.stats import RolloutStats
from .buffer import DataBuffer, Document
from .checkpoint import DraftCheckpoints
from .loss import Teachers
from .partition import Overlap, Placement
from .payoff import Payoff, delays
from .step import IN_FLIGHT, Bin, DraftStep, Reduce, StepReports
from .swap import WeightSwap
from .thread import StepThread


@dataclass(eq=False)
class SpotTrainer(RolloutObserver):
    """Runs micro-steps on recorded features while few requests are active.

    `serial` runs micro-steps between passes of the tail. `overlapped` runs them in a thread during
    the passes, on a GPU in a partition. `auto` is serial unless overlapping was measured to be
    better. `coordinated` trains when the coordinator asks for it. `off` never trains. New weights
    reach the runner between passes only.

    No tensor of the target is written. A micro-step that fails is a warning: the drafter loses the
    step and the rollout goes on.
    """

    drafter: Drafter
    runner: DraftRunner  # the drafter at inference
    target: TargetModel
    cache: KvCache  # of the engine, with the recorded features
    config: SpotConfig
    drafter_config: DrafterConfig
    seed: int  # of the data order

    def __post_init__(self) -> None:
        config, target, drafter = self.config, self.target, self.drafter
        self.buffer = DataBuffer(config.buffer_tokens, config.keep_long, self.seed)
        self.bin = Bin(config.tokens_per_step, target, max(IN_FLIGHT, config.final_steps))
        self._in_flight = IN_FLIGHT  # steps that may be enqueued
        # For the final steps: hundreds of small kernels, which must not wait for large ones.
        self._stream = torch.cuda.Stream(target.device, priority=-1) if self.bin.fixed else None
        self.lr = config.lr or self.drafter_config.lr
        unroll, horizon = self.drafter_config.unroll, config.average
        self.teachers = Teachers(target.final_norm, drafter.lm_head.weight)
        self.step = DraftStep(drafter, self.bin, self.teachers, unroll, self.lr, horizon)
        self.checkpoints: DraftCheckpoints | None = None
        self.placement: Placement | None = None  # of steps in the tail; None: between passes
        self.overlap: Overlap | None = None  # measured cost of the placement
        self.spans = Spans("drafter")
        self.target_version = self.steps = self.tokens_seen = 0
        # Host seconds of micro-steps in the last step, and in the current one.
        self.busy_s = self._spent_s = 0.0
        self.payoff = Payoff()
        self.captured_s = 0.0  # host seconds of captures in micro-steps, once in a run
        self.paused = False  # no step is made in a tail: the policy's update uses the time
        self._final: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # begin, end
        self.reports = StepReports()
        self.weights = WeightSwap(self.step.average.state_dict, self.runner)
        self.error: BaseException | None = None  # that paused training
        self.thread = StepThread(self.attempt, self._wait, partial(setattr, self, "error"))
        self._passes = 0  # of tails

    @property
    def running(self) -> bool:
        return self.thread.running

    @property
    def mode(self) -> str:
        if self.config.mode == "auto":
            return "serial" if self.placement is None else "overlapped"
        if self.config.mode == "overlapped" and self.bin.fixed and self.placement is None:
            return "serial"  # not measured yet, or partitions are not supported
        return self.config.mode

    # ---- called by the engine and the training loop ---------------------------------------------

    def prepare(self) -> None:
        """Captures the graph of the first rollout in advance, for a drafter that was trained."""
        if self.bin.fixed and self.config.mode != "off" and self.steps:
            self.step.capture(0, None)  # there are no documents of an earlier policy yet

    def on_finish(self, request: RunningRequest) -> None:
        """Copies the features of a finished request out of the cache, while the next burst runs."""
        if self.config.mode == "off" or not self.payoff.trains:
            return
        window = self.buffer.window(request.context_len + 1, request.request.id)
        self.buffer.add(Document.of(request, window, self.cache, self.target_version))

    @delays
    def on_pass(self, active: int, passes: int = 1) -> None:
        """Trains if few requests are active; hands new weights to the runner."""
        mode = self.mode
        if mode in ("off", "coordinated") or not 0 < active <= self.config.tail_batch:
            return
        if self.error is None and self.payoff.trains and not self.paused:
            if mode == "serial":
                due = self._passes // self.config.every
                self._passes += passes
                for _ in range(self._passes // self.config.every - due):
                    if not self.attempt():
                        break
                self._wait()
            elif not self.running:
                self.start()
        self.weights.swap()

    def weigh(self, stats: RolloutStats) -> str:
        """Decides after a rollout whether training pays, unless on idle ranks; see `Payoff`."""
        if self.config.mode in ("off", "coordinated"):
            return ""
        self.stop()
        reason = self.payoff.weigh(stats, self.steps)
        if reason and not self.payoff.trains:
            self.renew()  # the weights that draft meanwhile
        return reason

    @delays
    def begin_final_steps(self) -> None:
        """Stops the thread and makes the final steps, which a GPU runs during what comes next.

        The engine's weights and the documents must not change until `end_final_steps`.
        """
        self.stop()
        # The coordinator trained to the end.
        if self.config.mode in ("off", "coordinated") or not self.payoff.trains:
            return
        self._in_flight = max(IN_FLIGHT, self.config.final_steps)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for _ in range(self.config.final_steps):
                if not self.attempt():
                    break
        if self._stream is not None:  # what follows starts now
            streams = torch.cuda.current_stream(), self._stream
            events = [s.record_event(torch.cuda.Event(enable_timing=True)) for s in streams]
            self._final = events[0], events[1]

    @delays
    def end_final_steps(self) -> None:
        """Waits for the final steps and swaps weights in; call before the target is updated."""
        self._wait()
        if self._final is not None:  # they delayed the update by their time at most
            self._final[1].synchronize()
            self.payoff.delay_s += max(0.0, 1e-3 * self._final[0].elapsed_time(self._final[1]))
            self._final = None
        self._in_flight = IN_FLIGHT
        self.stop()
        if self.config.mode == "off":
            return
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        # One rank does it for all coordinated ones. New weights cost time to load.
        if self.config.mode != "coordinated" and self.payoff.trains:
            self.renew()
        if self.checkpoints is not None:
            self.checkpoints.collect(wait=False)
            self.checkpoints.copies.prepare(self._state())
        self.teachers.keep(self.target_version)

    def start(self) -> None:
        """Trains in a thread, with the placement if there is one, until `stop`."""
        if self.placement is None:
            self.thread.start(None)
        else:
            self.thread.start(self.placement.partition.stream, self.placement.duty)

    def stop(self) -> None:
        """Returns once no micro-step runs; a failure in the thread becomes a warning here."""
        self.thread.stop()
        self.reports.read(0)
        if self.error is not None:
            error, self.error = self.error, None
            warnings.warn(
                f"spot trainer: a micro-step failed ({type(error).__name__}: {error}); training of"
                f" the drafter paused, drafts still use version {self.runner.version}",
                stacklevel=2,
            )

    def renew(self) -> None:
        """Updates the draft vocabulary to the tokens seen so far and swaps the weights in."""
        if self.buffer.seen_tokens:
            self.rebuild_vocabulary()
        if self.steps:
            self.swap()

    def swap(self) -> None:
        """Hands the current weights to the runner; call while the thread does not train."""
        self.weights.publish()
        if self.bin.fixed:
            torch.cuda.current_stream().synchronize()
        self.weights.swap()

    def close(self) -> None:
        """Stops the thread and waits for the last checkpoint."""
        self.stop()
        if self.checkpoints is not None:
            self.checkpoints.collect()

    def start_step(self, target_version: int) -> None:
        """Adapts to a new policy in the target: gathers its head, keeps the longest documents."""
        self.stop()
        if self.target_version not in (target_version, self.teachers.previous_version):
            self.buffer.clear()  # their teacher's weights are gone
        self.buffer.start_step()
        self.target_version = target_version
        self.busy_s, self._spent_s = self._spent_s, 0.0
        self.drafter.refresh_head(self.target.head)
        if self.runner.version:
            self.runner.refresh_head()
        if self.placement is not None:  # from now on there are documents of two policies
            self.step.capture(self.share(self.placement.rows), self.placement)

    def set_lr(self, lr: float) -> None:
        self.step.lr.fill_(lr)

    # ---- training -------------------------------------------------------------------------------

    def micro_step(self, reduce: Reduce | None = None) -> bool:
        """One optimizer step on a packed batch; False if there is no data yet.

        `reduce` averages the gradients over a group of ranks in place and returns the number of
        tokens in the group's batches; with it this rank takes part even without data.
        """
        begin = time.perf_counter()
        self.reports.read(self._in_flight - 1)
        placement = self.placement if self.thread.is_current else None
        rows = self.bin.tokens if placement is None else placement.rows
        with self.buffer.lock:
            pieces = self.buffer.sample(rows, self.steps, self.bin.most)
            if not pieces and reduce is None:
                return False
            if reduce is None:
                self.first_vocabulary()
            where = self.target_version, self.share(rows), rows
            loaded = self.bin.load(pieces, *where) if pieces else None
        tokens = sum(piece.length for piece in pieces)
        if reduce is None:
            assert loaded is not None
            if placement is None:
                captures = time.perf_counter()
                self.step.capture(loaded[0], None)
                self.captured_s += time.perf_counter() - captures
            self.step.run(*loaded, placement)
        else:
            batch = self.bin.batch(*loaded, self.teachers) if loaded else None
            means = self.step.backward(batch)
            gradients = [cast(torch.Tensor, p.grad) for p in self.drafter.trainable()]
            tokens = reduce(gradients, tokens)
            self.step.update(means)
        self.steps += 1
        self.tokens_seen += tokens
        self.reports.add(self.step.report)
        if self.steps % self.config.swap_every == 0:
            self.weights.publish()
        every = self.config.checkpoint_every
        if self.checkpoints is not None and every and self.steps % every == 0:
            self.checkpoints.save(self._state, self.steps)
        self._spend(begin)
        return True

    def share(self, rows: int) -> int:
        """Rows of a step reserved for documents of the previous policy."""
        return int(rows * self.config.keep_long)

    def attempt(self) -> bool:
        """A micro-step whose failure `stop` reports; False if none was made."""
        try:
            with self.spans("micro_step", version=self.runner.version):
                return self.micro_step()
        except Exception as error:
            self.error = error
            return False

    def _wait(self) -> None:
        """Waits for the micro-steps in flight; the time counts as training."""
        begin = time.perf_counter()
        self.reports.read(0)
        self._spend(begin)

    def _spend(self, begin: float) -> None:
        """Counts the time since `begin` as training; time of the thread delays the rollout, too."""
        spent = time.perf_counter() - begin
        self._spent_s += spent
        if self.thread.is_current:
            share = 1.0 if self.overlap is None else self.overlap.slowdown - 1
            self.payoff.delay_s += spent * share

    def first_vocabulary(self) -> None:
        """Builds the vocabulary before the first step, unless a kept teacher uses the old one."""
        if self.steps == 0 and self.teachers.previous is None:
            self.rebuild_vocabulary()

    def rebuild_vocabulary(self) -> None:
        """Sets the draft vocabulary to the most frequent tokens, then the lowest ids."""
        spec, before = self.drafter.spec, self.drafter.d2t.clone()
        if spec.draft_vocab < spec.vocab_size:
            self.drafter.set_vocabulary(self.buffer.most_seen(spec.draft_vocab, spec.vocab_size))
            self._use_vocabulary(before)

    def _use_vocabulary(self, before: torch.Tensor) -> None:
        """Gathers the head; drops the kept documents if their teacher had another vocabulary."""
        self.drafter.refresh_head(self.target.head)
        if not torch.equal(before, self.drafter.d2t):
            self.buffer.drop_kept()

    # ---- records --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Entries of the metrics file; loss, acceptance, top-1 are of weights before averaging."""
        if not self.running:
            self.reports.read(0)
        out = {
            **self.reports.last,
            "drafter/version": self.runner.version,
            "drafter/tokens_seen": self.tokens_seen,
            "drafter/busy_s": self.busy_s,
            "drafter/rests": float(not self.payoff.trains),
            "drafter/buffer_tokens": self.buffer.num_tokens,
        }
        if self.overlap is not None:
            out |= {
                "drafter/overlap_slowdown": self.overlap.slowdown,
                "drafter/sms": self.overlap.sms,
                "drafter/duty": self.overlap.duty,
                "drafter/stop_ms": 1e3 * self.thread.stop_s,
            }
        if self.checkpoints is not None:
            out["drafter/checkpoint_stall_ms"] = 1e3 * self.checkpoints.stall_s
        return out

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer state and counters, without the recorded documents.

        A resumed run therefore lacks the long documents of the previous step; on the same documents
        it trains as an unbroken run. Tensors are not copied: save them before the next micro-step.
        """
        self.stop()
        return self._state() | {"drafter": self.step.average.state_dict()}

    def _state(self) -> dict[str, Any]:
        """The same without the head, which is the target's."""
        drafter = self.step.average.state_dict()
        del drafter["lm_head.weight"]
        return {
            "drafter": drafter,
            "optimizer": self.step.optimizer.state_dict(),
            "version": self.runner.version,
            "steps": self.steps,
            "acceptance": float(self.reports.last.get("drafter/acceptance", 0.0)),
            "tokens_seen": self.tokens_seen,
            "seen_tokens": dict(self.buffer.seen_tokens),
            **({"trained": self.step.average.trained} if self.config.average else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a saved state; the target must hold its policy already."""
        self.stop()
        self.weights.drop()
        vocabulary = self.drafter.d2t.clone()
        head = {"lm_head.weight": self.drafter.lm_head.weight}
        # Without an average there are no separate trained weights.
        self.step.average.load(head | state["drafter"], state.get("trained", {}))
        self.step.load_state_dict(state["optimizer"])
        self.steps, self.tokens_seen = state["steps"], state["tokens_seen"]
        self.payoff.weighed = self.steps
        self.reports.last["drafter/acceptance"] = state["acceptance"]
        self.buffer.seen_tokens = Counter(state["seen_tokens"])
        self._use_vocabulary(vocabulary)
        if state["version"]:
            self.runner.load(self.step.average.state_dict(), state["version"])

    def resume(self) -> None:
        """Loads the newest drafter checkpoint if it is ahead."""
        found = None if self.checkpoints is None else self.checkpoints.latest()
        if found is not None and found[0] > self.steps:
            self.load_state_dict(found[1])
