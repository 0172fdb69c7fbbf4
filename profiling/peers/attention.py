"""Attention of other libraries on the cases of `profiling.benches.attention`.

Each function returns a call for each of `count` inputs of one shape. Masks, plans and gathered keys
are made before and not timed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Calls = list[Callable[[], object]]
DEVICE = "cuda"
PLAN_BYTES = 256 << 20


def tree_of(rows: int) -> tuple[Tensor, Tensor]:
    """Depths and ancestors of a tree with four children a node, in breadth-first order."""
    paths: list[list[int]] = [[]]
    for node in range(1, rows):
        parent = (node - 1) // 4
        paths.append([*paths[parent], parent])
    ancestors = torch.zeros(rows, 16, dtype=torch.uint8)
    for node, path in enumerate(paths):
        ancestors[node, : len(path)] = torch.tensor(path)
    return torch.tensor([len(path) for path in paths], dtype=torch.int32), ancestors


def in_flight_mask(rows: int, tree: bool) -> Tensor:
    """bool [rows, rows]: row i attends to row j."""
    if not tree:
        return torch.ones(rows, rows, dtype=torch.bool, device=DEVICE).tril()
    mask = torch.eye(rows, dtype=torch.bool)
    depths, ancestors = tree_of(rows)
    for row in range(rows):
        mask[row, ancestors[row, : int(depths[row])].long()] = True
    return mask.to(DEVICE)


def dense_inputs(shape: tuple[int, int, int], batch: int, rows: int, length: int) -> list:
    """q, k, v of one call with gathered keys, [batch, heads, rows or length, dim]."""
    heads, kv_heads, dim = shape
    shapes = [(heads, rows), (kv_heads, length), (kv_heads, length)]
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    return [torch.randn(batch, *shape, dim, **bf16) for shape in shapes]


def sdpa(
    shape: tuple[int, int, int], batch: int, kv: int, rows: int, tree: bool, count: int
) -> Calls:
    """torch's attention on gathered keys, with a boolean mask for more than one row."""
    mask = None
    if rows > 1:
        mask = torch.ones(rows, kv + rows, dtype=torch.bool, device=DEVICE)
        mask[:, kv:] = in_flight_mask(rows, tree)
        mask = mask[None, None].expand(batch, 1, -1, -1)
    call = partial(scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
    return [partial(call, *dense_inputs(shape, batch, rows, kv + rows)) for _ in range(count)]


def flex(
    shape: tuple[int, int, int], batch: int, kv: int, rows: int, tree: bool, count: int
) -> Calls:
    """FlexAttention on gathered keys, compiled for the case."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    allowed, length = in_flight_mask(rows, tree), kv + rows

    def attends(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key < kv) | allowed[row, (key - kv).clamp(min=0)]

    mask = create_block_mask(attends, None, None, rows, length, device=DEVICE)
    attend = torch.compile(flex_attention, dynamic=False)
    call = partial(attend, block_mask=mask, enable_gqa=True)
    return [partial(call, *dense_inputs(shape, batch, rows, length)) for _ in range(count)]


def flashinfer(
    shape: tuple[int, int, int], kv: int, rows: int, tree: bool, inputs: list[dict]
) -> Calls:
    """FlashInfer on our pages: causal for a chain, with a custom mask for a tree."""
    import flashinfer as library

    heads, kv_heads, dim = shape
    table, page = inputs[0]["rows"].block_table, inputs[0]["k_cache"].shape[1]
    batch, pages = table.shape
    steps = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    mask = None
    if tree and rows > 1:
        mask = torch.ones(batch, rows, kv + rows, dtype=torch.bool, device=DEVICE)
        mask[:, :, kv:] = in_flight_mask(rows, tree)
    last = torch.full((batch,), (kv + rows - 1) % page + 1, dtype=torch.int32, device=DEVICE)
    plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=DEVICE)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(plan, "NHD", backend="fa2")
    wrapper.plan(
        steps * rows,
        steps * pages,
        table.flatten(),
        last,
        heads,
        kv_heads,
        dim,
        page,
        causal=mask is None,
        custom_mask=None if mask is None else mask.flatten(),
        q_data_type=torch.bfloat16,
    )
    return [
        partial(wrapper.run, x["q"], (x["k_cache"], x["v_cache"]), out=x["out"]) for x in inputs
    ]
