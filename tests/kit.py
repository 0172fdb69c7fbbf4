"""Shared by the tests: tolerances, random inputs, comparisons."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tlt_ext
from tests.grouping import grouped

# Largest ||out - reference|| / ||reference|| by dtype; the reference is float64 on the same inputs.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[gpu, needs_gpu])]

DEVICE = "cpu"  # where the helpers of a test put an op's arrays


@pytest.fixture(params=DEVICES)
def each_device(request, monkeypatch):
    """Runs a test once a device: helpers move its arrays there and back."""
    monkeypatch.setattr(f"{__name__}.DEVICE", request.param)


def to_device(array):
    """Moves a tensor to DEVICE; one row that is expanded to many stays one row."""
    if not isinstance(array, torch.Tensor) or array.device.type == DEVICE:
        return array
    if array.ndim > 1 and array.shape[0] > 1 and array.stride(0) == 0:
        return array[:1].to(DEVICE).expand(array.shape)
    moved = torch.empty_strided(array.shape, array.stride(), dtype=array.dtype, device=DEVICE)
    return moved.copy_(array)


def workspace(rows: int) -> torch.Tensor | None:
    """Scratch of `verify_tree` on a GPU, full of garbage; None on the CPU."""
    if DEVICE == "cpu":
        return None
    size = tlt_ext.sampling_workspace_bytes(rows)
    return torch.full((size,), 0xA5, dtype=torch.uint8, device=DEVICE)


def assert_takes_no_memory(work: Callable[[], None], tries: int = 3) -> None:
    """Asserts that `work` leaves the card's free memory as it is.

    Other processes of a card take some too: what takes it itself does so at every try. Those of
    pytest-xdist never rest, so that under it nothing is asserted.
    """
    for _ in range(tries):
        before = torch.cuda.mem_get_info()[0]
        work()
        torch.cuda.synchronize()
        taken = before - torch.cuda.mem_get_info()[0]
        if taken <= 0 or "PYTEST_XDIST_WORKER" in os.environ:
            return
    raise AssertionError(f"{taken} bytes taken, and some at each of {tries} tries")


def to_cpu(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: array.cpu() for name, array in arrays.items()}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal CPU values, the same for the same seed."""
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.double()
    norm = reference.norm().clamp_min(1e-30)
    return float((out.double().cpu() - reference.cpu()).norm() / norm)


def assert_close(out: torch.Tensor, reference: torch.Tensor) -> None:
    """Asserts that `out` is within its dtype's tolerance of a float64 reference."""
    assert out.shape == reference.shape
    assert relative_error(out, reference) <= TOLERANCE[out.dtype]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit equality; NaN equals NaN."""
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Probability of counts at least this far from `probs` (sum 1); cells under 10 are pooled.

    0 if a count is positive where the probability is 0.
    """
    counts, probs = counts.double(), probs.double()
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    total = counts.sum()
    small = total * probs < 10
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = total * torch.cat([probs[~small], probs[small].sum()[None]])
    if not bool(small.any()) or float(expected[-1]) == 0.0:
        observed, expected = observed[:-1], expected[:-1]
    degrees = torch.tensor(float(max(len(expected) - 1, 1)), dtype=torch.float64)
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def assert_distribution(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """Asserts that integer draws follow `probs`; the seeds are fixed, so the result is, too."""
    counts = torch.bincount(tokens.flatten().long(), minlength=len(probs))
    assert len(counts) == len(probs), f"an id past the distribution: {len(counts) - 1}"
    assert chi_square_p(counts, probs) > 1e-3, f"{counts.tolist()}, expected {len(tokens) * probs}"


class Ops:
    """The ops of `tlt_ext` on a device, called with CPU tensors: `Ops("cuda").append_kv(**case)`.

    Arguments may be flat (`tests.grouping`). The tensors go to the device with their strides and
    shared storage, and then hold what the op wrote.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, getattr(tlt_ext, name))

    def _call(self, op: Any, *args: Any, **options: Any) -> None:
        storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def move(x: Any) -> Any:
            if isinstance(x, tuple):
                return type(x)(*map(move, x))
            if not isinstance(x, torch.Tensor):
                return x
            storage = x.untyped_storage()
            place = storage.data_ptr() or id(x)  # empty ones are all at 0
            if place not in storages:
                whole = torch.empty(0, dtype=x.dtype).set_(storage)
                storages[place] = whole, whole.to(self.device)
            whole = storages[place][1]
            return whole.as_strided(x.shape, x.stride(), x.storage_offset())

        if inspect.isfunction(op):
            options = grouped(op, options)
        if self.device == "cpu":
            return op(*args, **options)
        op(*map(move, args), **{name: move(x) for name, x in options.items()})
        for whole, moved in storages.values():
            whole.copy_(moved)
