"""Causal attention of packed documents on a GPU and its gradients, in Triton.

A block owns a tile of rows of one document: of queries for the output and their gradient, of keys
for the gradients of keys and values. It loops over the keys, or the queries, of the document in a
fixed order, without atomic additions in memory. So results are deterministic and do not depend on
the other documents of a row. Heads share keys and values without copies, and the tiles of a long
document run in parallel. Scores are computed twice in the backward pass.

Shapes: T tokens, H query heads that share K key heads, D values of a head, a power of 2. Kernels
read rows of one head and document at a pointer: a row is H * D or K * D values after the one
before. `tiles` is of `driver.policy.packing.tiles_of`.

Source: FlashAttention-2 (Dao, 2023).
"""

# mypy: allow-untyped-defs

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .packing import TILE

# Rows of the other side in a step, warps of a block, steps in flight. More rows than these do not
# fit into the registers.
Plan = tuple[int, int, int]
FORWARD: Plan = (64, 4, 3)
QUERIES: Plan = (64, 4, 2)
KEYS: tuple[Plan, Plan] = (32, 4, 3), (32, 4, 2)  # heads of up to 64 values, larger ones
LN2: tl.constexpr = tl.constexpr(math.log(2))


def packed_attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float) -> Tensor:
    """Attention of q [T, H, D] to k and v [T, K, D] in half precision, [T, H, D]."""
    return _PackedAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), tiles, scale)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float) -> Tensor:
        out, norms = torch.empty_like(q), q.new_empty(q.shape[1::-1], dtype=torch.float32)
        _launch(_forward, FORWARD, q.shape[1], (q, k, v, out, norms), tiles, scale)
        ctx.save_for_backward(q, k, v, tiles, out, norms)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, tiles, out, norms = ctx.saved_tensors
        dq, dk, dv, sums = (torch.empty_like(x) for x in (q, k, v, norms))
        read = (q, k, v, grad.contiguous(), norms, sums)
        _launch(_query_gradient, QUERIES, q.shape[1], (*read, out, dq), tiles, ctx.scale)
        _launch(_key_gradient, KEYS[q.shape[2] > 64], k.shape[1], (*read, dk, dv), tiles, ctx.scale)
        return dq, dk, dv, None, None


def _launch(
    kernel: Any, plan: Plan, heads: int, tensors: tuple[Tensor, ...], tiles: Tensor, scale: float
) -> None:
    tokens, num_heads, size = tensors[0].shape
    sizes = {"H": num_heads, "K": tensors[1].shape[1], "D": size, "M": TILE, "N": plan[0]}
    options = {"num_warps": plan[1], "num_stages": plan[2]}
    with torch.cuda.device_of(tiles):
        kernel[(len(tiles) * heads,)](
            *tensors, tiles, tokens, scale / math.log(2), **sizes, **options
        )


@triton.jit
def _load(at, rows, length, WIDTH: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """Rows of a head, [rows, D]; 0 behind the end of the document unless all are in it."""
    at += rows[:, None] * WIDTH + tl.arange(0, D)[None, :]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(rows < length)[:, None], other=0.0)


@triton.jit
def _store(at, rows, length, values, WIDTH: tl.constexpr, D: tl.constexpr):
    at += rows[:, None] * WIDTH + tl.arange(0, D)[None, :]
    tl.store(at, values.to(at.dtype.element_ty), mask=(rows < length)[:, None])


