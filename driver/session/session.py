"""`Session`: the engine for a training loop of your own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import count
from numbers import Integral
from operator import index
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..common.errors import UserError
from ..common.numbers import shown
from ..common.storage import replaced, storage_errors, user_path
from ..drafter.eagle3 import config_of_state, write_drafter
from ..model.prompts import PromptEncoder
from ..rollout.request import Request, Response, SamplingParams, request_id
from .inbox import OnEnd
from .parts import Rollout
from .pretrained import build
from .shared_engine import SharedEngine

Prompt = str | Sequence[int] | Request


class Session(SharedEngine):
    """Generates responses with the rollout engine, for any program.

    Use it as a context manager. Its methods may be called from any thread; but those that wait,
    which are all but `submit`, not from a callback of a future or of an observer. `params` are
    those of prompts without their own; `rollout`, `engine` and `spot` are the parts. Without
    `encode`, prompts must be ids.

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
        model: Mapping[str, Any] | None = None,  # its `config.json`, for an exported drafter
    ) -> None:
        super().__init__(rollout)
        self.encode, self.model = encode, model
        self.params = params or SamplingParams(stop_ids=rollout.target.spec.eos_ids)
        self._numbers = count()  # of prompts without an id, whose request ids follow from it

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
                none, so that prompts must be ids. Texts are continued as they are; the setting
                `task.chat_template=true` makes them messages to a chat model.
            drafter: a checkpoint of a run with a drafter; None: n-gram drafts and plain decoding.
            train_drafter: train the drafter, a new one if there is no checkpoint, during the tails
                of rollouts.
            device: `cpu`, `cuda` or `cuda:N`; None: that of a live model, else a GPU if there is
                one.
            seed: of the noise, and of a new drafter. Sessions of one seed give equal responses to
                equal calls, so give each process its own.
            max_batch: most requests that run at once; None: 256 on a GPU, 16 on a CPU.
            max_len: most tokens of a request, prompt included; None: the context of the model.
            settings: `key=value` words as on the command line, such as `engine.page_size=32`; they
                replace those of `preset=h100`, on a CPU of `preset=tiny`. For a large model begin
                with `preset=1.5b` or `preset=7b`.

        `params` of the session are `sampling.temperature` and the end tokens of the model, with
        `sampling.max_new_tokens`, at most half of `max_len`, as the limit.

        Raises:
            UserError: a model, drafter or setting that cannot be used.
        """
        options = drafter, train_drafter, device, seed, max_batch, max_len, settings
        session = cls(*build(model, tokenizer, *options))
        session._owned = True
        return session

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
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
        futures = self._submit(self._requests(prompts, params, samples), on_end)
        try:
            wait(futures)
        except BaseException:  # Ctrl-C
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, on_end: OnEnd | None = None
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
        (future,) = self._submit(self._requests([prompt], params, 1), on_end)
        return future

    def abort(self, ids: Iterable[int] | None = None) -> list[Response]:
        """Ends submitted requests that have not finished, those with these ids or all.

        Returns the responses so far, with the finish reason "abort"; their futures have them too.
        `replace(request, resume=response)` goes on, to the tokens of an uninterrupted request.
        `on_end` is then called again, if it had not answered.
        """
        try:
            wanted = None if ids is None else set(map(index, ids))
        except TypeError:
            raise UserError(f"abort: ids must be those of requests, got {shown(ids)}") from None
        with self._between_bursts():
            aborted = self._inbox.abort(
                lambda ticket: wanted is None or ticket.request.id in wanted, self.engine.remove
            )
        for ticket, response in aborted:  # a callback may use the session
            ticket.set_result(response)
        return [response for _, response in aborted]

    def save_drafter(self, folder: str) -> None:
        """Saves the drafter, for `drafter=` and in the EAGLE-3 layout of vLLM and SGLang.

        Raises UserError if there is no drafter, if the model has fewer than three layers, or if the
        folder has another model or cannot be written.
        """
        if self.spot is None or self.model is None:
            raise UserError(
                "session: there is no drafter to save; give from_pretrained a drafter or"
                " train_drafter=True"
            )
        if not folder:
            raise UserError(f"folder: must be a path, got {shown(folder)}")
        path, target = user_path(str(folder)), self.rollout.target
        with self._between_bursts(), storage_errors(path):
            self.spot.end_final_steps()
            self._final_steps = False
            state = self.spot.state_dict()
            drafter = state["drafter"]
            config = config_of_state(drafter, target.spec, self.model, target.dtype)
            write_drafter(path, drafter, config)
            (path / "state").mkdir(exist_ok=True)
            with replaced(path / "state" / "spot.pt") as file:
                torch.save(state, file)

    def decode(self, response: Response) -> str:
        """The text of a response, without special tokens."""
        if self.encode is None:
            raise UserError("session: there is no tokenizer; give one to from_pretrained")
        decode: Any = self.encode.tokenizer.decode
        return decode(response.token_ids, skip_special_tokens=True)

    def _requests(
        self, prompts: str | Request | Sequence[Prompt], params: SamplingParams | None, samples: int
    ) -> list[Request]:
        if not (isinstance(samples, Integral) and samples > 0):
            raise UserError(f"samples: must be at least 1, got {shown(samples)}")
        if not (params is None or isinstance(params, SamplingParams)):
            # `driver` and `tlt_ext.driver` are two packages, each with its own classes.
            home, other = SamplingParams.__module__, type(params).__module__
            got = f"{shown(params)} of {other}"
            raise UserError(f"params: must be SamplingParams of {home}, got {got}")
        listed = [prompts] if isinstance(prompts, (str, Request)) else prompts
        if not isinstance(listed, Iterable) or isinstance(listed, (Mapping, bytes)):
            raise UserError(f"session: prompts must be a list, got {shown(prompts)}")
        params = params or self.params
        if not params.stop_ids:
            params = replace(params, stop_ids=self.params.stop_ids)
        requests = []
        for prompt in listed:
            if isinstance(prompt, Request):
                made = [prompt]
            else:
                ids, number = self._ids(prompt), next(self._numbers)
                keys = [request_id("session", 0, str(number), i) for i in range(samples)]
                made = [Request(key, number, ids, params) for key in keys]
            self._check(made[:1])
            requests += made
        return requests

    def _ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.encode is None:
                raise UserError("session: a text needs a tokenizer; give one to from_pretrained")
            return self.encode(prompt)
        try:
            if isinstance(prompt, bytes):  # its items are integers
                raise TypeError
            return tuple(index(token) for token in prompt)
        except TypeError:
            raise UserError(
                f"session: a prompt must be a text, ids or a Request, got {shown(prompt)};"
                " generate takes a list of prompts"
            ) from None
