"""Requests, their state while they run, and their responses."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

import tlt_ext

from ..common.errors import UserError
from ..config.sections import check_temperature
from ..config.strategy import Strategy
from .pages import pages_for

Finish = Literal["stop", "length"]
FINISH: tuple[Finish | None, ...] = (None, "stop", "length")  # by the number that the ops write


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    `top_k=0` and `top_p=1` disable the filters; `temperature=0` is argmax.

    Raises:
        UserError: a temperature that is neither 0 nor at least `MIN_TEMPERATURE`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_temperature("temperature", self.temperature)


@dataclass(frozen=True)
class Request:
    """One response to generate.

    Attributes:
        id: 62-bit key of its noise.
        group: identifies the prompt; siblings share it.
    """

    id: int
    group: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams

    def check(self, max_position: int, page_size: int, num_pages: int) -> None:
        """Raises UserError if the context or the page pool is too small for the request."""
        length = len(self.prompt_ids)
        total = length + self.params.max_new_tokens
        if length == 0:
            raise UserError(f"request {self.id}: the prompt is empty; it needs one token")
        if length >= max_position:
            raise UserError(
                f"prompt of {length} tokens does not fit the context of {max_position};"
                " shorten it or use a model with a longer one"
            )
        if total > max_position:
            raise UserError(
                f"prompt of {length} tokens and sampling.max_new_tokens="
                f"{self.params.max_new_tokens} exceed the context of {max_position};"
                f" at most {max_position - length} new tokens fit"
            )
        needed = pages_for(total, page_size) + 1  # its copy of a shared partial page
        if needed > num_pages:
            raise UserError(
                f"engine.num_pages={num_pages}: one request of {total} tokens needs"
                f" {needed} pages of {page_size}"
            )


@dataclass(frozen=True)
class Response:
    """The tokens of one request.

    Attributes:
        token_ids: emitted tokens. A sampled end token is the last one; nothing is appended at the
            length limit.
        logprobs: the target's at each token, of `log_softmax(logits / T)`.
        target_version: of the policy.
        drafter_versions: learned drafters that drafted for it, in order of use.
        tools: half-open ranges of `token_ids` that a tool wrote, in order; their log-probs are 0.
    """

    request: Request
    token_ids: list[int]
    logprobs: list[float]
    finish: Finish
    target_version: int = 0
    drafter_versions: list[int] = field(default_factory=list)
    tools: list[tuple[int, int]] = field(default_factory=list)

    @property
    def generated(self) -> list[bool]:
        """For each token, True if the model generated it and False if a tool wrote it."""
        mask = [True] * len(self.token_ids)
        for begin, end in self.tools:
            mask[begin:end] = [False] * (end - begin)
        return mask

    @property
    def num_generated(self) -> int:
        """Tokens that the model generated."""
        return len(self.token_ids) - sum(end - begin for begin, end in self.tools)

    @property
    def turns(self) -> int:
        """Turns of the model."""
        return len(self.tools) + 1


@dataclass(eq=False)
class RunningRequest:
    """State of one request between passes; only the scheduler writes it.

    The KV of the last token is never committed: that token is the root of the next pass. So a new
    request commits its prompt except the last token, and its first pass samples its first token.
    """

    request: Request
    tokens: list[int]  # prompt and emitted
    logprobs: list[float] = field(default_factory=list)
    drafter_versions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    context_len: int = 0  # committed KV entries of the target
    draft_len: int = 0  # committed KV entries of the drafter
    draft_version: int = 0  # of the drafter that wrote them
    finish: Finish | None = None
    status: int = 0  # status bits that the ops set
    tools: list[tuple[int, int]] = field(default_factory=list)  # as in `Response`

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def new_tokens(self) -> list[int]:
        """The emitted tokens."""
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def turn(self) -> int:
        """Number of the model's turn, from 0."""
        return len(self.tools)

    @property
    def turn_tokens(self) -> list[int]:
        """The tokens of the model's turn."""
        return self.new_tokens[self.tools[-1][1] if self.tools else 0 :]

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit."""
        return self.request.params.max_new_tokens - self.num_emitted

    @property
    def num_new(self) -> int:
        """Committed entries that the drafter has yet to write; the last one is always written."""
        return self.context_len - max(0, min(self.draft_len, self.context_len - 1))

    def append(
        self,
        tokens: list[int],
        logprobs: list[float],
        counts: list[int],
        finish: int,
        status: int,
        strategy: Strategy,
        version: int,
    ) -> None:
        """Adds what a burst emitted: `counts` tokens in its passes, and their finish and status.

        Raises:
            RuntimeError: a pass emitted nothing.
        """
        self.status |= status
        if counts[-1] == 0:  # only damaged pages or lengths cause this; it would never finish
            raise RuntimeError(
                f"request {self.request.id} emitted nothing in a pass: {tlt_ext.Status(status)!r}"
            )
        self.tokens += tokens
        self.logprobs += logprobs
        self.context_len += len(tokens)
        self.finish = FINISH[finish]
        if strategy.needs_drafter:  # it has yet to write the entries of the last pass
            self.draft_len = self.context_len - counts[-1]
        if version and self.drafter_versions[-1:] != [version]:
            self.drafter_versions.append(version)

    def response(self, target_version: int) -> Response:
        """The response, once it has finished."""
        assert self.finish is not None
        return Response(
            self.request,
            self.new_tokens,
            self.logprobs,
            self.finish,
            target_version,
            self.drafter_versions,
            self.tools,
        )


def request_id(
    phase: Literal["train", "eval"], step: int, prompt_id: str, sample: int, refill: int = 0
) -> int:
    """Hashes the identity of a request to 62 bits; independent of rank, slot, order and resume.

    Args:
        phase: "train" or "eval".
        step: training step of the request.
        prompt_id: id of the prompt, unique in its split.
        sample: index among the siblings of one prompt.
        refill: round of dynamic sampling, 0 for the first draw.

    Returns:
        An integer in [0, 2**62).

    Example:
        >>> request_id("train", 0, "p0", 0) == request_id("train", 0, "p0", 0)
        True
        >>> request_id("train", 0, "p0", 0) == request_id("train", 0, "p0", 1)
        False
    """
    # JSON separates the fields: ("p1", 12) and ("p11", 2) must not give the same key.
    key = json.dumps([phase, step, prompt_id, sample, refill]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 2