@triton.jit
def _tile(tiles, HEADS: tl.constexpr):
    """This block's head, and the begin and length of its document and the tile in it."""
    at = tiles + 3 * (tl.program_id(0) // HEADS)
    return tl.program_id(0) % HEADS, tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _attend(
    out, total, top, query, k, v, rows, low, high, length, scale,
    WIDTH: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BELOW: tl.constexpr,
):  # fmt: skip
    """Adds keys low to high to the softmax; BELOW: all of them come before all queries."""
    for start in range(low, high, N):
        cols = start + tl.arange(0, N)
        keys = _load(k, cols, length, WIDTH, D, BELOW)
        values = _load(v, cols, length, WIDTH, D, BELOW)
        scores = tl.dot(query, tl.trans(keys))
        if not BELOW:
            scores = tl.where(cols[None, :] <= rows[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(values.dtype), values, out * shrink[:, None])
        top = higher
    return out, total, top


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    q, k, v, out, norms, tiles, tokens, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    head, begin, length, tile = _tile(tiles, H)
    first = tile * M
    rows = first + tl.arange(0, M)
    own = begin * (H * D) + head * D
    shared = begin * (K * D) + head // (H // K) * D
    query = _load(q + own, rows, length, H * D, D, False)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    result = tl.zeros([M, D], tl.float32)
    result, total, top = _attend(
        result, total, top, query, k + shared, v + shared, rows, 0, first, length, scale,
        K * D, D, N, True,
    )  # fmt: skip
    result, total, top = _attend(
        result, total, top, query, k + shared, v + shared, rows, first,
        tl.minimum(first + M, length), length, scale, K * D, D, N, False,
    )  # fmt: skip
    _store(out + own, rows, length, result / total[:, None], H * D, D)
    tl.store(norms + head * tokens + begin + rows, top + tl.log2(total), mask=rows < length)


@triton.jit
def _add_query_gradient(
    total, query, grad, norm, sums, k, v, rows, low, high, length, scale,
    WIDTH: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BELOW: tl.constexpr,
):  # fmt: skip
    for start in range(low, high, N):
        cols = start + tl.arange(0, N)
        keys = _load(k, cols, length, WIDTH, D, BELOW)
        values = _load(v, cols, length, WIDTH, D, BELOW)
        p = tl.exp2(tl.dot(query, tl.trans(keys)) * scale - norm[:, None])
        if not BELOW:
            p = tl.where(cols[None, :] <= rows[:, None], p, 0.0)
        slope = p * (tl.dot(grad, tl.trans(values)) - sums[:, None])
        total = tl.dot(slope.to(keys.dtype), keys, total)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _query_gradient(
    q, k, v, do, norms, sums, out, dq, tiles, tokens, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    head, begin, length, tile = _tile(tiles, H)
    first = tile * M
    rows = first + tl.arange(0, M)
    own = begin * (H * D) + head * D
    shared = begin * (K * D) + head // (H // K) * D
    query = _load(q + own, rows, length, H * D, D, False)
    grad = _load(do + own, rows, length, H * D, D, False)
    result = _load(out + own, rows, length, H * D, D, False)
    row = head * tokens + begin + rows
    norm = tl.load(norms + row, mask=rows < length, other=0.0)
    products = tl.sum(result.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(sums + row, products, mask=rows < length)
    total = tl.zeros([M, D], tl.float32)
    total = _add_query_gradient(
        total, query, grad, norm, products, k + shared, v + shared, rows, 0, first, length, scale,
        K * D, D, N, True,
    )  # fmt: skip
    total = _add_query_gradient(
        total, query, grad, norm, products, k + shared, v + shared, rows, first,
        tl.minimum(first + M, length), length, scale, K * D, D, N, False,
    )  # fmt: skip
    _store(dq + own, rows, length, total * (scale * LN2), H * D, D)


@triton.jit
def _add_key_gradients(
    dk, dv, keys, values, q, do, norms, sums, cols, low, high, length, scale,
    WIDTH: tl.constexpr, D: tl.constexpr, N: tl.constexpr, ABOVE: tl.constexpr,
):  # fmt: skip
    """Adds queries low to high; ABOVE: all of them come after all keys."""
    for start in range(low, high, N):
        rows = start + tl.arange(0, N)
        query = _load(q, rows, length, WIDTH, D, False)
        grad = _load(do, rows, length, WIDTH, D, False)
        norm = tl.load(norms + rows, mask=rows < length, other=0.0)
        products = tl.load(sums + rows, mask=rows < length, other=0.0)
        p = tl.exp2(tl.dot(keys, tl.trans(query)) * scale - norm[None, :])
        if not ABOVE:
            p = tl.where(cols[:, None] <= rows[None, :], p, 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        slope = p * (tl.dot(values, tl.trans(grad)) - products[None, :])
        dk = tl.dot(slope.to(query.dtype), query, dk)
    return dk, dv


@triton.jit(do_not_specialize=["tokens"])
def _key_gradient(
    q, k, v, do, norms, sums, dk, dv, tiles, tokens, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    shared, begin, length, tile = _tile(tiles, K)
    # The table begins with the last tiles, and the first keys have the most queries.
    first = (tl.cdiv(length, M) - 1 - tile) * M
    cols = first + tl.arange(0, M)
    at = begin * (K * D) + shared * D
    keys = _load(k + at, cols, length, K * D, D, False)
    values = _load(v + at, cols, length, K * D, D, False)
    key_total = tl.zeros([M, D], tl.float32)
    value_total = tl.zeros([M, D], tl.float32)
    for head in range(shared * (H // K), (shared + 1) * (H // K)):
        own = begin * (H * D) + head * D
        row = head * tokens + begin
        key_total, value_total = _add_key_gradients(
            key_total, value_total, keys, values, q + own, do + own, norms + row, sums + row, cols,
            first, tl.minimum(first + M, length), length, scale, H * D, D, N, False,
        )  # fmt: skip
        key_total, value_total = _add_key_gradients(
            key_total, value_total, keys, values, q + own, do + own, norms + row, sums + row, cols,
            first + M, length, length, scale, H * D, D, N, True,
        )  # fmt: skip
    _store(dk + at, cols, length, key_total * (scale * LN2), K * D, D)
    _store(dv + at, cols, length, value_total, K * D, D)
