"""One captured graph serves all lengths: each op is replayed a thousand times as they change."""

import gc

import numpy as np
import pytest
import torch

import tlt_ext
from tests import kit
from tests.csrc.plain_arrays import cases
from tests.grouping import flat

pytestmark = [kit.gpu, kit.needs_gpu]

SMALL_FLOATS = {"x", "qkv", "q", "logits", "draft_logits"}


def vary(arrays: dict[str, torch.Tensor], turn: int) -> None:
    """Other lengths, rows, temperatures and inputs, all within what the arrays hold."""
    shift = turn % 5
    for name in {"context_len", "position", "root_position"} & set(arrays):
        arrays[name] += shift
    if "row_start" in arrays and len(arrays["row_start"]) > 1:
        arrays["row_start"][-1] = arrays["row_start"][-1].clamp_max(turn % 4)
    if "temperature" in arrays:
        arrays["temperature"].fill_(turn % 2)
    for name in {"num_new", "num_emitted"} & set(arrays):
        arrays[name] += arrays[name].sign() * (-(turn % 2))
    if "length" in arrays:
        arrays["length"] -= turn % 3
        arrays["context_len"].clamp_(max=2)  # the texts are short
    for name in SMALL_FLOATS & set(arrays):
        arrays[name] *= 1 + turn % 3


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", sorted(cases()))
def test_replays_equal_eager_calls_and_allocate_nothing(name, dtype):
    arguments = cases(dtype)[name]
    pristine = {n: torch.from_numpy(a) for n, a in arguments.items() if hasattr(a, "dtype")}
    options = {n: a for n, a in arguments.items() if n not in pristine}
    arrays = {n: a.cuda() for n, a in pristine.items()}
    if name in ("arm_passes", "advance_batch"):
        options["ring"] = tlt_ext.PassRing(8, 1, pinned=True)
    op = getattr(flat, name)
    op(**arrays, **options)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(**arrays, **options)
    changed = set()
    gc.collect()  # what earlier tests left in cycles
    held = torch.cuda.memory_allocated()

    def replay():
        for turn in range(1000):
            if turn % 50 == 0:
                given = {n: a.clone() for n, a in pristine.items()}
                vary(given, turn // 50)
            if turn % 50 == 0 or turn % 50 == 49:
                for n, array in arrays.items():
                    array.copy_(given[n])
            graph.replay()
            if turn % 50 != 49:
                continue
            replayed = {n: a.cpu() for n, a in arrays.items()}
            for n, array in arrays.items():
                array.copy_(given[n])
            op(**arrays, **options)
            for n, array in arrays.items():
                assert kit.same_bits(replayed[n], array), n
            changed.update(n for n, a in replayed.items() if not kit.same_bits(a, given[n]))

    kit.assert_takes_no_memory(replay)
    assert changed
    assert torch.cuda.memory_allocated() == held
