"""The CUDA layers against the CPU's, their row invariance, and their replay in a graph."""

import pytest
import torch

import tlt_ext
from tests import kit, reference

pytestmark = [kit.gpu, kit.needs_gpu]

ROWS = [1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 65, 97, 128, 160, 161, 300, 512]
HALVES = [torch.float16, torch.bfloat16]
SANITIZE = pytest.mark.sanitize
# Odd N and K, fewer blocks of K than parts, small and wide models, K longer than shared memory. Of
# N so large that the decode kernel leaves all but few rows to wgmma, whose tiles are shared out in
# every way: one tile a block and several, one block a multiprocessor and two, parts over a cluster.
SHAPES = [(37, 100), (401, 1001), (960, 576), (576, 1536), (9001, 200), (136, 3584), (72, 18944)]
SHAPES += [(5001, 1032), (25001, 200), (3080, 576), (896, 4864), (1536, 8960)]
# Of whole blocks of K, whose weights may all wait in registers: parts of none to three of them.
SHAPES += [(200, 64), (1000, 448), (2112, 1024), (600, 1088)]
OPS = ["linear_rows", "norm, linear_rows", "linear_silu_mul", "norm, linear_silu_mul"]


def inputs(rows, n, k, dtype):
    """x, norm weight, weight, bias; x of size 1, sums too."""
    x = kit.randn(rows, k, seed=0, dtype=dtype)
    weight = (kit.randn(n, k, seed=1) / k**0.5).to(dtype)
    return x, kit.randn(k, seed=2, dtype=dtype), weight, kit.randn(n, seed=3, dtype=dtype)


def run(op, x, norm_weight, weight, out, **options):
    """One of OPS; silu_mul of an even number of weight rows, into the first half of out."""
    if op.startswith("norm"):
        options |= {"norm_weight": norm_weight, "eps": 1e-5}
    if op.endswith("linear_rows"):
        return tlt_ext.linear_rows(x, weight, out, **options)
    half = len(weight) // 2
    tlt_ext.linear_silu_mul(x, weight[: 2 * half], out[:, :half], **options)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bits_do_not_depend_on_rows_or_on_the_row_index(op, dtype, n, k):
    x, norm_weight, weight, _ = (t.cuda() for t in inputs(max(ROWS), n, k, dtype))
    out_dtype = torch.float32 if op.endswith("linear_rows") else dtype
    alone = torch.zeros(max(ROWS), n, dtype=out_dtype, device="cuda")
    written = n if op.endswith("linear_rows") else n // 2
    alone[:, :written] = float("nan")
    for row in range(max(ROWS)):
        run(op, x[row : row + 1], norm_weight, weight, alone[row : row + 1])
    assert not alone.isnan().any() and not alone[:, written:].any()
    for rows in ROWS:
        first = (max(ROWS) - rows) // 2  # another place in the batch for every count
        out = torch.zeros(rows, n, dtype=out_dtype, device="cuda")
        out[:, :written] = float("nan")
        run(op, x[first : first + rows], norm_weight, weight, out)
        assert torch.equal(out, alone[first : first + rows]), rows


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("rows", [1, 16, *(pytest.param(n, marks=SANITIZE) for n in (7, 40))])
def test_linear_ops_agree_with_the_cpu(op, dtype, rows):
    """float32 has the CPU's bits; 16-bit types differ by the order of the sum alone."""
    for n, k in [(37, 100), (129, 577), (960, 576)]:
        x, norm_weight, weight, bias = inputs(rows, n, k, dtype)
        residual = kit.randn(rows, n, seed=4, dtype=dtype)
        options = {"bias": bias, "residual": residual} if op.endswith("linear_rows") else {}
        expected, out = torch.zeros_like(residual), torch.zeros_like(residual, device="cuda")
        run(op, x, norm_weight, weight, expected, **options)
        x, norm_weight, weight = (t.cuda() for t in (x, norm_weight, weight))
        run(op, x, norm_weight, weight, out, **{name: t.cuda() for name, t in options.items()})
        if dtype == torch.float32:
            assert kit.same_bits(out, expected)
        else:
            assert kit.relative_error(out, expected) <= kit.TOLERANCE[dtype]


