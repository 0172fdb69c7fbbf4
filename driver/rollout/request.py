"""Requests, their state while they run, and their responses."""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from operator import index
from typing import Any, Literal

import tlt_ext

from ..common.errors import UserError
from ..common.numbers import shown
from ..config.sections import check_temperature
from .pages import pages_for

Finish = Literal["stop", "length", "abort"]
FINISH: tuple[Finish | None, ...] = (None, "stop", "length")  # by the number that the ops write
# Tokens, log-probs, tokens of each pass, finish and status of a request in a burst.
Emitted = tuple[list[int], list[float], list[int], int, int]
MAX_STOP_IDS = 16  # of a request
MAX_INT32 = 2**31 - 1  # the ops read int32


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; a value that the engine cannot use raises a UserError.

    `top_k=0` and `top_p=1` disable the filters; `temperature=0` is argmax, others are at least
    0.01. `max_new_tokens` limits the response, the answers of tools included; `max_turn_tokens`
    limits what the model writes before each of them (0: no limit). Each of at most 16 `stop_ids`
    ends a response; a `Session` takes the model's end tokens if there are none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    max_turn_tokens: int = 0

    def __post_init__(self) -> None:
        for name, kind, what in _KINDS:
            try:
                value = kind(getattr(self, name))
            except (TypeError, ValueError):
                got = shown(getattr(self, name))
                raise UserError(f"{name}: must be {what}, got {got}") from None
            object.__setattr__(self, name, value)
        check_temperature("temperature", self.temperature)
        if not 0 <= self.top_k <= MAX_INT32:
            raise UserError(f"top_k: must be 0 (off) to {MAX_INT32}, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: must be above 0 and at most 1 (off), got {self.top_p}")
        if self.max_new_tokens < 0:
            raise UserError(f"max_new_tokens: must be 0 or more, got {self.max_new_tokens}")
        if self.max_turn_tokens < 0:
            raise UserError(f"max_turn_tokens: must be 0 (off) or more, got {self.max_turn_tokens}")
        if wrong := [stop for stop in self.stop_ids if not 0 <= stop <= MAX_INT32]:
            raise UserError(f"stop_ids: must be ids of tokens, got {wrong[0]}")


def _ids(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(index, values))


_KINDS: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    ("temperature", float, "a number"),
    ("top_k", index, "an integer"),
    ("top_p", float, "a number"),
    ("max_new_tokens", index, "an integer"),
    ("stop_ids", _ids, "a tuple of ids of tokens"),
    ("max_turn_tokens", index, "an integer"),
)


@dataclass(frozen=True)
class Request:
    """One response to generate."""

    id: int  # 62-bit key of its noise
    group: int  # identifies the prompt; siblings share it
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    # An aborted response to it, which is continued with the tokens of an uninterrupted one.
    resume: Response | None = field(default=None, compare=False, repr=False)

    def check(self, max_len: int, page_size: int, num_pages: int) -> None:
        """Raises UserError if the engine can never run the request."""
        for name, kind, what in _PARTS:
            if not isinstance(value := getattr(self, name), kind):
                got = type(value).__name__
                raise UserError(f"request {self.id}: {name} must be {what}, got a {got}")
        length, stops = len(self.prompt_ids), len(self.params.stop_ids)
        total = length + self.params.max_new_tokens
        if stops > MAX_STOP_IDS:
            raise UserError(f"request {self.id}: {stops} stop ids; at most {MAX_STOP_IDS}")
        if not -(2**63) <= self.id < 2**63:
            raise UserError(f"request {self.id}: the id must fit into 64 bits; hash it")
        if self.resume is not None:
            begun = self.resume.request
            if (begun.id, begun.prompt_ids) != (self.id, self.prompt_ids):
                raise UserError(
                    f"request {self.id}: resume is a response to request {begun.id} or to another"
                    " prompt; give the response to this request"
                )
            if self.resume.finish == "stop":
                raise UserError(
                    f"request {self.id}: resume has ended with a stop token; only one that was"
                    " aborted or cut can go on"
                )
            tokens, logprobs = len(self.resume.token_ids), len(self.resume.logprobs)
            if tokens != logprobs:
                raise UserError(
                    f"request {self.id}: resume has {tokens} tokens and {logprobs} log-probs; each"
                    " token needs one"
                )
            if beyond := [s for s in self.resume.tools if not 0 <= s[0] <= s[1] <= tokens]:
                raise UserError(
                    f"request {self.id}: resume has {tokens} tokens, and a tool wrote {beyond[0]};"
                    " cut its ranges too"
                )
        if length == 0:
            raise UserError(f"request {self.id}: the prompt is empty; it needs one token")
        if length >= max_len or total > max_len:
            room = max_len - length
            fit = f"at most {room} new tokens fit; lower it" if room > 0 else "shorten the prompt"
            raise UserError(
                f"prompt of {length} tokens and max_new_tokens={self.params.max_new_tokens}"
                f" exceed the {max_len} of a request; {fit}, raise engine.max_len (max_len of a"
                " Session), or use a model with a longer context"
            )
        needed = pages_for(total, page_size) + 1  # its copy of a shared partial page
        if needed > num_pages:
            raise UserError(
                f"engine.num_pages={num_pages}: one request of {total} tokens needs"
                f" {needed} pages of {page_size}; raise it, or set 0 for the default size"
            )


