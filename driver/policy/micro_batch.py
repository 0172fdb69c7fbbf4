"""A packed row of prompts and responses with the inputs of the policy loss at sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rollout.request import Response
from .packed_forward import Documents


@dataclass(frozen=True)
class MicroBatch:
    """Packed documents of one pass, T tokens, and the inputs of the loss at M sampled tokens."""

    input_ids: Tensor  # int64 [1, T]
    documents: Documents
    rows: Tensor  # int64 [M], the position before each sampled token
    tokens: Tensor  # int64 [M]
    owner: Tensor  # int64 [M], index of the response in the step
    temperature: float  # of all tokens
    rollout_logprobs: Tensor  # float32 [M]
    old_logprobs: Tensor | None = None  # float32 [M]
    entropy: Tensor | None = None  # float32 [M], of the step-start policy
    ref_logprobs: Tensor | None = None  # float32 [M]

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on another device; copies to a GPU are asynchronous."""
        return _moved(self, device)


def build_micro_batch(
    responses: Sequence[Response], owners: Sequence[int], device: torch.device | str
) -> MicroBatch:
    """Pack prompts and responses; the loss reads each sampled token and no token of a tool.

    `owners` are the indices of the responses to pack, in this order.
    """
    packed = [responses[index] for index in owners]
    prompts = np.array([len(r.request.prompt_ids) for r in packed])  # [D]
    counts = np.array([len(r.token_ids) for r in packed])  # [D]
    # The hidden state at j - 1 predicts the token at j. The tokens before a response are earlier
    # responses, which the count of rows includes, and the prompts up to its own.
    rows = np.arange(counts.sum()) + (prompts.cumsum() - 1).repeat(counts)
    ids = _flat([part for r in packed for part in (r.request.prompt_ids, r.token_ids)], np.int64)
    owner = np.repeat(owners, counts)
    logprobs = _flat([r.logprobs for r in packed], np.float32)
    if any(r.tools for r in packed):
        generated = _flat([r.generated for r in packed], np.bool_)
        rows, owner, logprobs = rows[generated], owner[generated], logprobs[generated]
    return MicroBatch(
        input_ids=torch.from_numpy(ids).unsqueeze(0),  # [1, T]
        documents=Documents.of([len(r.request.prompt_ids) + len(r.token_ids) for r in packed]),
        rows=torch.from_numpy(rows),
        tokens=torch.from_numpy(ids[rows + 1]),
        owner=torch.from_numpy(owner),
        temperature=packed[0].request.params.temperature,
        rollout_logprobs=torch.from_numpy(logprobs),
    ).to(torch.device(device))


def without_responses(device: torch.device) -> MicroBatch:
    """One token and no response: all gradients are zero, no metric changes."""
    none = torch.empty(0, dtype=torch.int64)  # [0]
    return MicroBatch(
        input_ids=torch.zeros(1, 1, dtype=torch.int64),
        documents=Documents.of([1]),
        rows=none,
        tokens=none,
        owner=none,
        temperature=1.0,
        rollout_logprobs=torch.empty(0),
    ).to(device)


def _flat(parts: Sequence[Sequence[float]], dtype: type[np.generic]) -> Any:
    """The numbers of all parts as an array; NumPy reads a list ten times as fast as torch."""
    return np.fromiter(chain.from_iterable(parts), dtype, sum(map(len, parts)))


def _moved(value: Any, device: torch.device) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: _moved(getattr(value, f.name), device) for f in fields(value)}
        )
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu" and device.type == "cuda":
        # Otherwise the copy waits for all work queued on the GPU. NumPy copies in this thread;
        # torch would wait for threads that may have no core.
        pinned = torch.empty_like(value, pin_memory=True)
        pinned.numpy()[...] = value.numpy()
        value = pinned
    return value.to(device, non_blocking=True)