@SANITIZE
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["linear_rows", "linear_silu_mul"])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1040, 64, 72), (1040, 64, 1032), (160, 144, 3592)],
    ids=["fewer blocks of K than parts", "whole tiles", "clusters"],
)
def test_wgmma_agrees_with_the_cpu(rows, n, k, op, dtype):
    """More rows than the decode kernel takes, of no whole number of blocks of K."""
    x, norm_weight, weight, _ = inputs(rows, n, k, dtype)
    expected = torch.zeros(rows, n, dtype=dtype)
    out = torch.zeros_like(expected, device="cuda")
    run(op, x, norm_weight, weight, expected)
    run(op, x.cuda(), norm_weight, weight.cuda(), out)
    assert kit.relative_error(out, expected) <= kit.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("n", "k"),
    [(960, 576), (3072, 576), (5001, 1032), (136, 3584), (4616, 1088), (2560, 9480)],
)
def test_rows_are_stored_whole_or_by_element_with_the_same_bits(dtype, n, k):
    """Offset 3 and odd N keep outputs from 16-byte stores; bias and residual are added in place."""
    x, _, weight, bias = (t.cuda() for t in inputs(max(ROWS), n, k, dtype))
    for out_dtype in (dtype, torch.float32):
        residual = kit.randn(max(ROWS), n, seed=4, dtype=out_dtype).cuda()
        alone, biased = torch.empty_like(residual), torch.empty_like(residual)
        for row in range(max(ROWS)):
            at = slice(row, row + 1)
            tlt_ext.linear_rows(x[at], weight, alone[at], bias=bias, residual=residual[at])
            tlt_ext.linear_rows(x[at], weight, biased[at], bias=bias)
        for rows in (40, 100, 130, 300, 512):
            for offset in (0, 8, 3):
                wide = residual.new_full((rows, n + 24), float("nan"))
                out = wide[:, offset : offset + n]
                out.copy_(residual[:rows])
                tlt_ext.linear_rows(x[:rows], weight, out, bias=bias, residual=out)
                assert torch.equal(out, alone[:rows]), (rows, offset)
                out.fill_(float("nan"))
                tlt_ext.linear_rows(x[:rows], weight, out, residual=residual[:rows])
                assert not out.isnan().any(), (rows, offset)
                out.fill_(float("nan"))
                tlt_ext.linear_rows(x[:rows], weight, out, bias=bias)
                assert torch.equal(out, biased[:rows]), (rows, offset)
                assert wide[:, :offset].isnan().all() and wide[:, offset + n :].isnan().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_few_rows_of_many_weights_have_the_bits_of_few_weights(dtype):
    """wgmma multiplies more than 32 M weights, the decode kernel 400 outputs of them."""
    x, _, weight, bias = (t.cuda() for t in inputs(8, 3600, 9480, dtype))
    residual = kit.randn(8, 3600, seed=4, dtype=dtype).cuda()
    for rows in (1, 5, 8):
        more = residual[:rows]
        wide = x.new_full((rows, 3611), float("nan"))
        whole, by_element = torch.full_like(more, float("nan")), wide[:, 3:3603]
        for out in (whole, by_element):
            tlt_ext.linear_rows(x[:rows], weight, out, bias=bias, residual=more)
        for first in range(0, 3600, 400):
            at, part = slice(first, first + 400), x.new_empty(rows, 400)
            tlt_ext.linear_rows(x[:rows], weight[at], part, bias=bias[at], residual=more[:, at])
            assert torch.equal(whole[:, at], part), (rows, first)
        assert torch.equal(by_element, whole), rows
        assert wide[:, :3].isnan().all() and wide[:, 3603:].isnan().all()


