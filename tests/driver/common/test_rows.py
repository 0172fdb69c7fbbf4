"""Rows that are chosen by their indices."""

import itertools

import pytest
import torch

from driver.common.rows import take_rows
from tests import kit

pytestmark = pytest.mark.usefixtures("each_device")
each_device = kit.each_device


@pytest.mark.parametrize("shape", [(576,), (3, 64), (7,)])  # the last: not a multiple of 16 bytes
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_those_of_a_plain_index(shape, dtype):
    """Repeated, first and last rows, dense and strided; into a given array and into a new one."""
    whole = kit.to_device(kit.randn(51, *shape, seed=0).bfloat16())
    sources, counts = (whole[:50], whole[1:, ..., ::2]), (0, 1, 2, 7, 16, 17, 40)
    for rows, count in itertools.product(sources, counts):
        index = torch.randint(50, (count,), generator=kit.generator(count), dtype=dtype)
        index[:4] = torch.tensor([49, 0, 49, 7], dtype=dtype)[:count]
        wanted = rows.cpu()[index.long()]
        index = kit.to_device(index)
        out = torch.full_like(kit.to_device(wanted), -1)
        assert take_rows(rows, index, out) is out
        assert torch.equal(out.cpu(), wanted)
        assert torch.equal(take_rows(rows, index).cpu(), wanted)


@kit.gpu
@kit.needs_gpu
@pytest.mark.parametrize("count", [1, 2, 16])
def test_rows_are_taken_in_one_launch(count):
    """And not by the kernel that copies rows one after another, unless there is only one."""
    rows = torch.zeros(50, 576, dtype=torch.bfloat16, device="cuda")
    index = torch.zeros(count, dtype=torch.int32, device="cuda")
    out = rows[:count].clone()
    take_rows(rows, index, out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        take_rows(rows, index, out)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
    kernels = [name for name in kernels if "gather" in name or "ndex" in name]
    assert len(kernels) == 1 and ("SmallIndex" in kernels[0]) == (count == 1), kernels
