"""The weights that verl's trainer sends in buckets; imports neither verl nor Ray."""

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FILE = "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"


@cache
def transfer() -> ModuleType:
    """verl's module with sender and receiver, which needs no vLLM, unlike the package around it."""
    verl = find_spec("verl")
    assert verl is not None and verl.submodule_search_locations is not None
    path = Path(verl.submodule_search_locations[0]) / FILE
    spec = spec_from_file_location(f"{__name__}_transfer", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collect(receiver: Any) -> dict[str, torch.Tensor]:
    """Copies of all tensors that a `BucketedWeightReceiver` gets."""
    weights: dict[str, torch.Tensor] = {}

    def keep(bucket: Iterable[tuple[str, torch.Tensor]], is_last: bool) -> None:
        weights.update((name, tensor.clone()) for name, tensor in bucket)  # it is written again

    receiver.receive_weights(keep)
    return weights
