"""The weights that the optimizer updates: float32, whole on each rank or sharded with FSDP2.

In half precision, passes use transient copies, a layer at a time: `packed_logprobs` makes them of
whole weights, FSDP2 of sharded ones. Whole weights have their own way because the hooks of FSDP2
cost the host about two milliseconds a layer and micro-batch (docs/notes/memory.md).
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from ..common.errors import SharedWarning
from ..common.tensor_parallel import all_gather
from ..common.world import World
from .host_moments import MOMENTS, HostMoments, local
from .host_weights import HostWeights, device_norms
from .logprobs import LossGradient
from .micro_batch import MicroBatch
from .packed_forward import packed_layer, packed_logprobs

if TYPE_CHECKING:
    from ..config.sections import GrpoConfig

SUM_BYTES = 1 << 27  # of gradients that ranks with whole weights add up at once


class PolicyWeights:
    """The parameters of a model for an optimizer.

    Args:
        model: in the dtype of its passes, the same on all ranks. It is trained in place;
            parameters in half precision become float32.
        world: ranks that share the work of an update.
        offload: what is kept in host memory: "moments", Adam's, or "all", parameters and gradients
            too. The optimizer runs on the device.
        sharded: whether FSDP2 holds the weights, and each rank a part of them; see `is_sharded`.
        device: of the passes; None = the model's. A model that is sharded may be in host memory
            before: it moves a layer at a time.

    Example:
        >>> weights = PolicyWeights(model.bfloat16())  # doctest: +SKIP
        >>> weights.params[0].dtype, weights.dtype  # doctest: +SKIP
        (torch.float32, torch.bfloat16)
    """

    def __init__(
        self,
        model: nn.Module,
        world: World | None = None,
        offload: str = "none",
        sharded: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.world, self.offload, self.sharded = world or World(), offload, sharded
        first = next(model.parameters())
        self.dtype, self.device = first.dtype, device or first.device
        self._forward = functools.partial(packed_logprobs, cast(Any, model))
        self._host: HostWeights | None = None
        if self.sharded:
            self._shard(model)
        elif offload == "all":
            self._host = HostWeights(cast(Any, model), self.device)
        else:
            _widen(model)
        self.named = dict(model.named_parameters())
        self.params = list(self.named.values())
        self._sums: dict[nn.Parameter, Tensor] = {}  # of FSDP2's gradients on the host
        self._moments: HostMoments | None = None
        if offload != "none":
            self._moments = HostMoments(self.params, self.device, offload == "all")

    def _shard(self, model: Any) -> None:
        # Slow to import.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        kinds = ("cpu", self.device.type)  # in one order on all ranks
        self._meshes = {kind: init_device_mesh(kind, (self.world.size,)) for kind in kinds}
        on_host = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        settings: dict[str, Any] = {
            "mesh": self._meshes[self.device.type],
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.dtype,
                reduce_dtype=torch.promote_types(self.dtype, torch.float32),
                cast_forward_inputs=False,
            ),
            "offload_policy": on_host if self.offload == "all" else OffloadPolicy(),
        }
        parts: list[tuple[Any, Callable[..., Any]]]
        parts = [(layer, packed_layer) for layer in model.base_model.layers]
        for module, function in [*parts, (model, packed_logprobs)]:
            if module is not model:
                module.to(self.device)
            _widen(module)  # one layer at a time: all in float32 may not fit on a card
            fully_shard(module, **settings)
            # The loss is divided by the tokens of all ranks, so gradients are added up. Gloo knows
            # no other reduction.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            setattr(module, function.__name__, functools.partial(function, module))
            register_fsdp_forward_method(module, function.__name__)
        self._forward = model.packed_logprobs

    def logprobs(
        self,
        batch: MicroBatch,
        checkpointing: bool = False,
        entropy_grad: bool = False,
        loss_gradient: LossGradient | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`packed_logprobs` of the model; of sharded weights it and its backward are collective."""
        self._take_gradients()
        return self._forward(batch, checkpointing, entropy_grad, self.dtype, loss_gradient)

    def together(self) -> AbstractContextManager[None]:
        """A block of calls that are collective if the weights are sharded; names a lost rank."""
        return self.world.together() if self.sharded else contextlib.nullcontext()

    def finish_gradients(self, denominator: float) -> None:
        """Makes the sums of gradients those of all ranks, and divides them; a collective call."""
        if self._host is not None:
            self._host.wait()
        self._take_gradients()
        for param, total in self._sums.items():
            param.grad = total
        self._sums.clear()
        gradients = [param.grad for param in self.params if param.grad is not None]
        if self.world.size > 1 and not self.sharded:
            with self.world.together():
                for some in _take_tensors(gradients, SUM_BYTES):
                    flat = _flatten_dense_tensors(some)
                    dist.all_reduce(flat)  # equal bits on all ranks
                    torch._foreach_copy_(some, _unflatten_dense_tensors(flat, some))
        torch._foreach_mul_(gradients, 1 / denominator)

    def _take_gradients(self) -> None:
        """Adds the gradients of a micro-batch that FSDP2 has copied to the host to sums there.

        It copies to pinned memory beside the backward pass if a parameter has no gradient yet, and
        otherwise waits for a copy to new memory, at 1 GB/s.
        """
        if not self.sharded or self.offload != "all":
            return
        for param in self.params:
            if param.grad is not None:
                total = self._sums.setdefault(param, param.grad)
                if total is not param.grad:
                    local(total).add_(local(param.grad))
                param.grad = None

    def drop_gradients(self) -> None:
        self._sums.clear()
        for param in self.params:
            param.grad = None

    def gradient_bits(self) -> list[int]:
        """A sum of each gradient's bits; waits for the device."""
        gradients = [local(param.grad) for param in self.params if param.grad is not None]
        bits = [grad.contiguous().view(torch.int32).sum(dtype=torch.int64) for grad in gradients]
        return torch.stack(bits).tolist()

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float, lr: float) -> Tensor:
        """Clips the gradients, updates the parameters and clears the gradients.

        Returns the gradient's norm before clipping, float []. One that is not finite is skipped
        with a warning. The optimizer is over `params`.
        """
        with self.together():
            clip = functools.partial(nn.utils.clip_grad_norm_, self.params)
            norm: Any = (clip if self._host is None else self._host.clip)(max_norm)  # []
            if self.sharded:
                norm = norm.full_tensor()
            if torch.isfinite(norm):
                for group in optimizer.param_groups:
                    group["lr"] = lr
                if self._moments is not None:
                    self._moments.step(optimizer)
                else:
                    optimizer.step()
            else:
                message = "gradient is not finite: this update is skipped"
                warnings.warn(message, SharedWarning, stacklevel=3)
        optimizer.zero_grad()
        return norm

    def start_moments(self, optimizer: torch.optim.Optimizer, updates: int) -> None:
        """Gives the optimizer the state of some updates, with moments of 0 to load others into."""
        if self._moments is not None and updates:
            return self._moments.start(optimizer, updates)
        for param in self.params if updates else ():
            state = {"step": torch.tensor(float(updates), device=param.device)}
            optimizer.state[param] = state | {key: torch.zeros_like(param) for key in MOMENTS}

    def is_finite(self) -> bool:
        """Whether all parameters of all ranks are finite; a collective call."""
        params = [local(param) for param in self.params]
        if self.offload == "all":
            largest = torch.stack(device_norms(params, self.device, math.inf))
        else:
            largest = torch.stack(torch._foreach_norm(params, math.inf))
        finite = largest.isfinite().all()  # the largest of NaN and others is NaN
        return all(self.world.gather(bool(finite)))

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name, whole, one at a time; a collective call.

        The tensors are on the model's device. A head that is tied to the embedding is left out.
        """
        with self.together():
            for name, param in self.named.items():
                # A copy from the host in another dtype would be made on the host first.
                weight = local(param).to(self.device, non_blocking=True)
                if self.sharded:
                    weight = self._whole(weight.to(self.dtype), param)
                yield name, weight

    def tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
        """What this rank holds of the parameters and of the moments, without copies.

        "weight" and the names of the moments -> name of the parameter -> tensor; there are no
        moments before the first step.
        """
        found = {"weight": {name: local(param) for name, param in self.named.items()}}
        for moment in MOMENTS:
            state = {name: optimizer.state.get(param, {}) for name, param in self.named.items()}
            found[moment] = {name: local(of[moment]) for name, of in state.items() if of}
        return found

    def written(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
        """Those of `tensors` that this rank writes to a checkpoint."""
        found = self.tensors(optimizer)
        if self.sharded:
            return found
        mine = set(list(self.named)[self.world.rank :: self.world.size])
        return {kind: {n: x for n, x in of.items() if n in mine} for kind, of in found.items()}

    def placed(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Any]]:
        """`tensors`, or host copies, with their places in the whole tensors, for checkpoints."""
        return {
            kind: {name: self._placed(part, self.named[name]) for name, part in parts.items()}
            for kind, parts in tensors.items()
        }

    def _whole(self, part: Tensor, param: Tensor) -> Tensor:
        """The rows of all ranks; a collective call."""
        if len(part) * self.world.size != len(param):
            return self._placed(part, param).full_tensor()
        whole = part.new_empty(param.shape)  # full_tensor takes more of the host's time
        group = self._meshes[part.device.type].get_group()
        all_gather(whole, part.contiguous(), group=group)
        return whole

    def _placed(self, part: Tensor, param: Tensor) -> Any:
        if not self.sharded:
            return part
        from torch.distributed.tensor import DTensor, Shard

        mesh = self._meshes[part.device.type]
        return DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride()
        )


def is_sharded(ranks: int, grpo: GrpoConfig) -> bool:
    """Whether torch's FSDP2 holds the weights of a run."""
    return ranks > 1 and (grpo.shard != "false" or grpo.offload == "all")


def in_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Changes the dtype of the parameters in place; buffers stay, such as RoPE frequencies."""
    for param in model.parameters():
        if param.dtype != dtype:
            param.data = param.data.to(dtype)


def _widen(module: nn.Module) -> None:
    if next(module.parameters()).dtype != torch.float64:
        in_dtype(module, torch.float32)
