"""Memory that is released and restored: addresses, contents, captured graphs."""

import gc
import os

import pytest
import torch

from driver.common import releasable
from driver.common.releasable import ReleasableMemory
from tests import kit

SIZE = 64 << 20


def test_tensors_lose_their_memory_and_get_it_back():
    memory = ReleasableMemory(torch.device("cpu"))
    x = memory.zeros(2, 3, dtype=torch.float32)
    row = x[1]
    x.fill_(5.0)
    memory.restore()  # nothing to do
    assert float(row.sum()) == 15 and not memory.released
    memory.release()
    memory.release()
    assert memory.released and x.untyped_storage().nbytes() == 0
    memory.restore()
    assert not memory.released and x.untyped_storage().nbytes() == 24
    assert float(row.sum()) == 0
    row.fill_(1.0)
    assert float(x.sum()) == 3


def test_the_meta_device_has_nothing_to_release():
    memory = ReleasableMemory(torch.device("meta"))
    assert memory.zeros(1 << 40, dtype=torch.bfloat16).device.type == "meta"
    assert memory.peak_bytes() == 0


# Other processes of pytest-xdist take and free memory of the card all the time.
ALONE = "PYTEST_XDIST_WORKER" not in os.environ


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@kit.gpu
@kit.needs_gpu
def test_a_captured_graph_stays_valid_on_new_memory():
    memory = ReleasableMemory(torch.device("cuda"))
    torch.cuda.empty_cache()
    before = free_bytes()
    x = memory.zeros(SIZE // 2, dtype=torch.bfloat16)
    small = memory.zeros(3, dtype=torch.int32)
    assert x.is_cuda and (before - free_bytes() >= SIZE or not ALONE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1.0)
        small.add_(1)
    places, held = (x.data_ptr(), small.data_ptr()), free_bytes()
    graph.replay()
    for _ in range(3):
        memory.release()
        assert free_bytes() - held >= SIZE or not ALONE
        other = torch.full((SIZE,), 7, dtype=torch.uint8, device="cuda")  # takes what was released
        del other
        memory.restore()
        assert (x.data_ptr(), small.data_ptr()) == places
        graph.replay()
        graph.replay()
        assert torch.equal(x, torch.full_like(x, 2.0)) and small.tolist() == [2, 2, 2]
    assert memory.peak_bytes() >= SIZE + torch.cuda.memory_allocated()
    del x, small, graph, memory
    gc.collect()
    torch.cuda.empty_cache()
    # The graph's pool has its own small blocks.
    assert free_bytes() >= before - (8 << 20) or not ALONE


@kit.gpu
@kit.needs_gpu
@pytest.mark.skipif(not ALONE, reason="other processes use the card")
def test_memory_that_torch_keeps_is_returned_first_and_too_little_is_an_error():
    memory = ReleasableMemory(torch.device("cuda"))
    torch.cuda.empty_cache()
    size = int(0.6 * torch.cuda.mem_get_info()[1])
    x = memory.zeros(size, dtype=torch.uint8)
    memory.release()
    torch.empty(size, dtype=torch.uint8, device="cuda")  # freed at once, but torch keeps it
    memory.restore()
    assert int(x[-1]) == 0
    memory.release()
    used = torch.empty(size, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"GB are needed, .* are free"):
        memory.restore()
    del used
    memory.restore()
    assert int(x[-1]) == 0


@kit.gpu
@kit.needs_gpu
def test_garbage_that_is_collected_during_a_capture_is_freed_later():
    memory = ReleasableMemory(torch.device("cuda"))
    memory.zeros(SIZE, dtype=torch.uint8)
    kept = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept.add_(1.0)
        del memory
        assert len(releasable._DROPPED) == 1
    graph.replay()
    assert float(kept.sum()) == 4.0
    ReleasableMemory(torch.device("cuda")).zeros(1, dtype=torch.uint8)
    assert not releasable._DROPPED
