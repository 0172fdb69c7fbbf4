"""`linear_rows` and its fusions against the card's copy bandwidth and cuBLAS (`torch.mm`), bf16.

`median_us` is a call among many in one graph with `pdl`, each on its own weights, as in a model's
step. `alone_us` is a graph of one call.
"""

from functools import cache, partial
from typing import Any

import torch

import tlt_ext
from profiling.rig import timing
from profiling.rig.bench import Bench

SMOLLM2 = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
QWEN2_05B = [(1152, 896), (896, 896), (9728, 896), (896, 4864)]
QWEN2_15B = [(2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)]
QWEN2_7B = [(4608, 3584), (3584, 3584), (37888, 3584), (18944, 3584), (3584, 18944)]
HEAD = (152064, 3584)
ROWS = [1, 4, 8, 16, 32, 64, 128, 160, 256, 512, 1056]  # 160: 32 requests x a chain of 5
VERIFY_ROWS = 1056  # 32 requests x a tree of 33
TARGETS = {
    "linear_1row_4608x3584_of_copy": (1, 4608, 3584),
    "linear_1row_18944x3584_of_copy": (1, 18944, 3584),
    "linear_1row_3584x18944_of_copy": (1, 3584, 18944),
    "linear_16row_152064x3584_of_copy": (16, *HEAD),
}


def tensors(rows: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return randn(rows, k), randn(k), randn(n, k) / k**0.5


def bytes_moved(rows: int, n: int, k: int) -> int:
    return 2 * (n * k + rows * (k + n))


@cache
def cublas_is_invariant(n: int, k: int) -> bool:
    """Whether row 0 of torch.mm has the same bits for all row counts of this benchmark."""
    x, _, weight = tensors(max(ROWS), n, k)
    alone = torch.mm(x[:1], weight.t())
    return all(torch.equal(torch.mm(x[:rows], weight.t())[:1], alone) for rows in ROWS)


def copies(weight: torch.Tensor) -> list[torch.Tensor]:
    """As many copies of the weight as are needed for a cold L2."""
    count = timing.num_cold_inputs(weight.numel() * weight.element_size())
    return [weight, *(weight.clone() for _ in range(count - 1))]


def run_linear(bench: Bench, rows: int, n: int, k: int) -> None:
    case = f"linear {rows}x{n}x{k}"
    if not bench.wanted(case):
        return
    x, _, weight = tensors(rows, n, k)
    out, peer_out = (torch.empty(rows, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weights = copies(weight)
    arms: dict[str, list[timing.Call]] = {
        "ours": [partial(tlt_ext.linear_rows, x, w, out, pdl=True) for w in weights],
        "cublas": [partial(torch.mm, x, w.t(), out=peer_out) for w in weights],
    }
    times = timing.measure_in_turn(arms)
    alone = timing.measure({name: calls[0] for name, calls in arms.items()})
    row = bench.add(
        case,
        times["ours"],
        bytes_moved(rows, n, k),
        {"cublas": times["cublas"]},
        cublas_us=round(times["cublas"].median_us, 3),
        alone_us=round(alone["ours"].median_us, 3),
        cublas_alone_us=round(alone["cublas"].median_us, 3),
        cublas_invariant=cublas_is_invariant(n, k),
    )
    for target, shape in TARGETS.items():
        if shape == (rows, n, k):
            bench.got[target] = row["fraction_of_copy"]


def run_fused(bench: Bench, rows: int, n: int, k: int) -> None:
    """A norm before and an activation after a linear, fused and as separate ops."""
    x, norm_weight, weight = tensors(rows, n, k)
    between, out = torch.empty_like(x), torch.zeros(rows, n, device="cuda", dtype=torch.bfloat16)
    gated = torch.empty(rows, n // 2, device="cuda", dtype=torch.bfloat16)

    def norm_two(w: torch.Tensor) -> None:
        tlt_ext.rms_norm(x, norm_weight, between)
        tlt_ext.linear_rows(between, w, out, pdl=True)

    def silu_two(w: torch.Tensor) -> None:
        tlt_ext.linear_rows(x, w, out, pdl=True)
        tlt_ext.silu_mul(out, gated)

    def three(w: torch.Tensor) -> None:
        norm_two(w)
        tlt_ext.silu_mul(out, gated)

    norm: dict[str, Any] = {"norm_weight": norm_weight, "pdl": True}
    ops = {
        "rms_norm_linear": (lambda w: tlt_ext.linear_rows(x, w, out, **norm), norm_two),
        "linear_silu_mul": (lambda w: tlt_ext.linear_silu_mul(x, w, gated, pdl=True), silu_two),
        "rms_norm_linear_silu_mul": (lambda w: tlt_ext.linear_silu_mul(x, w, gated, **norm), three),
    }
    weights = copies(weight)
    for op, (fused, apart) in ops.items():
        case = f"{op} {rows}x{n}x{k}"
        if bench.wanted(case):
            arms = {"fused": fused, "apart": apart}
            times = timing.measure_in_turn(
                {name: [partial(call, w) for w in weights] for name, call in arms.items()}
            )
            moved = bytes_moved(rows, n, k)
            bench.add(case, times["fused"], moved, {"ops_apart": times["apart"]})


def run(bench: Bench) -> None:
    if bench.quick:
        for rows, n, k in TARGETS.values():
            run_linear(bench, rows, n, k)
        return
    linears = [(*shape, r) for shape in SMOLLM2 + QWEN2_05B + QWEN2_15B + QWEN2_7B for r in ROWS]
    linears += [(*HEAD, rows) for rows in ROWS[:6]]
    for n, k, rows in linears:
        run_linear(bench, rows, n, k)
    large = QWEN2_15B + QWEN2_7B
    worst = {
        "linear_over_cublas_x": [each for each in linears if each[2] != VERIFY_ROWS],
        "linear_verify_over_cublas_x": [(*shape, VERIFY_ROWS) for shape in large],
    }
    for target, among in worst.items():
        names = [f"linear {rows}x{n}x{k}" for n, k, rows in among]
        bench.book(target, names, lambda row: row["ratio_to"]["cublas"], max)
    for n, k in [(4608, 3584), (37888, 3584), (960, 576), (3072, 576)]:
        for rows in [1, 4, 8, 16, 32, 64, 128]:
            run_fused(bench, rows, n, k)
