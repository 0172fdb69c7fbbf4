"""The layers of a packed row as CUDA graphs, one forward and one backward for each size of rows.

Op by op a row is some 2,800 launches, which cost the host 120 ms however few tokens it has.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.cuda import current_stream

from ..config.sections import GrpoConfig
from .fused import LEAST_WIDTH
from .masked_attention import BLOCK
from .packed_forward import Documents

SIZES = 4  # a row is padded to a quarter of the largest one, two, three, or all of it
WARM_LAYERS = 4  # every fourth layer of SmolLM3 is of another kind


def can_capture(
    config: GrpoConfig, device: str, dtype: torch.dtype, width: int, ranks: int
) -> bool:
    """Whether rows are graphs: one GPU has all gradients and activations of a compiled model.

    Args:
        config: `graphs` asks for it.
        device, dtype: of the passes.
        width: of the hidden states.
        ranks: that share the update.
    """
    whole = ranks == 1 and config.offload == "none" and not config.checkpointing
    compiled = device.startswith("cuda") and width >= LEAST_WIDTH
    half = dtype in (torch.float16, torch.bfloat16)
    return config.graphs != "off" and whole and compiled and half


class RowGraphs:
    """Hidden states of packed rows that are padded to a few sizes.

    The first row of a size is captured. A replay has the bits of the same padded row op by op. All
    graphs share their memory, so the backward pass of a row must end before the forward pass of the
    next one. Gradients are added to tensors that stay in place. Each stream has its own graphs,
    since those of a green context run on its multiprocessors only.

    Args:
        layers: from `layers_of`. Their backward pass adds to `grad` of `params`.
        params: of the policy.
        most: tokens of the largest padded row.
    """

    def __init__(self, layers: Callable[..., Tensor], params: Sequence[Tensor], most: int) -> None:
        self._layers, self._params = layers, params
        self._step = _up_to(-(-most // SIZES), BLOCK)
        self._sums = [torch.zeros_like(param) for param in params]
        self._rows: dict[tuple[int, Any], _Row] = {}  # by size and stream
        self._memory: Any = torch.cuda.graph_pool_handle()

    def fits(self, documents: Documents) -> bool:
        return sum(documents.lengths) <= SIZES * self._step

    def has(self, documents: Documents) -> bool:
        """Whether a row of this size is captured on the current stream."""
        return self._key(documents) in self._rows

    def __call__(self, ids: Tensor, documents: Documents) -> Tensor:
        """Hidden states of a row that fits, and of its padding, until the next call."""
        row = self.row(ids, documents)
        self.hold_gradients()
        if row.forward is None:
            self._capture(row)
        return _Replay.apply(row.anchor, row)

    def row(self, ids: Tensor, documents: Documents) -> _Row:
        """The row of this size and stream, with these inputs; its padding is short documents."""
        key = self._key(documents)
        more = key[0] - ids.shape[1]
        further = torch.arange(more, device=ids.device).unsqueeze(0) % BLOCK  # [1, more]
        ids, position = F.pad(ids, (0, more)), torch.cat([documents.position, further], 1)
        if key not in self._rows:
            self._rows[key] = _Row(ids, position)
        row = self._rows[key]
        row.ids.copy_(ids)
        row.position.copy_(position)
        return row

    def hold_gradients(self) -> None:
        """Gives the gradients the addresses that the graphs know."""
        for param, total in zip(self._params, self._sums, strict=True):
            if param.grad is None:
                total.zero_()
            elif param.grad is not total:
                total.copy_(param.grad)
        self._set_gradients(self._sums)

    def _key(self, documents: Documents) -> tuple[int, Any]:
        return _up_to(sum(documents.lengths), self._step), current_stream()

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for param, gradient in zip(self._params, gradients, strict=True):
            param.grad = gradient

    @torch.enable_grad()
    def _capture(self, row: _Row) -> None:
        self._set_gradients([None] * len(self._params))
        # Compiles and loads all kernels.
        self._layers(row.ids, row.position, WARM_LAYERS).sum().backward()
        self._set_gradients(self._sums)
        gc.collect()  # autograd graphs that hold the weights would be waited for
        where: Any = {"pool": self._memory, "capture_error_mode": "thread_local"}
        if current_stream() != torch.cuda.default_stream():
            where["stream"] = current_stream()
        row.forward, row.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(row.forward, **where):
            hidden = self._layers(row.ids, row.position)
        row.grad = torch.zeros_like(hidden)
        with torch.cuda.graph(row.backward, **where):
            hidden.backward(row.grad)
        row.hidden = hidden.detach()


class _Row:
    """The inputs of a size, which stay in place, and what its graphs read and write."""

    def __init__(self, ids: Tensor, position: Tensor) -> None:
        self.ids, self.position = ids, position  # [1, T] each
        self.anchor = torch.zeros((), device=ids.device, requires_grad=True)
        self.hidden = self.grad = torch.empty(0)  # [T, H] each
        self.forward: torch.cuda.CUDAGraph | None = None
        self.backward: torch.cuda.CUDAGraph | None = None


class _Replay(torch.autograd.Function):
    """Both graphs of a row as one function; the gradients of the weights are a side effect."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, row: _Row) -> Tensor:
        ctx.row = row
        assert row.forward is not None
        row.forward.replay()
        return row.hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.row.grad.copy_(grad)
        ctx.row.backward.replay()
        return None, None


def _up_to(tokens: int, step: int) -> int:
    """The next multiple of a step."""
    return -(-tokens // step) * step
