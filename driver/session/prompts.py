"""Makes requests of prompts, and checks requests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from operator import index
from typing import Any

from ..common.errors import UserError
from ..common.numbers import shown
from ..model.kv_cache import KvCache
from ..model.prompts import PromptEncoder
from ..model.spec import ModelSpec
from ..rollout.request import Request, Response, SamplingParams, request_id
from .inbox import check_ids

Prompt = str | Sequence[int] | Request


class Prompts:
    """Makes requests of texts and token ids; request ids follow from the order of the calls.

    Args:
        encode: of texts; None: there is no tokenizer.
        params: of prompts without their own.
        spec, cache: of the engine, which limit a request.
    """

    def __init__(
        self, encode: PromptEncoder | None, params: SamplingParams, spec: ModelSpec, cache: KvCache
    ) -> None:
        self.encode, self.params, self.spec, self.cache = encode, params, spec, cache
        self._lock, self._count = threading.Lock(), 0

    def requests(
        self,
        prompts: str | Request | Sequence[Prompt],
        params: SamplingParams | None,
        samples: int,
    ) -> list[Request]:
        """The requests of all prompts, see `Session.generate`.

        Raises:
            UserError: a prompt that cannot be used, or a request that can never run.
        """
        if not (isinstance(samples, Integral) and samples > 0):
            raise UserError(f"samples: must be at least 1, got {shown(samples)}")
        if not (params is None or isinstance(params, SamplingParams)):
            raise UserError(f"params: must be SamplingParams, got {shown(params)}")
        listed = [prompts] if isinstance(prompts, (str, Request)) else prompts
        if not isinstance(listed, Iterable) or isinstance(listed, (Mapping, bytes)):
            raise UserError(f"session: prompts must be a list, got {shown(prompts)}")
        return [r for prompt in listed for r in self._requests(prompt, params, samples)]

    def decode(self, response: Response) -> str:
        """The text of a response, without special tokens."""
        if self.encode is None:
            raise UserError("session: there is no tokenizer; give one to from_pretrained")
        decode: Any = self.encode.tokenizer.decode
        return decode(response.token_ids, skip_special_tokens=True)

    def _requests(
        self, prompt: Prompt, params: SamplingParams | None, samples: int
    ) -> list[Request]:
        if isinstance(prompt, Request):
            check_requests([prompt], self.spec, self.cache)
            return [prompt]
        ids = self._ids(prompt)
        params = params or self.params
        if not params.stop_ids:
            params = replace(params, stop_ids=self.params.stop_ids)
        with self._lock:
            number, self._count = self._count, self._count + 1
        keys = [request_id("session", 0, str(number), sample) for sample in range(samples)]
        requests = [Request(key, number, ids, params) for key in keys]
        check_requests(requests[:1], self.spec, self.cache)
        return requests

    def _ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.encode is None:
                raise UserError("session: a text needs a tokenizer; give one to from_pretrained")
            return self.encode(prompt)
        try:
            return tuple(index(token) for token in prompt)
        except TypeError:
            raise UserError(
                f"session: a prompt must be a text, ids or a Request, got {shown(prompt)};"
                " generate takes a list of prompts"
            ) from None


def check_requests(requests: Sequence[Request], spec: ModelSpec, cache: KvCache) -> None:
    """Raises UserError if a request can never run."""
    checked: set[tuple[int, ...]] = set()
    for request in requests:
        if not isinstance(request, Request):
            raise UserError(f"session: expected a Request, got {shown(request)}")
        request.check(spec.max_position, cache.page_size, cache.num_pages)
        if request.prompt_ids not in checked:  # siblings share it
            check_ids(f"request {request.id}", request.prompt_ids, spec.vocab_size)
            checked.add(request.prompt_ids)
