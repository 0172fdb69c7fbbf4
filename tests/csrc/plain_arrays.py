"""Every op on NumPy or CuPy arrays, in a process without torch.

`python -m tests.csrc.plain_arrays numpy` checks that each op runs and writes;
`python -m tests.csrc.plain_arrays cupy` runs each on the GPU as well, on a stream of its own, and
compares all arrays. In float32 and float16; prints the ops that passed.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import tlt_ext
from tests.grouping import flat

Arrays = dict[str, Any]
VOCAB, HEADS, DIM, PAGE = 50, 2, 64, 16
TOLERANCE = {np.float32: 1e-5, np.float16: 2e-2}
# Arrays that come in the model's dtype.
MODEL_ARRAYS = {
    *("x", "weight", "norm_weight", "bias", "residual", "out", "qkv", "q_out", "q"),
    *("embedding", "hidden", "input_norm", "hidden_norm", "hidden_out", "logits", "draft_logits"),
    *("k_cache", "v_cache", "cache", "features", "feature_rows", "new_features"),
}


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def zeros(*shape: int, dtype: type = np.int32) -> np.ndarray:
    return np.zeros(shape, dtype)


def cases(dtype: type = np.float32) -> dict[str, Arrays]:
    """The arguments of one call of each op."""
    return {
        op: {
            name: value.astype(dtype) if name in MODEL_ARRAYS else value
            for name, value in arguments.items()
        }
        for op, arguments in float32_cases().items()
    }


def float32_cases() -> dict[str, Arrays]:
    rng = np.random.default_rng(0)

    def randn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def sampling(batch: int) -> Arrays:
        return {
            "temperature": np.ones(batch, np.float32),
            "top_k": zeros(batch),
            "top_p": np.ones(batch, np.float32),
            "request": np.arange(batch),
            "status": zeros(batch),
            "seed": 1,
        }

    def chain() -> Arrays:
        """A root and two drafted tokens."""
        return {
            "logits": randn(3, VOCAB),
            "tokens": ints(1, 2, 3),
            "parents": ints(-1, 0, 1),
            "position": ints(4, 5, 6),
            "row_start": ints(0, 3),
            "stop_ids": ints([-1]),
            "limit": ints(17),
            "emitted": zeros(1, 17),
            "logprobs": zeros(1, 17, dtype=np.float32),
            "num_emitted": zeros(1),
            "path": zeros(1, 17),
            "finish": zeros(1),
            **sampling(1),
        }

    def store(count: int) -> Arrays:
        return {
            "node_token": ints([3, 7, 9, 0, 0, 0]),
            "node_parent": ints([-1, 0, 1, 0, 0, 0]),
            "node_score": -np.array([[0, 1, 2, 0, 0, 0]], np.float32),
            "node_depth": ints([0, 1, 2, 0, 0, 0]),
            "node_count": ints(count),
        }

    rows = {"row_start": ints(0, 3), "context_len": ints(4), "position": ints(4, 5, 6)}
    paged = {"block_table": ints([1, 0]), "status": zeros(1)}
    caches = {name: randn(2, PAGE, 1, DIM) for name in ("k_cache", "v_cache")}
    drawn = {"temperature": np.ones(1, np.float32), "request": np.arange(1), "status": zeros(1)}
    x, wide, weight = randn(3, DIM), randn(3, 2 * DIM), randn(32, DIM)
    out, gated = (zeros(3, n, dtype=np.float32) for n in (32, 16))
    norms = {"input_norm": randn(DIM), "hidden_norm": randn(DIM)}
    embedded = {"embedding": randn(10, DIM), "eps": 1e-6, **norms}
    return {
        "rms_norm": {"x": x, "weight": randn(DIM), "out": np.zeros_like(x)},
        "silu_mul": {"x": wide, "out": np.zeros_like(x)},
        "linear_rows": {"x": x, "weight": weight, "out": out, "bias": randn(32)},
        "fold_partials": {"partials": randn(2, 3, 32), "out": np.zeros_like(out)},
        "linear_silu_mul": {"x": x, "weight": weight, "out": gated, "norm_weight": randn(DIM)},
        "linear_append": {
            "x": x,
            "weight": randn((HEADS + 2) * DIM, DIM),
            "q_out": zeros(3, HEADS, DIM, dtype=np.float32),
            "cos_sin": randn(32, DIM),
            **rows,
            **paged,
            **caches,
        },
        "append_kv": {
            "qkv": randn(3, (HEADS + 2) * DIM),
            "q_out": zeros(3, HEADS, DIM, dtype=np.float32),
            "cos_sin": randn(32, DIM),
            **rows,
            **paged,
            **caches,
        },
        "tree_attention": {
            "q": randn(3, HEADS, DIM),
            "out": zeros(3, HEADS, DIM, dtype=np.float32),
            **rows,
            **paged,
            **caches,
        },
        "commit_path": {
            "k_cache": randn(2, 2, PAGE, 1, DIM),
            "v_cache": randn(2, 2, PAGE, 1, DIM),
            "features": randn(2, PAGE, 8),
            "feature_rows": randn(3, 8),
            "row_start": ints(0, 3),
            "path": ints([0, 2]),
            "num_emitted": ints(2),
            "context_len": ints(4),
            **paged,
        },
        "copy_pages": {
            "cache": randn(2, 3, PAGE, 1, DIM),
            "source": ints(0),
            "destination": ints(2),
        },
        "gather_new_rows": {
            "features": randn(2, PAGE, 8),
            "tokens": np.arange(32, dtype=np.int32)[None],
            "slot": ints(0),
            "context_len": ints(6),
            "num_new": ints(2),
            "row_start": zeros(2),
            "ids": zeros(4),
            "position": zeros(4),
            "first": zeros(1),
            "last": zeros(1),
            "new_features": zeros(4, 8, dtype=np.float32),
            **paged,
        },
        "sample": {
            "logits": randn(3, VOCAB),
            "position": ints(4, 5, 6),
            "tokens": zeros(3),
            "logprobs": zeros(3, dtype=np.float32),
            **sampling(3),
        },
        "verify_tree": chain(),
        "verify_rejection": {
            "draft_probs": np.full((3, VOCAB), 1 / VOCAB, np.float32),
            **chain(),
        },
        "draft_inputs": {
            "ids": ints(3, 1),
            "hidden": x[:2],
            "out": zeros(2, 2 * DIM, dtype=np.float32),
            **embedded,
        },
        "draft_level_inputs": {
            "node_token": ints([3, 7, 9]),
            "frontier": ints([2, -1]),
            "row": ints([1, 0]),
            "context_len": ints(4),
            "hidden": x[:2],
            "out": zeros(2, 2 * DIM, dtype=np.float32),
            "hidden_out": np.zeros_like(x[:2]),
            "position": zeros(2),
            "depth": 0,
            **embedded,
        },
        "expand_tree": {
            "draft_logits": randn(1, VOCAB),
            "frontier": ints([0]),
            "next_frontier": zeros(1, 2),
            "next_row": zeros(1, 2),
            "next_ancestors": zeros(1, 2, 16, dtype=np.uint8),
            "root_position": ints(4),
            "seed": 1,
            "slot_base": 0,
            "vocab_size": VOCAB,
            **store(1),
            **drawn,
        },
        "select_nodes": {
            "root_position": ints(4),
            "tokens": zeros(4),
            "parents": zeros(4),
            "position": zeros(4),
            "ancestors": zeros(4, 16, dtype=np.uint8),
            "source": zeros(4),
            "row_start": zeros(2),
            "num_verify": 4,
            **store(3),
        },
        "ngram_propose": {
            "tokens": ints([1, 2, 3, 4], [9, 2, 3, 0]),
            "length": ints(4, 3),
            "group_slots": ints([1, 0]),
            "slot": ints(1),
            "context_len": ints(2),
            "seed": 1,
            "depth": 2,
            "top_k": 2,
            **store(0),
            **drawn,
        },
        "arm_passes": {"control": zeros(8), "limit": 8},
        "advance_batch": {
            "emitted": np.arange(17, dtype=np.int32)[None],
            "logprobs": randn(1, 17),
            "num_emitted": ints(2),
            "finish": zeros(1),
            "status": zeros(1),
            "context_len": ints(12),
            "slot": ints(0),
            "tokens": zeros(1, 32),
            "last_token": zeros(1),
            "remaining": ints(10),
            "num_new": zeros(1),
            "granted": ints(16),
            "control": ints(1, 0, 8, 0, 0, 0, 0, 0),
            "lookahead": 4,
        },
    }


def run(name: str, arguments: Arrays, move: Callable[[np.ndarray], Any], pinned: bool) -> Arrays:
    """Calls an op on copies of its arrays; returns them as they are afterwards."""
    arrays = {n: move(a.copy()) for n, a in arguments.items() if isinstance(a, np.ndarray)}
    options = {n: a for n, a in arguments.items() if n not in arrays}
    if name in ("arm_passes", "advance_batch"):
        options["ring"] = tlt_ext.PassRing(8, 1, pinned=pinned)
    getattr(flat, name)(**arrays, **options)
    return arrays


def compare_on_gpu(name: str, arguments: Arrays, wanted: Arrays, tolerance: float) -> None:
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        got = run(name, arguments, cupy.asarray, pinned=True)
        stream.synchronize()
        for array in wanted:
            np.testing.assert_allclose(
                cupy.asnumpy(got[array]),
                wanted[array],
                rtol=10 * tolerance,
                atol=tolerance,
                err_msg=f"{name}: {array}",
            )


def main(library: str) -> None:
    names = {op.__name__ for op in tlt_ext.OPS}
    for dtype, tolerance in TOLERANCE.items():
        calls = cases(dtype)
        assert set(calls) == names, f"ops and cases differ: {names ^ set(calls)}"
        for name, arguments in calls.items():
            done = run(name, arguments, lambda array: array, pinned=False)
            assert any(not np.array_equal(a, arguments[n]) for n, a in done.items()), name
            if library == "cupy":
                compare_on_gpu(name, arguments, done, tolerance)
            sys.stdout.write(f"{name}\n")
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main(sys.argv[1])
