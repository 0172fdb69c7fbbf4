"""Chains of elementwise operations and reductions as single kernels, by torch.compile."""

import functools
from collections.abc import Callable
from typing import Any

import torch

# Rows at least as wide are worth the seconds that a compilation takes.
LEAST_WIDTH = 512
OPTIONS = {
    "emulate_precision_casts": True,
    # Short rows take the kernels of long ones; otherwise the first row of less than 10,000 tokens
    # compiles all of them again.
    "triton.mix_order_reduction_non_strict_mode": True,
}


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is compiled on a GPU, once for all numbers of rows.

    It takes a tensor [rows, ..., width], further tensors with as many rows, and weights. Roundings
    to half precision stay as they are without it. The backward pass computes elementwise results
    again instead of reading them, also those that a product needs. Narrow rows, and all rows on a
    CPU, run op by op. torch keeps what it compiles in its own cache on the disk.
    """

    @functools.wraps(function)
    def call(first: torch.Tensor, *others: Any) -> Any:
        single = not first.is_cuda or first.shape[-1] < LEAST_WIDTH
        if single or torch.compiler.is_compiling():
            return function(first, *others)
        for tensor in (first, *others):
            if isinstance(tensor, torch.Tensor) and len(tensor) == len(first):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return _compiled(function)(first, *others)

    return call


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=_compile)


def _compile(graph: Any, inputs: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx  # slow to import

    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        return compile_fx(graph, inputs, config_patches=OPTIONS)
