"""What the tests share: tolerances, random inputs, comparisons."""

import pytest
import torch

# Largest ||out - reference|| / ||reference|| by dtype; the reference is float64 on the same inputs.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[gpu, needs_gpu])]


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
