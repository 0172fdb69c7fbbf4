"""Adam's moments in host memory, alone or with weights and gradients; steps on the device."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..common.memory import pin_with_threads

MOMENTS = ("exp_avg", "exp_avg_sq")  # names in the state of torch's AdamW
BLOCK_NUMBERS = 1 << 23  # of parameters whose moments are in one block of the device
RING = 3  # blocks on the device: one arrives, one is computed with, one leaves
HOST_NUMBERS = 1 << 31  # in a block of host memory


class HostMoments:
    """AdamW steps on parameters of a device, with the moments in host memory.

    Large tensors pass in pieces. Bits are those of the optimizer's own step.

    Args:
        params: the trained ones; of sharded ones this rank's rows count.
        device: of the steps.
        whole: whether parameters and gradients are in host memory too.
    """

    def __init__(self, params: Sequence[Tensor], device: torch.device, whole: bool = False) -> None:
        self.params, self.device = params, device
        self._moved = len(MOMENTS) + 2 * whole
        self._backend = torch.get_device_module(device)
        sizes = [local(param).numel() for param in params]
        self._block = min(BLOCK_NUMBERS, max(sizes))
        self._host = HostBlocks(len(MOMENTS) * sum(sizes), device.type == "cuda")

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer; waits for the device, because the host may read the moments."""
        backend = self._backend
        compute, arrive, leave = backend.current_stream(), backend.Stream(), backend.Stream()
        # Copies in, the step and copies out have a stream each: the bus is busy both ways.
        ring = torch.empty(RING, self._moved, self._block, device=self.device)
        arrive.wait_stream(compute)
        left: deque[Any] = deque(maxlen=RING)
        for index, (group, arrays, step) in enumerate(self._pieces(optimizer)):
            on_host = arrays[-self._moved :]
            block = [place[: len(on_host[0])] for place in ring[index % RING]]
            with backend.stream(arrive):
                if len(left) == RING:
                    arrive.wait_event(left[0])
                for place, array in zip(block, on_host, strict=True):
                    place.copy_(array, non_blocking=True)
            compute.wait_stream(arrive)
            _adamw(group, [*arrays[: -self._moved], *block], step)
            leave.wait_stream(compute)
            with backend.stream(leave):
                for place, array in list(zip(block, on_host, strict=True))[-3:]:  # no gradient
                    array.copy_(place, non_blocking=True)
                left.append(leave.record_event())
        backend.synchronize()

    def start(self, optimizer: torch.optim.Optimizer, updates: int) -> None:
        """Gives the optimizer the state of some updates, with moments of 0."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                device = self.device if group["fused"] else None
                step = torch.tensor(float(updates), device=device)
                moments = {key: self._host.take(local(param).shape).zero_() for key in MOMENTS}
                optimizer.state[param] = {"step": step} | moments

    def _pieces(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, ...]]:
        """Group; gradients, weights and moments, flat; the number of steps."""
        if not optimizer.state:
            self.start(optimizer, 0)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = optimizer.state[param]
                arrays = (param.grad, param, *(state[key] for key in MOMENTS))
                flat = [local(array).view(-1).split(self._block) for array in arrays]
                for pieces in zip(*flat, strict=True):
                    yield group, pieces, state["step"].clone()
                state["step"] += 1


def _adamw(group: dict[str, Any], arrays: Sequence[Tensor], step: Tensor) -> None:
    """torch's AdamW on a piece of a parameter; `step` counts the steps before."""
    grad, weight, first, second = arrays
    adamw(
        [weight],
        [grad],
        exp_avgs=[first],
        exp_avg_sqs=[second],
        max_exp_avg_sqs=[],
        state_steps=[step],
        fused=group["fused"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class HostBlocks:
    """Float32 tensors without values in a few blocks of host memory, pinned for a GPU.

    torch rounds each pinned allocation up to a power of 2, which could double the memory.
    """

    def __init__(self, numbers: int, pinned: bool) -> None:
        self._left, self._pinned = numbers, pinned
        if pinned:
            pin_with_threads()
        self._block = torch.empty(0)

    def take(self, shape: torch.Size) -> Tensor:
        count = shape.numel()
        if len(self._block) < count:
            size = max(count, min(self._left, HOST_NUMBERS))
            self._block = torch.empty(size, pin_memory=self._pinned)
        taken, self._block = self._block[:count], self._block[count:]
        self._left -= count
        return taken.view(shape)


def local(tensor: Any) -> Tensor:
    """This rank's rows of a tensor, which share its memory."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
