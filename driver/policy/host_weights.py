"""Float32 weights and the sums of their gradients in host memory, for passes on a device."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import host_moments
from .host_moments import RING, HostBlocks

# Layers whose gradients are on the device at once: one is computed, others wait for their copies.
LAYERS_AHEAD = 2


class HostWeights:
    """Moves weights to a device for each pass, and gradients back, beside the computation.

    The host enqueues the copies of later layers while the device computes, so their weights arrive
    in a ring of float32 pieces. A thread copies gradients to pinned memory and adds them up.

    `model` is in host memory or on the device, in the dtype of the passes. Its parameters become
    float32 in pinned memory; buffers move to the device.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.device = device
        self._backend = torch.get_device_module(device)
        params, pinned = list(model.parameters()), device.type == "cuda"
        sizes = [param.numel() for param in params]
        blocks = HostBlocks(2 * sum(sizes), pinned)
        for param in params:
            param.data = blocks.take(param.shape).copy_(param.detach())
            param.host = self  # type: ignore[attr-defined]
        for buffer in model.buffers():
            buffer.data = buffer.to(device)
        self._sums: dict[Tensor, Tensor] = {param: blocks.take(param.shape) for param in params}
        block = min(host_moments.BLOCK_NUMBERS, max(sizes))
        layers: Any = model.base_model.layers
        layer = sum(param.numel() for param in layers[0].parameters())
        self._ring = torch.empty(-(-layer // block) + 1, block, device=device)
        self._places = itertools.cycle(self._ring)
        self._used: deque[Any] = deque(maxlen=len(self._ring))
        self._landed = torch.empty(RING, block, pin_memory=pinned)
        self._arrive, self._leave = self._backend.Stream(), self._backend.Stream()
        self._arrive.wait_stream(self._backend.current_stream())  # the ring's memory may be in use
        self._adder = ThreadPoolExecutor(1, "gradients")
        self._adding: deque[Future[None]] = deque()

    def bring(self, targets: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Copies weights into tensors of the device, in their dtype, on the current stream."""
        compute = self._backend.current_stream()
        pairs = zip(targets, weights, strict=True)
        for target, weight in (piece for pair in pairs for piece in self._pieces(*pair)):
            place = next(self._places)[: len(weight)]
            with self._backend.stream(self._arrive):
                if len(self._used) == len(self._ring):
                    self._arrive.wait_event(self._used[0])
                place.copy_(weight, non_blocking=True)
            compute.wait_stream(self._arrive)
            target.copy_(place)
            self._used.append(compute.record_event())

    def add(self, weights: Sequence[Tensor], shares: Sequence[Tensor]) -> None:
        """Adds gradients on the device to `grad` of the weights, by the time that `wait` ends."""
        sums = [(self._sums[weight], weight.grad is None) for weight in weights]
        for weight, (total, _) in zip(weights, sums, strict=True):
            weight.grad = total
        # float32, which the host adds faster. Another stream would wait for the device to be idle.
        shares = [share.float().contiguous() for share in shares]
        ready = self._backend.current_stream().record_event()
        self._adding.append(self._adder.submit(self._add, sums, shares, ready))
        self.wait(LAYERS_AHEAD)

    def wait(self, left: int = 0) -> None:
        """Waits until the gradients of all but some layers are added."""
        while len(self._adding) > left:
            self._adding.popleft().result()

    def clip(self, max_norm: float) -> Tensor:
        """Clips the gradients and returns their norm before, float []."""
        params = [param for param in self._sums if param.grad is not None]
        norms = device_norms([self._sums[param] for param in params], self.device)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    @torch.no_grad()
    def _add(
        self, sums: Sequence[tuple[Tensor, bool]], shares: Sequence[Tensor], ready: Any
    ) -> None:
        self._leave.wait_event(ready)
        pending: deque[Any] = deque()
        places = itertools.cycle(self._landed)
        for (total, first), share in zip(sums, shares, strict=True):
            for sum_piece, piece in self._pieces(total, share):
                if len(pending) == RING:
                    self._land(*pending.popleft())
                place = next(places)[: len(piece)]
                with self._backend.stream(self._leave):
                    place.copy_(piece, non_blocking=True)
                    pending.append((sum_piece, place, first, self._leave.record_event()))
        while pending:
            self._land(*pending.popleft())

    def _land(self, total: Tensor, share: Tensor, first: bool, copied: Any) -> None:
        if copied is not None:  # streams of a CPU have no events
            copied.synchronize()
        (total.copy_ if first else total.add_)(share)

    def _pieces(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        block = self._ring.shape[1]
        flat = [tensor.detach().reshape(-1).split(block) for tensor in tensors]
        return zip(*flat, strict=True)


def device_norms(
    tensors: Sequence[Tensor], device: torch.device, order: float = 2.0
) -> list[Tensor]:
    """Norms of tensors in host memory, each [], which the device computes.

    On the host one core adds up a tensor in float32, which for a large one is off by a thousandth.
    """
    return [torch._foreach_norm([x.to(device, non_blocking=True)], order)[0] for x in tensors]
