"""Layers equal their float64 references, row by row and bit by bit."""

import pytest
import torch

import tlt_ext
from tests import kit, reference
from tlt_ext import _C
from tlt_ext.limits import MAX_FOLD_BLOCKS


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


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dim", [32, 5001])  # chunks that a CUDA thread holds, and more
def test_rms_norm_in_place_and_empty(device, dim):
    x, weight = kit.randn(4, dim, seed=0).to(device), torch.ones(dim, device=device)
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


# ---- silu_mul --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 7), (5, 1536), (2, 4097)])
def test_silu_mul_equals_reference(device, dtype, rows, dim):
    x = 4 * kit.randn(rows, 2 * dim + 3, seed=0, dtype=dtype).to(device)[:, : 2 * dim]
    out = torch.full((rows, dim + 1), float("nan"), dtype=dtype, device=device)
    tlt_ext.silu_mul(x, out[:, :dim])
    kit.assert_close(out[:, :dim], reference.silu_mul(x))
    assert out[:, dim].isnan().all()


@pytest.mark.parametrize("device", kit.DEVICES)
def test_silu_mul_of_large_gates_of_both_signs(device):
    gates = [-3e38, -1e4, -200.0, -88.0, -86.0, -20.0, -1e-30, -0.0, 0.0, 1e-30, 20.0, 86.0, 3e38]
    gate = torch.tensor(gates + [float("inf"), float("nan")], device=device)
    out = torch.empty(len(gate), 1, device=device)
    tlt_ext.silu_mul(torch.stack([gate, torch.ones_like(gate)], 1), out)
    expected = reference.silu_mul(torch.stack([gate, torch.ones_like(gate)], 1))
    # exp_f32 gives 0 below -87, where silu is under 1e-35: the absolute term covers that alone.
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-35, equal_nan=True)
    assert out[4] < 0 and out[-2] == float("inf")


@pytest.mark.parametrize("device", kit.DEVICES)
def test_silu_mul_rows_are_invariant_in_place_and_empty(device):
    x = kit.randn(33, 2 * 37, seed=0).to(device)
    out = torch.empty(33, 37, device=device)
    tlt_ext.silu_mul(x, out)
    for row in range(33):
        alone = torch.empty(1, 37, device=device)
        tlt_ext.silu_mul(x[row : row + 1], alone)
        assert kit.same_bits(alone[0], out[row])
    tlt_ext.silu_mul(x, x[:, :37])
    assert kit.same_bits(x[:, :37], out)
    tlt_ext.silu_mul(x[:0], out[:0])
    tlt_ext.silu_mul(x[:, :0], out[:, :0])


def test_silu_mul_checks_its_arguments():
    x, out = kit.randn(4, 8, seed=0), torch.empty(4, 4)
    with pytest.raises(TypeError, match="silu_mul: x: expected dtype float32 or float16"):
        tlt_ext.silu_mul(x.int(), out)
    with pytest.raises(TypeError, match="out: expected the dtype of x, float32, got float16"):
        tlt_ext.silu_mul(x, out.half())
    with pytest.raises(ValueError, match="x: expected a contiguous last axis"):
        tlt_ext.silu_mul(torch.empty(8, 4).t(), out)
    with pytest.raises(ValueError, match=r"x: expected shape \[\*, \*\], got \[8\]"):
        tlt_ext.silu_mul(x[0], out)
    with pytest.raises(ValueError, match=r"x: expected an even last axis .*, got 7"):
        tlt_ext.silu_mul(x[:, :7], out)
    with pytest.raises(ValueError, match=r"out: expected shape \[4, 4\], got \[4, 3\]"):
        tlt_ext.silu_mul(x, out[:, :3])
    with pytest.raises(ValueError, match="out: expected a contiguous last axis"):
        tlt_ext.silu_mul(x, torch.empty(4, 4).t())


# ---- linear_rows -----------------------------------------------------------------------------

LINEAR_SHAPES = [(1, 1, 1), (3, 5, 7), (2, 17, 16), (5, 33, 100), (70, 19, 577), (4, 131, 1001)]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = tlt_ext.num_threads()
    tlt_ext.set_num_threads(request.param)
    yield request.param
    tlt_ext.set_num_threads(before)


