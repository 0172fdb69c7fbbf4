"""Deterministic algorithms of torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Deterministic cuBLAS requires it and reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Uses deterministic algorithms in the block, so that equal tokens give equal policies."""
    if device.type != "cuda":  # on the CPU torch is deterministic anyway
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # costs time, changes no sum
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
