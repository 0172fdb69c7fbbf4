"""The nouns that enter and leave the rollout engine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    `top_k=0` and `top_p=1` switch the filters off, `temperature=0` is argmax.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One response to generate; `id` is the 62-bit key of its noise, `group` names its siblings."""

    id: int
    group: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Response:
    """What the engine emitted for one request.

    `token_ids` holds the sampled end token when there was one and nothing after it; at the length
    limit nothing is appended. `logprobs` are the target's, of `log_softmax(logits / T)`, one per
    token. `drafter_versions` are the versions of the drafter that served it, in order of use, and
    empty when none did.
    """

    request: Request
    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]
    target_version: int = 0
    drafter_versions: list[int] = field(default_factory=list)


def request_id(
    phase: Literal["train", "eval"], step: int, prompt_id: str, sample: int, refill: int = 0
) -> int:
    """Hash what a request is into 62 bits, so that its noise outlives rank, slot, order and resume.

    Args:
        phase: "train" or "eval".
        step: training step that asks for it.
        prompt_id: the prompt's id, unique in its split.
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
    # JSON keeps the fields apart: ("p1", 12) and ("p11", 2) must not meet in one string.
    key = json.dumps([phase, step, prompt_id, sample, refill]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 2