def linear_inputs(rows, n, k, dtype, device="cpu", seed=0):
    shapes = ((rows, k), (n, k), (n,))
    return [
        kit.randn(*shape, seed=seed + i, dtype=dtype).to(device) for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), LINEAR_SHAPES)
def test_linear_rows_equals_reference(device, dtype, rows, n, k):
    x, weight, bias = linear_inputs(rows, n, k, dtype, device)
    for out_dtype in {dtype, torch.float32}:
        residual = kit.randn(rows, n, seed=3, dtype=out_dtype).to(device)
        out = torch.full((rows, n), float("nan"), dtype=out_dtype, device=device)
        tlt_ext.linear_rows(x, weight, out)
        kit.assert_close(out, reference.linear_rows(x, weight))
        tlt_ext.linear_rows(x, weight, out, bias=bias)
        kit.assert_close(out, reference.linear_rows(x, weight, bias))
        expected = reference.linear_rows(x, weight, bias, residual)
        tlt_ext.linear_rows(x, weight, out, bias=bias, residual=residual)
        kit.assert_close(out, expected)
        tlt_ext.linear_rows(x, weight, residual, bias=bias, residual=residual)
        assert kit.same_bits(residual, out)


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(
    ("rows", "k", "offset"), [(5, 100, 3), (5, 104, 8), (19, 100, 3), (19, 104, 8)]
)
def test_linear_rows_takes_strided_rows_and_reads_and_writes_nothing_else(
    device, dtype, rows, k, offset
):
    """Offsets of 8 keep 16-byte loads, of 3 do not; memory around the arrays is NaN."""
    x, weight, bias = linear_inputs(rows, 33, k, dtype, device)
    residual = kit.randn(rows, 33, seed=3, dtype=dtype).to(device)
    dense = torch.empty_like(residual)
    tlt_ext.linear_rows(x, weight, dense, bias=bias, residual=residual)
    wide_x, wide_weight, wide_out, wide_residual = (
        torch.full(shape, float("nan"), dtype=dtype, device=device)
        for shape in ((rows + 3, k + 24), (36, k + 16), (rows + 2, 50), (rows + 2, 40))
    )
    inner = slice(offset, offset + k)
    wide_x[:rows, inner], wide_weight[:33, inner] = x, weight
    wide_residual[:rows, 1:34] = residual
    tlt_ext.linear_rows(
        wide_x[:rows, inner],
        wide_weight[:33, inner],
        wide_out[:rows, 7:40],
        bias=bias,
        residual=wide_residual[:rows, 1:34],
    )
    assert kit.same_bits(wide_out[:rows, 7:40], dense)
    assert wide_out[:, :7].isnan().all() and wide_out[:, 40:].isnan().all()
    assert wide_out[rows:].isnan().all()


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(("n", "k"), [(37, 100), (64, 576), (401, 1001)])
def test_linear_rows_bits_do_not_depend_on_rows_or_threads(threads, dtype, n, k):
    x, weight, _ = linear_inputs(130, n, k, dtype)
    alone = torch.empty(130, n, dtype=torch.float32)
    for row in range(130):
        tlt_ext.linear_rows(x[row : row + 1], weight, alone[row : row + 1])
    for rows in (2, 3, 4, 5, 8, 16, 17, 33, 64, 65, 130):
        first = 130 - rows  # another place in the batch for every count
        out = torch.empty(rows, n, dtype=torch.float32)
        tlt_ext.linear_rows(x[first:], weight, out)
        assert kit.same_bits(out, alone[first:])


