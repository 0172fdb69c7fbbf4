"""One engine that several threads use: rollouts, and what changes between their bursts."""

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Integral
from typing import Any

import torch

from ..common.errors import UserError
from ..common.numbers import shown
from ..model.target_weights import Weights
from ..rollout.observer import Observers, RolloutObserver
from ..rollout.request import Request, Response
from .inbox import Inbox, OnEnd, SessionClosed, Ticket, check_ids
from .load import use_device
from .parts import Rollout

LOOK_S = 0.1  # longest wait for a tool before the observer is called again
EXIT_S = 30.0  # most that the exit of Python waits for a session that was not closed


class SharedEngine:
    """Rollouts in the caller's thread, or in one of its own for submitted requests."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.engine, self.spot = rollout.engine, rollout.spot
        self._rolling = threading.Lock()  # held during a rollout
        self._roller: threading.Thread | None = None  # the thread of the rollout
        self._using = threading.Lock()  # held by the thread that uses the engine
        self._inbox = inbox = Inbox(self._using, rollout.target.spec.vocab_size)
        self._process = os.getpid()  # threads and CUDA do not survive a fork
        self._lock = threading.Lock()  # guards _worker
        self._worker: threading.Thread | None = None
        self._owned = False  # whether nothing else uses the engine
        self._final_steps = False  # whether final steps of the drafter are in flight
        weakref.finalize(self, inbox.close).atexit = False  # ends the thread

    def roll_out(
        self,
        requests: Sequence[Request],
        *,
        record: bool = True,
        observer: RolloutObserver | None = None,
        on_end: OnEnd | None = None,
    ) -> list[Response]:
        """Makes a rollout in this thread, after a running one; submitted requests join it.

        Args:
            requests: of the rollout.
            record: see `RolloutEngine.generate`.
            observer: called besides the spot trainer.
            on_end: see `Session.submit`; an error in it ends the rollout.

        With `engine.tensor_parallel` every rank of a group makes the same call, without `on_end`:
        answers would come at different passes.

        Raises:
            UserError: a request that can never run, or the session sleeps.
            SessionClosed: the session is closed.
        """
        inbox = self._inbox
        self._check_thread()
        self._check_ready()  # a rollout that waits for `wake` holds the first lock
        self._check(requests)
        with self._rolling, self._using, torch.inference_mode(False), torch.enable_grad():
            self._check_ready()
            self._roller = threading.current_thread()
            if self._final_steps and self.spot is not None:  # documents must not change meanwhile
                self.spot.end_final_steps()
                self._final_steps = False
            inbox.on_end, inbox.kv_lost = on_end, False
            inbox.version = self.engine.target_version
            inbox.poll_s = None if observer is None else LOOK_S
            parts = [part for part in (observer, self.spot) if part is not None]
            try:
                return self.engine.generate(
                    requests,
                    record=record,
                    observer=Observers(*parts) if observer else None,
                    source=inbox,
                )
            except BaseException as error:
                if self.spot is not None:
                    self.spot.stop()  # its thread must not outlive the rollout
                inbox.fail(error)
                raise
            finally:
                self._roller = inbox.on_end = None

    # ---- the policy, the drafter, memory --------------------------------------------------------

    def update_weights(self, stream: Weights, version: int | None = None) -> None:
        """Copies new weights into the engine, in place.

        Unfinished requests wait for it between two passes. They keep their tokens, whose KV is
        computed again with the new weights, and `Response.version` is that of the last token.

        Args:
            stream: a state dict, or its items, each of which is copied before the next is read.
            version: of the policy; None = the next number.

        Raises UserError for tensors that do not fit or are not finite. A state dict is checked
        before any weight changes. After an error in a stream requests are refused, and unfinished
        ones wait, until a further call has succeeded.
        """
        if not isinstance(stream, Iterable) or isinstance(stream, str):
            raise UserError(
                f"update_weights: got a {type(stream).__name__}; give the state dict of the policy"
            )
        if not (version is None or isinstance(version, Integral)):
            raise UserError(f"update_weights: version must be an integer, got {shown(version)}")
        inbox = self._inbox
        with self._between_bursts():
            if self.spot is not None:
                self.spot.end_final_steps()
            self._final_steps = False
            inbox.kv_lost = True
            inbox.mixed |= not isinstance(stream, Mapping)
            version = self.engine.target_version + 1 if version is None else int(version)
            weights = stream if isinstance(stream, Mapping) else _pairs(stream)
            self.rollout.update_weights(weights, version)
            inbox.version, inbox.mixed = version, False

    def train_drafter(self, steps: int | None = None) -> int:
        """Trains the drafter on the responses so far; returns the micro-steps made so far in all.

        The result of `steps` micro-steps is used at once. None: the final steps of a training step
        (`spot.final_steps`), which a GPU runs during what follows, until `update_weights` or the
        next rollout.
        """
        if self.spot is None or self.spot.config.mode == "off":
            raise UserError("session: no drafter is trained; make it with train_drafter=True")
        if not (steps is None or (isinstance(steps, Integral) and steps >= 0)):
            raise UserError(f"steps: must be at least 0 or None, got {shown(steps)}")
        with self._between_bursts():
            if steps is None:
                if self.rollout.tuner is not None and not self._inbox.asleep:
                    self.rollout.tuner.tune()
                self.spot.begin_final_steps()
                self._final_steps = True
            else:
                self.spot.stop()
                for _ in range(int(steps)):
                    if not self.spot.micro_step():
                        break
                self.spot.renew()
            return self.spot.steps

    def sleep(self) -> None:
        """Frees KV cache and features; unfinished requests wait for `wake`.

        On a GPU their addresses stay, so that captured graphs stay valid.
        """
        with self._between_bursts():
            if not self._inbox.asleep:
                if self.spot is not None and not self._final_steps:
                    self.spot.stop()
                self.engine.cache.memory.release()
                self._inbox.asleep = self._inbox.kv_lost = True

    def wake(self) -> None:
        """Restores the memory; unfinished requests continue with the same tokens."""
        with self._between_bursts():
            if self._inbox.asleep:
                self.engine.cache.memory.restore()
                self._inbox.asleep = False

    def close(self) -> None:
        """Ends the session; unfinished requests end with `SessionClosed`.

        The KV cache of a session that `from_pretrained` made is freed at once, weights once nothing
        refers to the session.
        """
        self._inbox.close()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join()
        self._inbox.fail(SessionClosed("the session was closed"))
        if self.spot is not None:
            self.spot.close()
        if self._owned and threading.current_thread() is not self._roller:
            with self._rolling:
                self.engine.cache.memory.release()

    # ---- threads --------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("session: made before a fork; make it in the process that uses it")

    def _check_thread(self) -> None:
        self._check_process()
        if threading.current_thread() is self._roller:
            raise RuntimeError("session: called by the thread of the rollout; use another thread")

    def _check_ready(self) -> None:
        self._check_open()
        if self._inbox.asleep:
            raise UserError("session: it sleeps; call wake() first")
        if self._inbox.mixed:
            raise UserError(
                "session: the last update_weights failed halfway; call it again with all weights"
            )

    def _check(self, requests: Sequence[Request]) -> None:
        spec, cache = self.rollout.target.spec, self.engine.cache
        checked: set[tuple[int, ...]] = set()
        for request in requests:
            if not isinstance(request, Request):
                raise UserError(f"session: expected a Request, got {shown(request)}")
            request.check(spec.max_position, cache.page_size, cache.num_pages)
            if request.prompt_ids not in checked:  # siblings share it
                check_ids(f"request {request.id}", request.prompt_ids, spec.vocab_size)
                checked.add(request.prompt_ids)
            if request.resume is not None:
                name = f"request {request.id}: resume"
                check_ids(name, request.resume.token_ids, spec.vocab_size)

    def _check_open(self) -> None:
        if self._inbox.closed:
            raise SessionClosed("the session is closed")

    def _submit(self, requests: Sequence[Request], on_end: OnEnd | None) -> list[Ticket]:
        self._check_process()
        if not (on_end is None or callable(on_end)):
            raise UserError(f"on_end: must be a function, got {shown(on_end)}")
        if self.rollout.target.parallel.size > 1:  # ranks must get requests at the same pass
            raise UserError("session: with engine.tensor_parallel only roll_out makes responses")
        tickets = [Ticket(request, on_end, self._inbox, self) for request in requests]
        self._inbox.put(tickets)
        with self._lock:
            if self._worker is None:
                work = partial(_work, self._inbox, self.rollout.target.device)
                self._worker = threading.Thread(target=work, name="tlt-session", daemon=True)
                self._worker.start()
                end = partial(_end_at_exit, self._inbox, weakref.ref(self._worker), os.getpid())
                weakref.finalize(self._worker, end)
        return tickets

    @contextmanager
    def _between_bursts(self) -> Iterator[None]:
        """Inside the block, this thread alone uses the engine, on its current stream."""
        self._check_thread()
        self._check_open()
        device = self.rollout.target.device
        with self._inbox.between_bursts(), torch.inference_mode(False), torch.enable_grad():
            if device.type == "cpu":
                yield
                return
            here, there = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
            here.wait_stream(there)  # rollouts run there
            try:
                yield
            finally:
                there.wait_stream(here)


def _work(inbox: Inbox, device: torch.device) -> None:
    """Makes rollouts of what arrives; holds no session meanwhile, so that it can be collected."""
    use_device(str(device))
    while (session := inbox.wait()) is not None:
        with suppress(BaseException):  # the futures hold the error
            session.roll_out(())
        del session


def _end_at_exit(inbox: Inbox, worker: weakref.ref[threading.Thread], process: int) -> None:
    """Waits for the burst in flight: Python aborts if it exits while a thread is in an op."""
    thread = worker()
    if thread is not None and os.getpid() == process:
        inbox.close()
        thread.join(EXIT_S)


def _pairs(stream: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for item in stream:
        pair = isinstance(item, (tuple, list)) and len(item) == 2
        if not (pair and isinstance(item[1], torch.Tensor)):
            raise UserError(f"update_weights: a stream has (name, tensor) pairs, got {shown(item)}")
        yield item