@SANITIZE
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(
    ("rows", "dim"), [(1, 1), (3, 577), (5, 1536), (2, 5001), (134, 24), (135, 768)]
)
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


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("n", "k"), [(576, 576), (576, 1536), (960, 576), (3072, 576)])
def test_many_rows_of_a_small_model_have_the_bits_of_few(dtype, n, k):
    """Tiles of wgmma that share the weights in every way, with a residual and without."""
    x, norm_weight, weight, _ = (t.cuda() for t in inputs(1280, n, k, dtype))
    residual = kit.randn(1280, n, seed=4, dtype=dtype).cuda()
    calls = {
        "out": lambda at, out: tlt_ext.linear_rows(x[at], weight, out, residual=residual[at]),
        "plain": lambda at, out: tlt_ext.linear_rows(x[at], weight, out),
        "gated": lambda at, out: tlt_ext.linear_silu_mul(x[at], weight, out[:, : n // 2]),
        "normed": lambda at, out: run("norm, linear_silu_mul", x[at], norm_weight, weight, out),
    }
    for name, call in calls.items():
        few, many = torch.zeros_like(residual), torch.zeros_like(residual)
        for first in range(0, 1280, 8):
            call(slice(first, first + 8), few[first : first + 8])
        for rows in (9, 16, 40, 96, 161, 256, 321, 448, 640, 1280):
            many.fill_(float("nan"))
            many[:, n // 2 :] = 0 if name in ("gated", "normed") else float("nan")
            call(slice(rows), many[:rows])
            assert torch.equal(many[:rows], few[:rows]), (name, rows)


@pytest.mark.parametrize("dtype", HALVES)
def test_last_tiles_that_clusters_share_have_the_bits_of_few_rows(dtype):
    """Of every tile: rounds of whole tiles, then tiles whose parts of K a cluster shares."""
    n, k, most = 17600, 1544, 256
    x, _, weight, bias = (t.cuda() for t in inputs(most, n, k, dtype))
    x[3], x[5, 7] = -0.0, float("nan")
    residual = kit.randn(most, n, seed=4, dtype=dtype).cuda()
    calls = {
        "out": lambda at, out: tlt_ext.linear_rows(
            x[at], weight, out, bias=bias, residual=residual[at]
        ),
        "plain": lambda at, out: tlt_ext.linear_rows(x[at], weight, out),
        "gated": lambda at, out: tlt_ext.linear_silu_mul(x[at], weight, out[:, : n // 2]),
    }
    for name, call in calls.items():
        few, many = torch.zeros_like(residual), torch.zeros_like(residual)
        for first in range(0, most, 4):
            call(slice(first, first + 4), few[first : first + 4])
        for rows in (33, 64, 100, 128, 160, 161, 192, 256):
            many.zero_()
            call(slice(rows), many[:rows])
            assert kit.same_bits(many[:rows], few[:rows]), (name, rows)
            assert not many[rows:].any(), (name, rows)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [8, 576, 1024, 1032, 2048, 2056])
def test_norms_of_aligned_rows_have_the_bits_of_others(dtype, dim):
    x, weight = 4 * kit.randn(13, dim, seed=0, dtype=dtype), kit.randn(dim, seed=1, dtype=dtype)
    out, other = (torch.zeros(13, dim + more, dtype=dtype, device="cuda") for more in (8, 1))
    for into in (out, other):
        tlt_ext.rms_norm(x.cuda(), weight.cuda(), into[:, :dim])
        assert not into[:, dim:].any()
    assert torch.equal(out[:, :dim], other[:, :dim])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dim", [8, 72, 576, 577, 768, 776, 896, 1096, 1536, 1544, 3584, 5000])
def test_norms_of_many_rows_have_the_bits_of_few(dtype, dim):
    """A warp owns one of more than 132 short aligned rows, a block any other; in place, too."""
    most, few_rows, edge = 1300, 100, 16

    def within(rows, more=0):
        wide = torch.full((rows, dim + 2 * edge + more), float("nan"), dtype=dtype, device="cuda")
        return wide, wide[:, edge : edge + dim]

    x, weight, few = within(most)[1], within(1)[1][0], within(most)[1]
    x.copy_(4 * kit.randn(most, dim, seed=0, dtype=dtype))
    x[5, dim // 2], x[140] = float("nan"), 0.0
    weight.copy_(kit.randn(dim, seed=1, dtype=dtype))
    for first in range(0, most, few_rows):
        tlt_ext.rms_norm(x[first : first + few_rows], weight, few[first : first + few_rows])
    assert few.isnan().any(dim=1).nonzero().flatten().tolist() == [5]
    for rows in (131, 132, 133, 134, 135, 136, 448, most):
        for more in (0, 1):  # aligned rows and others
            for in_place in (False, True):
                wide, out = within(rows + 1, more)
                if in_place:
                    out[:rows] = x[:rows]
                tlt_ext.rms_norm(out[:rows] if in_place else x[:rows], weight, out[:rows])
                assert kit.same_bits(out[:rows], few[:rows]), rows
                out[:rows] = float("nan")
                assert wide.isnan().all(), rows


@pytest.mark.parametrize("rows", [3, 40])
def test_graph_replays_read_new_inputs_and_allocate_nothing(rows):
    x, norm_weight, weight, _ = (t.cuda() for t in inputs(rows, 960, 576, torch.bfloat16))
    outs = {op: torch.zeros(rows, 960, dtype=torch.bfloat16, device="cuda") for op in OPS}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for op in OPS:
            run(op, x, norm_weight, weight, outs[op])
    expected = {op: torch.zeros_like(out) for op, out in outs.items()}
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()

    def replay():
        for turn in range(1000):
            if turn % 100 == 0:
                x.copy_(kit.randn(rows, 576, seed=turn, dtype=torch.bfloat16))
            graph.replay()

    kit.assert_takes_no_memory(replay)
    assert torch.cuda.memory_allocated() == held
    for op in OPS:
        run(op, x, norm_weight, weight, expected[op])
        assert kit.same_bits(outs[op], expected[op])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("n", "k"), [(960, 576), (9001, 200), (72, 18944)])
def test_fused_ops_have_the_bits_of_the_two_ops_for_every_row_count(dtype, n, k):
    """A model takes one or the other by its row count, so all must agree with one row alone."""
    x, norm_weight, weight, _ = (t.cuda() for t in inputs(max(ROWS), n, k, dtype))
    half, normed = n // 2, torch.empty_like(x)
    tlt_ext.rms_norm(x, norm_weight, normed, eps=1e-5)
    for rows in ROWS:
        for op, read in (("", x), ("norm, ", normed)):
            fused, two = (torch.zeros(rows, n, dtype=dtype, device="cuda") for _ in range(2))
            tlt_ext.linear_rows(read[:rows], weight, two)
            run(f"{op}linear_rows", x[:rows], norm_weight, weight, fused)
            assert torch.equal(fused, two), (op, rows)
            gated, activated = fused.new_zeros(rows, n), fused.new_empty(rows, half)
            run(f"{op}linear_silu_mul", x[:rows], norm_weight, weight, gated)
            tlt_ext.silu_mul(two[:, : 2 * half], activated)
            assert torch.equal(gated[:, :half], activated), (op, rows)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("n", "k"), [(3072, 576), (5008, 1032), (2560, 9480), (144, 18944)])
def test_products_are_stored_whole_or_by_element_with_the_same_bits(dtype, n, k):
    """Gates and ups in tiles of every kind, one after the other and shared by a cluster."""
    x, _, weight, _ = (t.cuda() for t in inputs(max(ROWS), n, k, dtype))
    gate_up = torch.empty(max(ROWS), n, dtype=dtype, device="cuda")
    tlt_ext.linear_rows(x, weight, gate_up)
    alone = gate_up.new_empty(max(ROWS), n // 2)
    tlt_ext.silu_mul(gate_up, alone)
    for rows in (12, 40, 100, 130, 300, 512):
        for offset in (0, 8, 3):
            wide = alone.new_full((rows, n // 2 + 24), float("nan"))
            out = wide[:, offset : offset + n // 2]
            tlt_ext.linear_silu_mul(x[:rows], weight, out)
            assert torch.equal(out, alone[:rows]), (rows, offset)
            assert wide[:, :offset].isnan().all() and wide[:, offset + n // 2 :].isnan().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
def test_large_weights_have_the_bits_of_their_pieces(dtype, rows):
    """Wide ones go to wgmma however few the rows are; pieces of them do not."""
    x, _, weight, bias = (t.cuda() for t in inputs(rows, 33000, 1032, dtype))
    assert weight.numel() > 32 << 20
    out, gated = (torch.full((rows, n), float("nan"), dtype=dtype).cuda() for n in (33000, 16488))
    tlt_ext.linear_rows(x, weight, out, bias=bias)
    tlt_ext.linear_silu_mul(x, weight[:32976], gated)
    parts, activated = torch.empty_like(out), torch.empty_like(gated)
    for first in range(0, len(weight), 3000):
        at = slice(first, first + 3000)
        tlt_ext.linear_rows(x, weight[at], parts[:, at], bias=bias[at])
    assert torch.equal(out, parts)
    for first in range(0, len(weight), 3000):
        at = slice(first, first + 3000)
        tlt_ext.linear_rows(x, weight[at], parts[:, at])
    tlt_ext.silu_mul(parts[:, :32976], activated)
    assert torch.equal(gated, activated)


def decode_step(case, pdl):
    """A chain of all layer ops in one layer's order; every kernel reads what the last one wrote."""
    x, norm, options = case["x"].clone(), {"norm_weight": case["norm"]}, {"pdl": pdl}
    qkv, gated = (x.new_full((len(x), len(case[n])), float("nan")) for n in ("qkv", "gate_up"))
    gated, first = gated[:, : case["down"].shape[1]], qkv[:, : x.shape[1]]
    for _ in range(3):
        tlt_ext.linear_rows(x, case["qkv"], qkv, **norm, **options)
        tlt_ext.linear_rows(first, case["output"], x, residual=x, **options)
        tlt_ext.linear_silu_mul(x, case["gate_up"], gated, **norm, **options)
        tlt_ext.linear_rows(gated, case["down"], x, residual=x, **options)
        tlt_ext.rms_norm(x, case["norm"], first)
        tlt_ext.linear_rows(first, case["output"], x, residual=x, **options)
        tlt_ext.linear_silu_mul(first, case["gate_up"], gated, **options)
        tlt_ext.linear_rows(gated, case["down"], x, residual=x, **options)
    return x


@pytest.mark.parametrize("rows", [1, 8, 16, 40, 200])
@pytest.mark.parametrize("hidden", [576, 3584])
def test_early_launches_have_the_bits_of_ordinary_ones(rows, hidden):
    """In a graph and out of it, many times over: a dependent launch must wait for what it reads."""
    dtype, middle = torch.bfloat16, 3 * hidden

    def weight(n, k, seed):
        return (kit.randn(n, k, seed=seed) / (2 * k**0.5)).to(dtype).cuda()

    case = {
        "x": kit.randn(rows, hidden, seed=0, dtype=dtype).cuda(),
        "norm": kit.randn(hidden, seed=1, dtype=dtype).cuda(),
        "qkv": weight(hidden + 256, hidden, 2),
        "output": weight(hidden, hidden, 3),
        "gate_up": weight(2 * middle, hidden, 4),
        "down": weight(hidden, middle, 5),
    }
    expected = decode_step(case, pdl=False)
    torch.cuda.synchronize()
    assert expected.isfinite().all()
    for _ in range(50):
        assert torch.equal(decode_step(case, pdl=True), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_step(case, pdl=True)
    for _ in range(200):
        graph.replay()
    assert torch.equal(out, expected)


def test_layers_check_what_only_a_cuda_kernel_limits():
    big = torch.empty(1, (1 << 30) + 2, dtype=torch.bfloat16, device="cuda")
    half = big[:, : (1 << 29) + 1]
    with pytest.raises(ValueError, match=r"silu_mul: x: expected at most 2\^30 columns on a CUDA"):
        tlt_ext.silu_mul(big, half)
    with pytest.raises(ValueError, match="rms_norm: x: expected at most"):
        tlt_ext.rms_norm(big, big[0], big)
    with pytest.raises(ValueError, match="linear_rows: x: expected at most"):
        tlt_ext.linear_rows(big, big, torch.empty(1, 1, dtype=torch.bfloat16, device="cuda"))


@SANITIZE
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (136, 3588), (1536, 8960), (4616, 3584)])
def test_partial_sums_of_every_tile_have_the_bits_of_one_rank(dtype, ranks, n, k):
    """One tile after the other, parts over a cluster, and the plain kernel for K of 3,588."""
    x, _, weight, bias = (t.cuda() for t in inputs(max(ROWS), n, k, dtype))
    residual = kit.randn(max(ROWS), n, seed=4, dtype=dtype).cuda()
    shards = [reference.columns_of(k, rank, ranks).cuda() for rank in range(ranks)]
    shards = [(x[:, at].contiguous(), weight[:, at].contiguous()) for at in shards]
    alone, out = torch.empty_like(residual), torch.empty_like(residual)
    tlt_ext.linear_rows(x, weight, alone, bias=bias, residual=residual)
    for rows in ROWS:
        sums = torch.full((ranks, rows, n), float("nan"), device="cuda")
        for (x_shard, weight_shard), partial in zip(shards, sums, strict=True):
            tlt_ext.linear_rows(
                x_shard[:rows], weight_shard, partial, parts=8 // ranks, pdl=rows % 2 == 0
            )
        tlt_ext.fold_partials(list(sums), out[:rows], bias=bias, residual=residual[:rows])
        assert torch.equal(out[:rows], alone[:rows]), rows


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "n", "k"), [(640, 3584, 3592), (300, 5648, 3592)])
def test_the_rest_of_a_last_round_has_the_bits_of_few_rows(rows, n, k, out_dtype):
    """Whole rounds of tiles in one launch and the other columns in a second, offsets included."""
    x, _, weight, bias = (t.cuda() for t in inputs(rows, n, k, torch.bfloat16))
    residual = kit.randn(rows, n, seed=4, dtype=out_dtype).cuda()
    wide = torch.full((rows, n + 16), float("nan"), dtype=out_dtype, device="cuda")
    few, many = torch.empty_like(residual), wide[:, 8 : n + 8]
    for first in range(0, rows, 20):
        at = slice(first, first + 20)
        tlt_ext.linear_rows(x[at], weight, few[at], bias=bias, residual=residual[at])
    tlt_ext.linear_rows(x, weight, many, bias=bias, residual=residual, pdl=True)
    assert torch.equal(many, few)
    assert wide[:, :8].isnan().all() and wide[:, n + 8 :].isnan().all()
    gated, activated = (x.new_full((rows, n // 2), float("nan")) for _ in range(2))
    for first in range(0, rows, 20):
        at = slice(first, first + 20)
        tlt_ext.linear_silu_mul(x[at], weight, gated[at])
    tlt_ext.linear_silu_mul(x, weight, activated, pdl=True)
    assert torch.equal(activated, gated)
