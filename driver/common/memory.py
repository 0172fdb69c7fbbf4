"""Memory of this machine, peaks of this process as metrics, and the size of a float."""

import os
import resource
from contextlib import suppress
from pathlib import Path

import torch

from .releasable import ReleasableMemory

FLOAT_BYTES = 4  # float32
CARD_MEMORY = "perf/max_memory_allocated_gb"
# Threads touch the pages of pinned memory before CUDA, whose other calls wait, registers them.
PINNED = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
# Memory limits of a container, in the second and the first version of control groups.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_bytes() -> int:
    """Memory of this machine, or of the container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in LIMITS:
        with suppress(OSError, ValueError):  # the file is missing, or "max" = no limit
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


def pin_with_threads() -> None:
    """Lets torch pin host memory at 6.8 instead of 1.9 GB/s (H200)."""
    # torch resets some settings that a call leaves out, so those of the user are repeated.
    own = (os.environ.get(f"PYTORCH_{name}ALLOC_CONF") for name in ("CUDA_", ""))
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (PINNED, *own))))


def peak_memory_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def memory_metrics(pages: ReleasableMemory) -> dict[str, float]:
    """Peak memory by metric name, in 10^9 bytes; `pages` are those that torch does not count."""
    out = {"perf/max_memory_resident_gb": peak_memory_gb()}
    if torch.cuda.is_initialized():
        out[CARD_MEMORY] = pages.peak_bytes() / 1e9
        out["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return out
