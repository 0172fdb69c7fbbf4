"""Layers equal their float64 references, row by row and bit by bit."""

import pytest
import torch

import tlt_ext
from tests import kit, reference


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 7), (5, 576), (2, 4097)])
def test_rms_norm_equals_reference(device, dtype, rows, dim):
    x = kit.randn(rows, dim, seed=0, dtype=dtype).to(device)
    weight = kit.randn(dim, seed=1, dtype=dtype).to(device)
    out = torch.full_like(x, float("nan"))
    tlt_ext.rms_norm(x, weight, out, eps=1e-5)
    kit.assert_close(out, reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("device", kit.DEVICES)
def test_rms_norm_rows_are_invariant_and_may_be_strided(device):
    x = kit.randn(9, 640, seed=0).to(device)
    weight = kit.randn(576, seed=1).to(device)
    out = torch.empty(9, 576, device=device)
    tlt_ext.rms_norm(x[:, :576], weight, out)
    for row in range(9):
        alone = torch.empty(1, 576, device=device)
        tlt_ext.rms_norm(x[row : row + 1, :576].contiguous(), weight, alone)
        assert kit.same_bits(alone[0], out[row])


def test_rms_norm_in_place_and_empty():
    x, weight = kit.randn(4, 32, seed=0), torch.ones(32)
    expected = reference.rms_norm(x, weight, 1e-6)
    tlt_ext.rms_norm(x, weight, x)
    kit.assert_close(x, expected)
    tlt_ext.rms_norm(x[:0], weight, x[:0])


def test_rms_norm_checks_its_arguments():
    x, weight, out = kit.randn(4, 32, seed=0), torch.ones(32), torch.empty(4, 32)
    with pytest.raises(TypeError, match="rms_norm: x: expected dtype float32 or float16"):
        tlt_ext.rms_norm(x.int(), weight, out)
    with pytest.raises(TypeError, match="weight: expected the dtype of x, float32, got float16"):
        tlt_ext.rms_norm(x, weight.half(), out)
    with pytest.raises(ValueError, match="x: expected a contiguous last axis, got stride 4"):
        tlt_ext.rms_norm(torch.empty(32, 4).t(), weight, out)
    with pytest.raises(ValueError, match=r"weight: expected shape \[32\], got \[31\]"):
        tlt_ext.rms_norm(x, weight[:31], out)
    with pytest.raises(ValueError, match=r"out: expected shape \[4, 32\], got \[3, 32\]"):
        tlt_ext.rms_norm(x, weight, out[:3])
    with pytest.raises(ValueError, match="eps: expected 0 or more"):
        tlt_ext.rms_norm(x, weight, out, eps=-1.0)
