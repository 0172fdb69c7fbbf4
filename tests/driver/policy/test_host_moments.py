"""Moments in host memory, against the optimizer's own step."""

import pytest
import torch

from driver.common.memory import PINNED
from driver.policy import host_moments
from driver.policy.host_moments import MOMENTS, HostBlocks, HostMoments
from tests import kit


@pytest.mark.parametrize("device", kit.DEVICES)
def test_steps_have_the_bits_of_the_optimizer(device, monkeypatch):
    """Copies of 2 MB last long enough for a missing wait to show."""
    monkeypatch.setattr(host_moments, "BLOCK_NUMBERS", 1 << 19)
    draw = torch.Generator().manual_seed(1)
    sizes = [(1 << 20, 4), (999,), (1 << 19,), ((1 << 19) + 1,), (1, 1)]

    def random():
        return [torch.randn(size, generator=draw).to(device) for size in sizes]

    def optimizer(params):
        groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, fused=device == "cuda")

    params = random()
    own, other = params, [param.clone() for param in params]
    moved = HostMoments(own, torch.device(device))
    mine, plain = optimizer(own), optimizer(other)
    for _ in range(3):
        for param, twin, grad in zip(own, other, random(), strict=True):
            param.grad, twin.grad = grad, grad
        moved.step(mine)
        plain.step()
    for param, twin in zip(own, other, strict=True):
        assert torch.equal(param, twin)
        state, expected = mine.state[param], plain.state[twin]
        assert state["step"] == expected["step"] == 3
        for moment in MOMENTS:
            assert state[moment].device.type == "cpu"
            assert torch.equal(state[moment], expected[moment].cpu())
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        moved.step(mine)
        ring = host_moments.RING * len(MOMENTS) * 4 << 19
        assert ring <= torch.cuda.max_memory_allocated() - before <= 1.01 * ring


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("own", ["", "max_split_size_mb:64,garbage_collection_threshold:0.8"])
def test_pinned_memory_keeps_the_allocator_settings_of_the_user(variable, own, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(variable, own)
    made = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append)
    HostBlocks(1, pinned=True)
    assert made == [f"{PINNED},{own}" if own else PINNED]