@dataclass(frozen=True)
class Response:
    """The tokens of one request."""

    request: Request
    token_ids: list[int]  # after the prompt, a sampled end token included; nothing is appended
    logprobs: list[float]  # the target's, of `log_softmax(logits / T)`; 0 at tokens of tools
    finish: Finish  # "abort": it can be resumed (`Request.resume`)
    version: int = 0  # of the policy, at the last token
    drafter_versions: list[int] = field(default_factory=list)  # that drafted for it, in order
    tools: list[tuple[int, int]] = field(default_factory=list)  # ranges that tools wrote
    turn_ended: bool = False  # it was aborted while a tool worked
    # Mean tokens of its speculative passes since it was last resumed; None without any.
    accept_length: float | None = field(default=None, compare=False)

    @property
    def checksum(self) -> int:
        """CRC-32 of the tokens as int32 and the log-probs as float32."""
        return zlib.crc32(array("f", self.logprobs), zlib.crc32(array("i", self.token_ids)))

    @property
    def turns(self) -> int:
        return 1 + len(self.tools)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - sum(end - begin for begin, end in self.tools)

    @property
    def generated(self) -> list[bool]:
        """Of each token, whether the model generated it (not a tool)."""
        mask = [True] * len(self.token_ids)
        for begin, end in self.tools:
            mask[begin:end] = [False] * (end - begin)
        return mask


_PARTS: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("id", Integral, "an integer"),
    ("prompt_ids", tuple, "a tuple of ints"),
    ("params", SamplingParams, "SamplingParams"),
    ("resume", (Response, type(None)), "a response"),
)


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
    tools: list[tuple[int, int]] = field(default_factory=list)  # ranges of `new_tokens`
    spec_passes: int = 0
    spec_tokens: int = 0  # emitted in them

    @staticmethod
    def begin(request: Request) -> RunningRequest:
        state, done = RunningRequest(request, list(request.prompt_ids)), request.resume
        if done is not None:
            state.request = replace(request, resume=None)
            state.tokens += done.token_ids
            state.logprobs += done.logprobs
            state.drafter_versions += done.drafter_versions
            state.tools += done.tools
            if done.turn_ended:
                state.finish = "stop"
        if state.finish is None and state.remaining <= 0:
            state.finish = "length"
        return state

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt, those of tools included."""
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def turn(self) -> int:
        return len(self.tools)

    @property
    def turn_begin(self) -> int:
        """Index of the first token of the turn among the new tokens."""
        return self.tools[-1][1] if self.tools else 0

    @property
    def turn_tokens(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) + self.turn_begin :]

    @property
    def room(self) -> int:
        """Tokens that may still follow, those of tools included."""
        return self.request.params.max_new_tokens - self.num_emitted

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit in this turn."""
        most = self.request.params.max_turn_tokens
        if most == 0:
            return self.room
        return min(self.room, most - self.num_emitted + self.turn_begin)

    @property
    def num_new(self) -> int:
        """Committed entries that the drafter has yet to write; the last one is always written."""
        return self.context_len - max(0, min(self.draft_len, self.context_len - 1))

    def append(self, emitted: Emitted, speculative: bool, version: int) -> None:
        """Adds the tokens of a burst; `version` is of the drafter, 0 = it drafted nothing."""
        tokens, logprobs, counts, finish, status = emitted
        self.status |= status
        if counts[-1] == 0:  # only damaged pages or lengths cause this; it would never finish
            raise RuntimeError(
                f"request {self.request.id} emitted nothing in a pass: {tlt_ext.Status(status)!r}"
            )
        self.tokens += tokens
        self.logprobs += logprobs
        self.context_len += len(tokens)
        self.finish = FINISH[finish]
        if version:  # the drafter has yet to write the entries of the last pass
            self.draft_len = self.context_len - counts[-1]
            if self.drafter_versions[-1:] != [version]:
                self.drafter_versions.append(version)
        if speculative:
            self.spec_passes += len(counts)
            self.spec_tokens += len(tokens)

    def answer(self, tokens: Sequence[int]) -> None:
        """Appends the answer of a tool as far as there is room; the next turn follows."""
        begin, taken = self.num_emitted, list(tokens[: self.room])
        self.tokens += taken
        self.logprobs += [0.0] * len(taken)
        self.tools.append((begin, begin + len(taken)))
        self.finish = None if self.room else "length"

    def response(self, version: int, aborted: bool = False) -> Response:
        """The response, once it has finished or is aborted; `version` is of the policy.

        It shares the lists of this state, which changes no more.
        """
        finish: Finish | None = "abort" if aborted else self.finish
        assert finish is not None
        return Response(
            self.request,
            self.new_tokens,
            self.logprobs,
            finish,
            version,
            self.drafter_versions,
            self.tools,
            aborted and self.finish == "stop",
            self.spec_tokens / self.spec_passes if self.spec_passes else None,
        )


def request_id(
    phase: Literal["train", "eval", "session"],
    step: int,
    prompt_id: str,
    sample: int,
    refill: int = 0,
) -> int:
    """Hashes the identity of a request to 62 bits; independent of rank, slot, order and resume.

    `phase` is "session" for prompts without an id. `prompt_id` is unique in its split, `sample` the
    index among the siblings of a prompt, `refill` the round of dynamic sampling.
    """
    # JSON separates the fields: ("p1", 12) and ("p11", 2) must not give the same key.
    key = json.dumps([phase, step, prompt_id, sample, refill]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 2
