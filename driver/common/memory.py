"""Peak memory of this process, as metrics; and the size of a float."""

from __future__ import annotations

import resource
import sys

import torch

from .releasable import ReleasableMemory

FLOAT_BYTES = 4  # float32
CARD_MEMORY = "perf/max_memory_allocated_gb"


def peak_memory_gb() -> float:
    """Peak resident memory of this process, in 10^9 bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def memory_metrics(pages: ReleasableMemory) -> dict[str, float]:
    """Peaks by the names in the metrics file, in 10^9 bytes.

    Args:
        pages: of the rollouts, which torch does not count.
    """
    out = {"perf/max_memory_resident_gb": peak_memory_gb()}
    if torch.cuda.is_initialized():
        out[CARD_MEMORY] = pages.peak_bytes() / 1e9
        out["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return out
