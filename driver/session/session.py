"""`Session`: the engine for a training loop of your own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import TracebackType

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..common.errors import UserError
from ..model.prompts import PromptEncoder
from ..model.target import Weights
from ..rollout.observer import Observers, RolloutObserver
from ..rollout.rebalance import LOOK_S
from ..rollout.request import Request, Response, SamplingParams
from ..rollout.source import RequestSource
from .inbox import Inbox, OnEnd, SessionClosed, Ticket
from .load import use_device
from .parts import Rollout
from .pretrained import build, configure, load
from .prompts import Prompt, Prompts


class Session:
    """Generates responses with the rollout engine, for any program.

    Use it as a context manager. Its methods may be called from any thread; but those that wait,
    which are all but `submit`, not from a callback of a future or of an observer.

    Args:
        rollout: the engine and its parts.
        encode: turns text into ids; None: prompts must be ids.
        params: sampling parameters of prompts without their own.

    Attributes:
        params: see above; its `stop_ids` are the end tokens of the model.

    Example:
        >>> with Session.from_pretrained("smollm2") as session:       # doctest: +SKIP
        ...     (response,) = session.generate("12 * 7 =")
        ...     print(session.decode(response))
    """

    def __init__(
        self,
        rollout: Rollout,
        encode: PromptEncoder | None = None,
        params: SamplingParams | None = None,
    ) -> None:
        self.rollout, self.encode = rollout, encode
        self.engine, self.spot = rollout.engine, rollout.spot
        self.params = params or SamplingParams(stop_ids=rollout.target.spec.eos_ids)
        self._prompts = Prompts(encode, self.params, rollout.target.spec, rollout.engine.cache)
        self._rolling = threading.Lock()  # held during a rollout
        self._roller: threading.Thread | None = None  # its thread
        self._using = threading.Lock()  # held by the thread that uses the engine
        self._inbox = Inbox(
            self._using,
            lambda: self.engine.target_version,
            rollout.target.spec.vocab_size,
        )
        self._process = os.getpid()  # threads and CUDA do not survive a fork
        self._lock = threading.Lock()  # of the next one
        self._worker: threading.Thread | None = None
        self._final_steps = False  # of the drafter, in flight

    @classmethod
    def from_pretrained(
        cls,
        model: str | PreTrainedModel,
        *,
        tokenizer: Tokenizer | str | None = None,
        drafter: str | None = None,
        train_drafter: bool = False,
        device: str | None = None,
        seed: int = 0,
        max_batch: int | None = None,
        max_len: int | None = None,
        settings: Sequence[str] = (),
    ) -> Session:
        """A session for a model.

        Args:
            model: a folder in Hugging Face layout, a name such as `smollm2` (see `model.path`), or
                a live transformers model, whose weights are copied.
            tokenizer: a tokenizer or its folder; None: that of the folder, and for a live model
                none, so that prompts must be ids.
            drafter: a checkpoint of a run with a drafter; None: n-gram drafts and plain decoding.
            train_drafter: train the drafter, a new one if there is no checkpoint, during the tails
                of rollouts.
            device: `cpu`, `cuda` or `cuda:N`; None: that of a live model, else a GPU if there is
                one.
            seed: of the noise, and of a new drafter.
            max_batch: most requests that run at once; None: 256 on a GPU, 16 on a CPU.
            max_len: most tokens of a request, prompt included; None: the context of the model.
            settings: `key=value` words as on the command line, such as `engine.page_size=32`.

        Raises:
            UserError: a model, drafter or setting that cannot be used.
        """
        config, state = configure(
            model,
            drafter=drafter,
            train_drafter=train_drafter,
            device=device,
            seed=seed,
            max_batch=max_batch,
            max_len=max_len,
            settings=settings,
        )
        policy, found = load(model, tokenizer, config)
        return cls(*build(policy, found, config, state, shared=policy is model))

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- responses ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Request | Sequence[Prompt],
        params: SamplingParams | None = None,
        samples: int = 1,
        on_end: OnEnd | None = None,
    ) -> list[Response]:
        """Responses in the order of the prompts, the samples of a prompt side by side.

        Args:
            prompts: texts, ids or requests; a text or a request may stand alone.
            params: of texts and ids; None: `self.params`. Without stop ids the end tokens of the
                model end a response.
            samples: responses to each text or list of ids.
            on_end: see `submit`.

        Raises:
            UserError: a request that can never run, or the session sleeps.
            SessionClosed: the session was closed meanwhile.
        """
        self._check_thread()
        self._check_ready()
        futures = self._submit(self._prompts.requests(prompts, params, samples), on_end)
        try:
            wait(futures)
        except BaseException:  # Ctrl-C
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        on_end: OnEnd | None = None,
    ) -> Future[Response]:
        """Starts a request, at once if others run.

        Args:
            prompt: text, ids or a request, whose id is the key of its noise. While the session
                sleeps it waits for `wake`.
            params: see `generate`.
            on_end: called in a thread whenever the model ends a turn, with the state of the
                request, which does not change meanwhile; its `turn_tokens` are those of the turn,
                the stop token included. It returns the ids of tokens that continue the response,
                such as the output of a tool, or None. Others run on while it works.

        Returns:
            A future of the response. An error in `on_end` is an error of this request alone. Its
            `cancel` takes back a request that waits; of one that runs it returns False, and the
            response has the tokens so far. A cancelled asyncio task calls it, too
            (`await asyncio.wrap_future(future)`).

        Raises:
            UserError: the request can never run.
            SessionClosed: the session is closed.
        """
        (future,) = self._submit(self._prompts.requests([prompt], params, 1), on_end)
        return future

    def abort(self, ids: Iterable[int] | None = None) -> list[Response]:
        """Ends submitted requests that have not finished.

        Args:
            ids: of the requests; None = all.

        Returns:
            The responses so far, with the finish reason "abort"; their futures have them too.
            `replace(request, resume=response)` goes on, to the tokens of an uninterrupted request.
            `on_end` is then called again, if it had not answered.
        """
        wanted = None if ids is None else set(ids)
        with self._between_bursts():
            return self._inbox.abort(
                lambda ticket: wanted is None or ticket.request.id in wanted, self.engine.remove
            )

    def decode(self, response: Response) -> str:
        """The text of a response, without special tokens."""
        return self._prompts.decode(response)

    def roll_out(
        self,
        requests: Sequence[Request],
        *,
        record: bool = True,
        observer: RolloutObserver | None = None,
        source: RequestSource | None = None,
        on_end: OnEnd | None = None,
    ) -> list[Response]:
        """Makes a rollout in this thread, after one that runs; submitted requests join it.

        Args:
            requests: of the rollout.
            record: see `RolloutEngine.generate`.
            observer: called besides the spot trainer.
            source: adds requests and takes others out.
            on_end: of the requests, see `submit`; an error in it ends the rollout.
        """
        inbox = self._inbox
        self._check_thread()
        self._check_ready()  # a rollout that waits for `wake` holds the first lock
        with self._rolling, self._using:
            self._check_ready()
            self._roller = threading.current_thread()
            if self._final_steps and self.spot is not None:  # documents must not change meanwhile
                self.spot.end_final_steps()
                self._final_steps = False
            inbox.on_end, inbox.kv_lost = on_end, False
            inbox.poll_s = None if source is None and observer is None else LOOK_S
            parts = [part for part in (observer, self.spot) if part is not None]
            try:
                return self.engine.generate(
                    requests,
                    record=record,
                    observer=Observers(*parts) if observer else None,
                    sources=[inbox] if source is None else [inbox, source],
                )
            except BaseException as error:
                if self.spot is not None:
                    self.spot.stop()  # its thread must not outlive the rollout
                inbox.fail(error)
                raise
            finally:
                self._roller = None

    # ---- the policy, the drafter, memory --------------------------------------------------------

    def update_weights(
        self,
        stream: Weights,
        version: int | None = None,
    ) -> None:
        """Copies new weights into the engine, in place.

        Unfinished requests wait for it between two passes. They keep their tokens, whose KV is
        computed again with the new weights, and `Response.version` is that of the last token.

        Args:
            stream: a state dict, or its items, each of which is copied before the next is read.
            version: of the policy; None = the next number.

        Raises:
            UserError: tensors that do not fit or are not finite. A state dict is checked first, so
                that the old weights and their version stay. After an error in a stream some of the
                weights are new: requests are refused, and unfinished ones wait, until a further
                call has succeeded.
        """
        if not isinstance(stream, Iterable):
            raise UserError(
                f"update_weights: got a {type(stream).__name__}; give the state dict of the policy"
            )
        inbox = self._inbox
        with self._between_bursts():
            if self.spot is not None:
                self.spot.end_final_steps()
            self._final_steps = False
            inbox.kv_lost = True
            inbox.mixed |= not isinstance(stream, Mapping)
            if version is None:
                version = self.engine.target_version + 1
            self.rollout.update_weights(stream, version)
            inbox.mixed = False

    def train_drafter(self, steps: int | None = None) -> int:
        """Trains the drafter on the responses so far, between rollouts.

        Args:
            steps: micro-steps; their result is used at once. None: the final steps of a training
                step (`spot.final_steps`), which a GPU runs during what follows, until
                `update_weights` or the next rollout.

        Returns:
            The micro-steps made so far in all.
        """
        if self.spot is None or self.spot.config.mode == "off":
            raise UserError("session: no drafter is trained; make it with train_drafter=True")
        with self._between_bursts():
            if steps is None:
                if self.rollout.tuner is not None and not self._inbox.asleep:
                    self.rollout.tuner.tune()
                self.spot.begin_final_steps()
                self._final_steps = True
            else:
                self.spot.stop()
                for _ in range(steps):
                    if not self.spot.micro_step():
                        break
                self.spot.renew()
            return self.spot.steps

    def sleep(self) -> None:
        """Frees KV cache and features; unfinished requests wait for `wake`.

        On a GPU they come back at the same addresses, so that captured graphs stay.
        """
        with self._between_bursts():
            if not self._inbox.asleep:
                if self.spot is not None and not self._final_steps:
                    self.spot.stop()
                self.engine.cache.memory.release()
                self._inbox.asleep = self._inbox.kv_lost = True

    def wake(self) -> None:
        """Gets the memory back; unfinished requests go on to the same tokens."""
        with self._between_bursts():
            if self._inbox.asleep:
                self.engine.cache.memory.restore()
                self._inbox.asleep = False

    def close(self) -> None:
        """Ends the session; unfinished requests end with `SessionClosed`."""
        self._inbox.close()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join()
        self._inbox.fail(SessionClosed("the session was closed"))
        if self.spot is not None:
            self.spot.close()

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

    def _check_open(self) -> None:
        if self._inbox.closed:
            raise SessionClosed("the session is closed")

    def _submit(self, requests: Sequence[Request], on_end: OnEnd | None) -> list[Ticket]:
        self._check_process()
        tickets = [Ticket(request, on_end, self._inbox) for request in requests]
        self._inbox.put(tickets)
        with self._lock:
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="tlt-session", daemon=True)
                self._worker.start()
        return tickets

    def _work(self) -> None:
        """Makes rollouts of what arrives until the session is closed."""
        use_device(str(self.rollout.target.device))
        while self._inbox.wait():
            try:
                self.roll_out(())
            except BaseException:  # the futures have it
                continue

    @contextmanager
    def _between_bursts(self) -> Iterator[None]:
        """Inside the block, this thread alone uses the engine, on its current stream."""
        self._check_thread()
        self._check_open()
        device = self.rollout.target.device
        with self._inbox.between_bursts():
            if device.type == "cpu":
                yield
                return
            here, there = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
            here.wait_stream(there)  # rollouts run there
            yield
            there.wait_stream(here)
