"""More requests, pages or pieces of rows than an axis of a CUDA grid has room for: 65,535."""

import numpy as np
import pytest
import torch

from tests import kit
from tests.csrc.plain_arrays import Arrays, cases
from tests.grouping import flat

pytestmark = [kit.gpu, kit.needs_gpu]
MANY = 65536
PER_REQUEST = {
    *("context_len", "block_table", "status", "path", "num_emitted", "slot", "num_new"),
    *("first", "last", "ids", "source", "destination"),
}


def refused(op: str, arguments: Arrays, what: str) -> None:
    on_card = {
        name: torch.from_numpy(value).cuda() if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    match = f"{op}: expected at most 65535 {what} on a CUDA device, got {MANY}"
    with pytest.raises(ValueError, match=match):
        getattr(flat, op)(**on_card)


@pytest.mark.parametrize(
    ("op", "dtype", "what"),
    [
        ("append_kv", np.float16, "requests"),
        ("append_kv", np.float32, "requests"),
        ("tree_attention", np.float16, "requests"),
        ("tree_attention", np.float32, "requests"),
        ("commit_path", np.float16, "requests"),
        ("gather_new_rows", np.float16, "requests"),
        ("copy_pages", np.float16, "pages"),
    ],
)
def test_too_many_are_refused_by_name(op, dtype, what):
    arguments = cases(dtype)[op]
    each = PER_REQUEST | ({"position", "new_features"} if op == "gather_new_rows" else set())
    many = {n: np.repeat(a, MANY, axis=0) if n in each else a for n, a in arguments.items()}
    if "row_start" in arguments:
        start = arguments["row_start"]
        many["row_start"] = np.concatenate([start, np.repeat(start[-1:], MANY - 1)])
    refused(op, many, what)


def test_linear_append_refuses_more_pieces_than_fit():
    """Of rows that only the kernel that takes them in pieces takes: K is not a multiple of 64."""
    arguments, rows, k = cases(np.float16)["linear_append"], MANY * 16, 72
    weight = arguments["weight"]
    arguments |= {
        "x": np.zeros((rows, k), np.float16),
        "weight": np.zeros((len(weight), k), np.float16),
        "q_out": np.zeros((rows, *arguments["q_out"].shape[1:]), np.float16),
        "position": np.zeros(rows, np.int32),
    }
    refused("linear_append", arguments, "pieces of 16 rows")
