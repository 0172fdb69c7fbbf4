"""The pool of worker threads: limits of the system, changes of its size, several callers."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import tlt_ext

# Lowers the memory limit so far that only a few of 16 threads can start, then runs an op on them.
FEW_THREADS = """
import os, resource
import numpy as np, tlt_ext

def norm():
    tlt_ext.rms_norm(x, weight, out)
    return out.sum()

x = np.random.default_rng(0).standard_normal((400, 1000)).astype(np.float32)
weight, out = np.ones(1000, np.float32), np.zeros_like(x)
tlt_ext.set_num_threads(1)
expected = norm()
limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + (80 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
tlt_ext.set_num_threads(16)
for _ in range(5):
    out[:] = 0
    assert norm() == expected
print(tlt_ext.num_threads(), len(os.listdir("/proc/self/task")))
"""


def run_pool(count: int = 1) -> torch.Tensor:
    x = torch.arange(4096.0 * 256).view(4096, 256)
    out = torch.zeros(4096, 256)
    for _ in range(count):
        tlt_ext.rms_norm(x, torch.ones(256), out)
    return out


@pytest.fixture
def default_threads():
    count = tlt_ext.num_threads()
    yield
    tlt_ext.set_num_threads(count)


def test_a_pool_keeps_the_threads_that_could_start():
    done = subprocess.run(
        [sys.executable, "-c", FEW_THREADS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    used, running = map(int, done.stdout.split())
    assert 1 <= used <= running < 16


def test_a_pool_that_is_replaced_ends_its_threads(default_threads):
    wanted = run_pool()
    before = len(os.listdir("/proc/self/task"))
    for round_ in range(30):
        tlt_ext.set_num_threads(2 + round_ % 3)
        assert torch.equal(run_pool(), wanted)
        assert tlt_ext.num_threads() == 2 + round_ % 3
    assert len(os.listdir("/proc/self/task")) <= before + 3


def test_several_callers_while_the_size_changes(default_threads):
    wanted, wrong, stop = run_pool(), [], threading.Event()

    def call():
        for _ in range(20):
            if not torch.equal(run_pool(), wanted):
                wrong.append(1)

    def change():
        size = 0
        while not stop.is_set():
            size += 1
            tlt_ext.set_num_threads(1 + size % 4)

    callers = [threading.Thread(target=call) for _ in range(3)]
    changer = threading.Thread(target=change)
    for thread in (changer, *callers):
        thread.start()
    for thread in callers:
        thread.join()
    stop.set()
    changer.join()
    assert not wrong


@pytest.mark.parametrize("count", [-1, 1025, 100_000])
def test_a_number_of_threads_is_bounded(count):
    with pytest.raises(ValueError, match=f"count: expected 0 to 1024, got {count}"):
        tlt_ext.set_num_threads(count)
