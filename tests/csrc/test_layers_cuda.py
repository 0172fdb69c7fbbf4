"""The CUDA layers against the CPU's, their row invariance, and their replay in a graph."""

import pytest
import torch

import tlt_ext
from tests import kit

pytestmark = [kit.gpu, kit.needs_gpu]

ROWS = [1, 2, 4, 5, 8, 16, 17, 33, 64, 100, 512]
HALVES = [torch.float16, torch.bfloat16]
# Odd N and K, fewer blocks of K than parts, small and wide models, K longer than shared memory.
SHAPES = [(37, 100), (401, 1001), (960, 576), (576, 1536), (9001, 200), (136, 3584), (72, 18944)]
OPS = ["linear_rows", "rms_norm_linear", "silu_mul_linear"]


def inputs(rows, n, k, dtype):
    """x for any of OPS [rows, 2 k], norm weight, weight, bias; x of size 1, sums too."""
    x = kit.randn(rows, 2 * k, seed=0, dtype=dtype)
    weight = (kit.randn(n, k, seed=1) / k**0.5).to(dtype)
    return x, kit.randn(k, seed=2, dtype=dtype), weight, kit.randn(n, seed=3, dtype=dtype)


def run(op, x, norm_weight, weight, out, **options):
    k = weight.shape[1]
    if op == "linear_rows":
        tlt_ext.linear_rows(x[:, :k], weight, out, **options)
    elif op == "rms_norm_linear":
        tlt_ext.rms_norm_linear(x[:, :k], norm_weight, weight, out, eps=1e-5, **options)
    else:
        tlt_ext.silu_mul_linear(x, weight, out, **options)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bits_do_not_depend_on_rows_or_on_the_row_index(op, dtype, n, k):
    x, norm_weight, weight, _ = (t.cuda() for t in inputs(max(ROWS), n, k, dtype))
    alone = torch.full((max(ROWS), n), float("nan"), device="cuda")
    for row in range(max(ROWS)):
        run(op, x[row : row + 1], norm_weight, weight, alone[row : row + 1])
    assert not alone.isnan().any()
    for rows in ROWS:
        first = (max(ROWS) - rows) // 2  # another place in the batch for every count
        out = torch.full((rows, n), float("nan"), device="cuda")
        run(op, x[first : first + rows], norm_weight, weight, out)
        assert torch.equal(out, alone[first : first + rows]), rows


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 16, pytest.param(40, marks=pytest.mark.sanitize)])
def test_linear_ops_agree_with_the_cpu(op, dtype, rows):
    """float32 has the CPU's bits; 16-bit types differ by the order of the sum alone."""
    for n, k in [(37, 100), (129, 577), (960, 576)]:
        x, norm_weight, weight, bias = inputs(rows, n, k, dtype)
        residual = kit.randn(rows, n, seed=4, dtype=dtype)
        expected, out = torch.empty_like(residual), torch.empty_like(residual, device="cuda")
        run(op, x, norm_weight, weight, expected, bias=bias, residual=residual)
        x, norm_weight, weight, bias, residual = (
            t.cuda() for t in (x, norm_weight, weight, bias, residual)
        )
        run(op, x, norm_weight, weight, out, bias=bias, residual=residual)
        if dtype == torch.float32:
            assert kit.same_bits(out, expected)
        else:
            assert kit.relative_error(out, expected) <= kit.TOLERANCE[dtype]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 577), (5, 1536)])
def test_norm_and_activation_agree_with_the_cpu(dtype, rows, dim):
    x = 4 * kit.randn(rows, 2 * dim, seed=0, dtype=dtype)
    weight = kit.randn(dim, seed=1, dtype=dtype)
    for name, call in {
        "norm": lambda x, w, out: tlt_ext.rms_norm(x[:, :dim], w, out),
        "silu": lambda x, w, out: tlt_ext.silu_mul(x, out),
    }.items():
        expected = torch.empty(rows, dim, dtype=dtype)
        call(x, weight, expected)
        out = torch.empty_like(expected, device="cuda")
        call(x.cuda(), weight.cuda(), out)
        if dtype == torch.float32:
            assert kit.same_bits(out, expected), name
        else:
            # One unit in the last place at most, and that where float32 fell beside a tie.
            assert (out.cpu() != expected).float().mean() < 0.02, name
            assert kit.relative_error(out, expected) <= kit.TOLERANCE[dtype], name


@pytest.mark.parametrize("rows", [3, 40])
def test_graph_replays_read_new_inputs_and_allocate_nothing(rows):
    x, norm_weight, weight, bias = (t.cuda() for t in inputs(rows, 960, 576, torch.bfloat16))
    outs = {op: torch.empty(rows, 960, dtype=torch.bfloat16, device="cuda") for op in OPS}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for op in OPS:
            run(op, x, norm_weight, weight, outs[op], bias=bias)
    expected = {op: torch.empty_like(out) for op, out in outs.items()}
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for replay in range(1000):
        if replay % 100 == 0:
            x.copy_(kit.randn(rows, 2 * 576, seed=replay, dtype=torch.bfloat16))
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == before
    for op in OPS:
        run(op, x, norm_weight, weight, expected[op], bias=bias)
        assert kit.same_bits(outs[op], expected[op])


def test_layers_check_what_only_a_cuda_kernel_limits():
    big = torch.empty(1, (1 << 30) + 2, dtype=torch.bfloat16, device="cuda")
    half = big[:, : (1 << 29) + 1]
    with pytest.raises(ValueError, match=r"silu_mul: x: expected at most 2\^30 columns on a CUDA"):
        tlt_ext.silu_mul(big, half)
    with pytest.raises(ValueError, match="rms_norm: x: expected at most"):
        tlt_ext.rms_norm(big, big[0], big)
    with pytest.raises(ValueError, match="linear_rows: x: expected at most"):
        tlt_ext.linear_rows(half, half, torch.empty(1, 1, dtype=torch.bfloat16, device="cuda"))