def fma_part(x: torch.Tensor, w: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """One part of the sum of csrc/layers/dot.h for float32 rows, each fma rounded from float64."""
    pad = -x.shape[1] % 16
    x, w = (torch.nn.functional.pad(t.double(), (0, pad)) for t in (x, w))
    lanes = torch.zeros(x.shape[0], w.shape[0], 16)
    for k in range(0, x.shape[1], 16):
        if k // 64 % parts == part:
            product = x[:, None, k : k + 16] * w[None, :, k : k + 16]
            lanes = (product + lanes.double()).float()
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes[..., 0]


def fma_dot(x: torch.Tensor, w: torch.Tensor, parts: int = 8) -> torch.Tensor:
    """The whole sum: the parts, added as a binary tree."""
    sums = [fma_part(x, w, part, parts) for part in range(parts)]
    while len(sums) > 1:
        sums = [low + high for low, high in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("parts", [8, 4, 2, 1])
def test_every_dot_variant_sums_in_the_one_order_with_fma(parts):
    """The vector widths and the portable version agree bit for bit, edges of tiles included."""
    variants = _C.dot_variants()
    assert variants[-1] == "portable"
    shapes = [
        (1, 1, 1),
        (4, 4, 32),
        (5, 7, 15),
        (6, 9, 65),
        (3, 18, 250),
        (5, 6, 577),
        (9, 5, 1096),
    ]
    for rows, cols, k in shapes:
        x, w, _ = linear_inputs(rows, cols, k, torch.float32)
        expected = fma_dot(x, w, parts)
        for index, variant in enumerate(variants):
            out = torch.full((rows, cols), float("nan"))
            _C.dot_rows(index, x, w, out, parts)
            assert kit.same_bits(out, expected), (variant, rows, cols, k)


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize(("rows", "k"), [(3, 1), (5, 250), (9, 577), (2, 1600)])
def test_float32_linears_add_the_parts_as_a_tree(device, rows, k):
    x, weight, bias = linear_inputs(rows, 37, k, torch.float32)
    out = torch.empty(rows, 37, device=device)
    tlt_ext.linear_rows(x.to(device), weight.to(device), out)
    assert kit.same_bits(out, fma_dot(x, weight))


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_linear_rows_on_empty_inputs(device, dtype):
    x, weight, bias = linear_inputs(3, 4, 8, dtype, device)
    out = torch.empty(3, 4, dtype=dtype, device=device)
    tlt_ext.linear_rows(x[:0], weight, out[:0])
    tlt_ext.linear_rows(x, weight[:0], out[:, :0])
    tlt_ext.linear_rows(x[:, :0], weight[:, :0], out, bias=bias)
    assert kit.same_bits(out, bias.expand(3, 4))


def bad_linear_calls(call, x, weight):
    """The checks that the linear ops share; `call(x, weight, out, **options)` runs one of them."""
    out, bias = torch.empty(4, 3), torch.zeros(3)
    with pytest.raises(TypeError, match="x: expected dtype float32 or float16 or bfloat16"):
        call(x.int(), weight, out)
    with pytest.raises(TypeError, match="weight: expected the dtype of x, float32, got float16"):
        call(x, weight.half(), out)
    with pytest.raises(TypeError, match="out: expected the dtype of x, float32, got float16"):
        call(x, weight, out.half())
    with pytest.raises(TypeError, match="out: expected dtype float16 or float32, got bfloat16"):
        call(x.half(), weight.half(), out.bfloat16())
    with pytest.raises(TypeError, match="bias: expected the dtype of x, float32, got float16"):
        call(x, weight, out, bias=bias.half())
    with pytest.raises(TypeError, match="residual: expected the dtype of out, float32, got"):
        call(x.half(), weight.half(), out, residual=out.half())
    with pytest.raises(ValueError, match=r"x: expected shape \[\*, \*\]"):
        call(x[0], weight, out)
    with pytest.raises(ValueError, match="x: expected a contiguous last axis"):
        call(x.t().contiguous().t(), weight, out)
    with pytest.raises(ValueError, match=r"weight: expected shape \[\*, 8\], got \[3, 7\]"):
        call(x, weight[:, :7], out)
    with pytest.raises(ValueError, match="weight: expected a contiguous last axis"):
        call(x, weight.t().contiguous().t(), out)
    with pytest.raises(ValueError, match=r"out: expected shape \[4, 3\], got \[4, 2\]"):
        call(x, weight, out[:, :2])
    with pytest.raises(ValueError, match="out: expected a contiguous last axis"):
        call(x, weight, torch.empty(3, 4).t())
    with pytest.raises(ValueError, match=r"bias: expected shape \[3\], got \[2\]"):
        call(x, weight, out, bias=bias[:2])
    with pytest.raises(ValueError, match="bias: expected a contiguous array"):
        call(x, weight, out, bias=torch.zeros(6)[::2])
    with pytest.raises(ValueError, match=r"residual: expected shape \[4, 3\], got \[3, 3\]"):
        call(x, weight, out, residual=out[:3])
    with pytest.raises(ValueError, match="residual: expected a contiguous last axis"):
        call(x, weight, out, residual=torch.empty(3, 4).t())
    with pytest.raises(ValueError, match="out: expected memory separate from x, got the same"):
        call(x, weight, x[:, :3])


def test_linear_ops_check_their_arguments():
    x, weight = kit.randn(4, 8, seed=0), kit.randn(3, 8, seed=1)
    bad_linear_calls(tlt_ext.linear_rows, x, weight)
    out = torch.empty(4, 3)
    with pytest.raises(TypeError, match="norm_weight: expected the dtype of x, float32, got"):
        tlt_ext.linear_rows(x, weight, out, norm_weight=torch.ones(8).half())
    with pytest.raises(ValueError, match=r"norm_weight: expected shape \[8\], got \[7\]"):
        tlt_ext.linear_rows(x, weight, out, norm_weight=torch.ones(7))
    with pytest.raises(ValueError, match="norm_weight: expected a contiguous array"):
        tlt_ext.linear_rows(x, weight, out, norm_weight=torch.ones(16)[::2])
    with pytest.raises(ValueError, match="linear_rows: eps: expected 0 or more"):
        tlt_ext.linear_rows(x, weight, out, eps=-1.0)


def test_linear_silu_mul_checks_its_arguments():
    x, weight, out = kit.randn(4, 8, seed=0), kit.randn(6, 8, seed=1), torch.empty(4, 3)
    with pytest.raises(TypeError, match="linear_silu_mul: x: expected dtype float32 or float16"):
        tlt_ext.linear_silu_mul(x.int(), weight, out)
    with pytest.raises(ValueError, match="x: expected a contiguous last axis"):
        tlt_ext.linear_silu_mul(x.t().contiguous().t(), weight, out)
    with pytest.raises(ValueError, match=r"weight: expected shape \[\*, 8\], got \[6, 7\]"):
        tlt_ext.linear_silu_mul(x, weight[:, :7], out)
    with pytest.raises(ValueError, match="weight: expected as many rows of gate as of up, got 5"):
        tlt_ext.linear_silu_mul(x, weight[:5], out)
    with pytest.raises(TypeError, match="out: expected the dtype of x, float32, got float16"):
        tlt_ext.linear_silu_mul(x, weight, out.half())
    with pytest.raises(ValueError, match=r"out: expected shape \[4, 3\], got \[4, 2\]"):
        tlt_ext.linear_silu_mul(x, weight, out[:, :2])
    with pytest.raises(ValueError, match="out: expected a contiguous last axis"):
        tlt_ext.linear_silu_mul(x, weight, torch.empty(3, 4).t())
    with pytest.raises(ValueError, match="out: expected memory separate from x, got the same"):
        tlt_ext.linear_silu_mul(x, weight, x[:, :3])
    with pytest.raises(TypeError, match="norm_weight: expected the dtype of x, float32, got"):
        tlt_ext.linear_silu_mul(x, weight, out, norm_weight=torch.ones(8).half())
    with pytest.raises(ValueError, match="linear_silu_mul: eps: expected 0 or more"):
        tlt_ext.linear_silu_mul(x, weight, out, eps=-1.0)


# ---- partial sums ----------------------------------------------------------------------------


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 40, 576), (5, 37, 1536), (3, 16, 64), (9, 24, 100), (40, 64, 1000)]
)
def test_partial_sums_of_all_ranks_have_the_bits_of_one(device, dtype, ranks, rows, n, k):
    """Some ranks have an incomplete block of K, some have none."""
    x, weight, bias = linear_inputs(rows, n, k, dtype, device)
    partials = []
    for rank in range(ranks):
        columns = reference.columns_of(k, rank, ranks).to(device)
        partials.append(torch.full((rows, n), float("nan"), device=device))
        tlt_ext.linear_rows(x[:, columns], weight[:, columns], partials[-1], parts=8 // ranks)
    for out_dtype in {dtype, torch.float32}:
        residual = kit.randn(rows, n, seed=3, dtype=out_dtype).to(device)
        for options in ({}, {"bias": bias}, {"bias": bias, "residual": residual}):
            out, alone = torch.full_like(residual, float("nan")), torch.empty_like(residual)
            tlt_ext.linear_rows(x, weight, alone, **options)
            tlt_ext.fold_partials(partials, out, **options)
            assert kit.same_bits(out, alone), (out_dtype, list(options))
        kit.assert_close(out, reference.fold_partials(partials, bias, residual))


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("n", [1, 24, 1027])
def test_fold_partials_takes_strided_rows_in_place(device, dtype, n):
    wide = [kit.randn(5, n + 3, seed=i).to(device) for i in range(4)]
    residual = kit.randn(5, n, seed=9, dtype=dtype).to(device)
    out = torch.full((5, n + 5), float("nan"), dtype=dtype, device=device)
    out[:, 2 : n + 2] = residual
    partials = [array[:, 1 : n + 1] for array in wide]
    tlt_ext.fold_partials(partials, out[:, 2 : n + 2], residual=out[:, 2 : n + 2])
    (a, b, c, d) = partials
    assert kit.same_bits(out[:, 2 : n + 2], (((a + b) + (c + d)) + residual.float()).to(dtype))
    assert out[:, :2].isnan().all() and out[:, n + 2 :].isnan().all()
    tlt_ext.fold_partials([a[:0], b[:0]], out[:0, :n])


def test_partial_sums_check_their_arguments():
    x, weight, out = kit.randn(4, 64, seed=0), kit.randn(3, 64, seed=1), torch.empty(4, 3)
    with pytest.raises(ValueError, match="linear_rows: parts: expected 8, 4, 2 or 1, got 3"):
        tlt_ext.linear_rows(x, weight, out, parts=3)
    with pytest.raises(TypeError, match="out: expected dtype float32, got float16"):
        tlt_ext.linear_rows(x.half(), weight.half(), out.half(), parts=4)
    for name, array in {"bias": out[0], "residual": out, "norm_weight": x[0]}.items():
        with pytest.raises(ValueError, match="norm_weight, bias, residual: expected none with pa"):
            tlt_ext.linear_rows(x, weight, out, parts=4, **{name: array})
    with pytest.raises(ValueError, match="partials: expected 1, 2, 4 or 8 arrays, got 3"):
        tlt_ext.fold_partials([out] * 3, out)
    with pytest.raises(TypeError, match="partials: expected dtype float32, got float16"):
        tlt_ext.fold_partials([out, out.half()], out)
    with pytest.raises(ValueError, match=r"partials: expected shape \[4, 3\], got \[4, 2\]"):
        tlt_ext.fold_partials([out, out[:, :2]], out)
    with pytest.raises(ValueError, match="partials: expected a contiguous last axis"):
        tlt_ext.fold_partials([torch.empty(3, 4).t()], out)
    with pytest.raises(ValueError, match=r"bias: expected shape \[3\], got \[4\]"):
        tlt_ext.fold_partials([out], out, bias=torch.empty(4))
    with pytest.raises(TypeError, match="bias: expected dtype float32 or float16 or bfloat16"):
        tlt_ext.fold_partials([out], out, bias=torch.empty(3, dtype=torch.int32))
    with pytest.raises(TypeError, match="residual: expected the dtype of out, float32, got float"):
        tlt_ext.fold_partials([out], out, residual=out.half())
    with pytest.raises(ValueError, match=r"residual: expected shape \[4, 3\], got \[3, 3\]"):
        tlt_ext.fold_partials([out], out, residual=out[:3])
    with pytest.raises(ValueError, match="out: expected elements that share no memory"):
        tlt_ext.fold_partials([out], out[:1].expand(4, 3))
    flags = torch.zeros(MAX_FOLD_BLOCKS, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="flags: expected one array for each of 2 ranks, got 1"):
        tlt_ext.fold_partials([out, out], torch.empty(4, 3), flags=[flags])
    for timeout in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_s: expected more than 0, at most 1e9, got"):
            tlt_ext.fold_partials(
                [out, out], torch.empty(4, 3), flags=[flags, flags], timeout_s=timeout
            )
    with pytest.raises(ValueError, match="fold_partials: flags: expected none on a CPU"):
        tlt_ext.fold_partials([out, out], torch.empty(4, 3), flags=[flags, flags])


# ---- fused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(
    ("rows", "n", "k"), LINEAR_SHAPES + [(5, 1030, 576), (16, 40, 1088), (65, 200, 64)]
)
def test_a_norm_before_has_the_bits_of_the_two_ops(threads, device, dtype, rows, n, k):
    wide, weight, bias = linear_inputs(rows, n, 2 * k, dtype, device)
    x, weight = wide[:, :k], weight[:, :k]
    norm_weight = kit.randn(k, seed=4, dtype=dtype).to(device)
    for out_dtype in {dtype, torch.float32}:
        residual = kit.randn(rows, n, seed=5, dtype=out_dtype).to(device)
        options = {"bias": bias, "residual": residual}
        between = torch.empty(rows, k, dtype=dtype, device=device)
        two, fused = (torch.empty(rows, n, dtype=out_dtype, device=device) for _ in range(2))

        tlt_ext.rms_norm(x, norm_weight, between, eps=1e-5)
        tlt_ext.linear_rows(between, weight, two, **options)
        tlt_ext.linear_rows(x, weight, fused, norm_weight=norm_weight, eps=1e-5, **options)
        assert kit.same_bits(fused, two)


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), LINEAR_SHAPES + [(16, 40, 1088), (65, 200, 64)])
def test_linear_silu_mul_has_the_bits_of_its_ops(threads, device, dtype, rows, n, k):
    """With and without a norm; rows of x, weight and out are strided."""
    x, weight, _ = linear_inputs(rows, 2 * n, 2 * k, dtype, device)
    x, weight, norm_weight = x[:, :k], weight[:, :k], kit.randn(k, seed=4, dtype=dtype).to(device)
    gate_up = torch.empty(rows, 2 * n, dtype=dtype, device=device)
    two = torch.empty(rows, n, dtype=dtype, device=device)
    wide = torch.full((rows, n + 5), float("nan"), dtype=dtype, device=device)
    for norm in ({}, {"norm_weight": norm_weight, "eps": 1e-5}):
        tlt_ext.linear_rows(x, weight, gate_up, **norm)
        tlt_ext.silu_mul(gate_up, two)
        tlt_ext.linear_silu_mul(x, weight, wide[:, 2 : n + 2], **norm)
        assert kit.same_bits(wide[:, 2 : n + 2], two)
        assert wide[:, :2].isnan().all() and wide[:, n + 2 :].isnan().all()


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_linear_silu_mul_equals_reference(device, dtype):
    x, weight, _ = linear_inputs(9, 96, 200, dtype, device)
    weight = (weight.float() / 14).to(dtype)
    norm_weight = kit.randn(200, seed=4, dtype=dtype).to(device)
    out = torch.empty(9, 48, dtype=dtype, device=device)
    tlt_ext.linear_silu_mul(x, weight, out)
    kit.assert_close(out, reference.silu_mul(reference.linear_rows(x, weight)))
    tlt_ext.linear_silu_mul(x, weight, out, norm_weight=norm_weight, eps=1e-5)
    normed = reference.rms_norm(x, norm_weight, 1e-5)
    kit.assert_close(out, reference.silu_mul(reference.linear_rows(normed, weight)))


def test_fused_ops_on_empty_inputs():
    x, weight, _ = linear_inputs(3, 4, 8, torch.float32)
    tlt_ext.linear_rows(x[:0], weight, torch.empty(0, 4), norm_weight=torch.ones(8))
    tlt_ext.linear_silu_mul(x[:0], weight, torch.empty(0, 2))
    tlt_ext.linear_silu_mul(x, weight[:0], torch.empty(3, 0))
    out = torch.full((3, 2), float("nan"))
    tlt_ext.linear_silu_mul(x[:, :0], weight[:, :0], out)
    assert not out.any()
