"""Calls of the two verify ops on small batches, for their tests."""

import math
from types import SimpleNamespace

import torch

import tlt_ext
from tests import grouping, kit

MILLION = 1_000_000
WIDTH = 17
TARGET = torch.tensor([0.4, 0.3, 0.2, 0.1])
REVERSED = TARGET.flip(0)
RUNNING, STOP, LIMIT = 0, 1, 2  # finish words


def as_row(value, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(value, dtype=dtype).expand(size).contiguous()


def int32(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def call(
    op,
    logits,
    tokens,
    parents,
    row_start,
    *,
    position=0,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    request=None,
    stop_ids=(),
    limit=WIDTH,
    width=WIDTH,
    draft_probs=None,
    seed=0,
    **options,
):
    """Runs an op on requests whose outputs start as -7 or NaN.

    On a GPU verify_tree runs with a workspace and without, and both must agree.
    """
    requests, rows = len(row_start) - 1, logits.shape[0]
    stop = int32(stop_ids)
    arrays = {
        "logits": logits,
        "tokens": int32(tokens),
        "parents": int32(parents),
        "position": as_row(position, rows, torch.int32),
        "row_start": int32(row_start),
        "temperature": as_row(temperature, requests, torch.float32),
        "top_k": as_row(top_k, requests, torch.int32),
        "top_p": as_row(top_p, requests, torch.float32),
        "request": torch.arange(requests) if request is None else torch.as_tensor(request),
        "stop_ids": stop if stop.ndim == 2 else stop.expand(requests, len(stop)).contiguous(),
        "limit": as_row(limit, requests, torch.int32),
    }
    if op is tlt_ext.verify_rejection:
        arrays["draft_probs"] = draft_probs
    arrays = {name: kit.to_device(array) for name, array in arrays.items()}
    filtered = options.pop("filtered_logprobs", None)

    def run(**more):
        out = {
            "emitted": torch.full((requests, width), -7, dtype=torch.int32),
            "logprobs": torch.full((requests, width), math.nan),
            "num_emitted": torch.full((requests,), -7, dtype=torch.int32),
            "path": torch.full((requests, width), -7, dtype=torch.int32),
            "finish": torch.full((requests,), -7, dtype=torch.int32),
            "status": torch.zeros(requests, dtype=torch.int32),
        }
        if filtered is not None:
            out["filtered_logprobs"] = filtered.clone()
        out = {name: kit.to_device(array) for name, array in out.items()}
        grouping.call(op, seed=seed, **arrays, **out, **options, **more)
        return kit.to_cpu(out)

    if op is tlt_ext.verify_tree:
        out = run(workspace=kit.workspace(rows))
        if kit.DEVICE == "cuda":
            alone = run()
            assert all(kit.same_bits(out[name], alone[name]) for name in out)
    else:
        out = run()
    if filtered is not None:
        filtered.copy_(out["filtered_logprobs"])
    return SimpleNamespace(**out)


def emitted_lists(out) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(out.emitted, out.num_emitted.tolist(), strict=True)]


def tree(*arguments, **options):
    return call(tlt_ext.verify_tree, *arguments, **options)


def rejection(*arguments, **options):
    return call(tlt_ext.verify_rejection, *arguments, **options)


def valid(rows=6, requests=2, vocab=10):
    def ints(*shape):
        return torch.zeros(*shape, dtype=torch.int32)

    return {
        "logits": torch.zeros(rows, vocab),
        "tokens": ints(rows),
        "parents": ints(rows),
        "position": ints(rows),
        "row_start": ints(requests + 1),
        "temperature": torch.ones(requests),
        "top_k": ints(requests),
        "top_p": torch.ones(requests),
        "request": torch.zeros(requests, dtype=torch.int64),
        "stop_ids": ints(requests, 2),
        "limit": ints(requests),
        "emitted": ints(requests, WIDTH),
        "logprobs": torch.zeros(requests, WIDTH),
        "num_emitted": ints(requests),
        "path": ints(requests, WIDTH),
        "finish": ints(requests),
        "status": ints(requests),
    }
