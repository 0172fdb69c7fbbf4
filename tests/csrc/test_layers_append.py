"""`linear_append` has the bits of `linear_rows`, then `append_kv`."""

import pytest
import torch

from tests import kit
from tests.csrc.paged import make_batch
from tests.grouping import flat

NAN = float("nan")


def make_case(
    contexts,
    rows,
    *,
    heads=(9, 3),
    head_dim=64,
    k=576,
    dtype=torch.bfloat16,
    inert=0,
    page_size=16,
):
    """Arguments of the fused op; `inert` rows belong to no request."""
    num_heads, kv_heads = heads
    batch = make_batch(contexts, rows, page_size)
    num_rows, width = batch.num_rows + inert, (num_heads + 2 * kv_heads) * head_dim
    cache = torch.full((batch.num_pages, page_size, kv_heads, head_dim), NAN, dtype=dtype)
    starts = zip(contexts, rows, strict=True)
    position = [c + i for c, r in starts for i in range(r)] + [0] * inert
    angles = kit.randn(max(contexts) + max(rows) + 1, head_dim // 2, seed=5)
    return {
        "x": kit.randn(num_rows, k, seed=1, dtype=dtype),
        "norm_weight": kit.randn(k, seed=2, dtype=dtype),
        "weight": (kit.randn(width, k, seed=3) / k**0.5).to(dtype),
        "q_out": torch.full((num_rows, num_heads, head_dim), NAN, dtype=dtype),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "row_start": batch.row_start,
        "context_len": batch.context_len,
        "position": torch.tensor(position, dtype=torch.int32),
        "block_table": batch.block_table,
        "status": batch.status,
    }


def copy_of(case):
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in case.items()}


def run_two(ops, case):
    case = dict(case)
    x, weight = case.pop("x"), case.pop("weight")
    linear = {name: case.pop(name) for name in ("norm_weight", "eps", "bias") if name in case}
    qkv = torch.full((len(x), len(weight)), NAN, dtype=x.dtype)
    ops.linear_rows(x, weight, qkv, **linear)
    ops.append_kv(qkv, **case)


def check(ops, case):
    two, fused, pdl = copy_of(case), copy_of(case), copy_of(case)
    run_two(ops, two)
    ops.linear_append(**fused)
    ops.linear_append(**pdl, pdl=True, pdl_tables=True)
    for name in ("q_out", "k_cache", "v_cache", "status"):
        assert kit.same_bits(fused[name], two[name]), name
        assert kit.same_bits(pdl[name], two[name]), name
    return fused


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(
    ("contexts", "rows"),
    [
        ([0], [1]),
        ([33, 0, 7], [1, 1, 1]),
        ([5, 64, 0, 2], [3, 0, 4, 1]),
        ([100], [16]),
        ([1] * 40, [0] * 30 + [1] * 10),
        ([4] * 32, [0] * 16 + [1] * 16),
        ([9, 3], [20, 17]),
        ([40, 7, 0], [70, 1, 60]),
    ],
)
@pytest.mark.parametrize(
    ("heads", "head_dim", "k"), [((9, 3), 64, 576), ((9, 3), 64, 1152), ((7, 1), 128, 3584)]
)
def test_bits_of_the_two_ops(ops, contexts, rows, heads, head_dim, k, dtype):
    case = make_case(contexts, rows, heads=heads, head_dim=head_dim, k=k, dtype=dtype)
    bias = kit.randn(len(case["weight"]), seed=7, dtype=dtype)
    fused = check(ops, case | {"bias": bias, "eps": 1e-3})
    assert not fused["status"].any() and not fused["q_out"].isnan().any()
    check(ops, case)
    check(ops, case | {"norm_weight": None, "bias": bias})


@pytest.mark.parametrize(
    ("heads", "head_dim", "k"), [((1, 1), 8, 64), ((3, 1), 24, 200), ((3, 1), 24, 192)]
)
def test_odd_heads(ops, heads, head_dim, k):
    check(ops, make_case([5, 0], [3, 2], heads=heads, head_dim=head_dim, k=k))


@pytest.mark.sanitize
@pytest.mark.parametrize("rows", [[3, 2], [7, 6], [20, 17]])
@pytest.mark.parametrize("k", [64, 72])
def test_few_and_more_rows_of_a_small_model(ops, rows, k):
    """A whole block of K and not, which on a GPU are kernels of their own."""
    check(ops, make_case([5, 0], rows, heads=(2, 1), k=k))


def test_many_tiles_a_block(ops):
    check(ops, make_case([5, 0], [9, 2], heads=(100, 20), head_dim=128, k=136))
    check(ops, make_case([5, 0], [3, 2], heads=(100, 20), head_dim=128, k=136))


def test_slot_base_inert_rows_and_strides(ops):
    case = make_case([3, 10], [4, 2], inert=3)
    case["slot_base"] = torch.tensor([2, 0], dtype=torch.int32)
    wide = torch.full((9, 600), NAN, dtype=torch.bfloat16)
    wide[:, 8:584] = case["x"]
    case["x"] = wide[:, 8:584]
    fused = check(ops, case)
    assert fused["q_out"][6:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("k", "page_size"), [(576, 16), (1152, 32), (576, 128)])
@pytest.mark.parametrize("rows", [[1] * 150, [5] * 40, [0, 100, 3, 50, 8], [0, 1] * 150])
def test_many_rows_without_a_norm(ops, rows, k, page_size, dtype):
    """Rows of no request too, and of pages and positions that are none; more than 256 requests."""
    contexts = [(7 * i) % 50 for i in range(len(rows))]
    case = make_case(contexts, rows, k=k, inert=5, page_size=page_size, dtype=dtype)
    case |= {"norm_weight": None, "bias": kit.randn(len(case["weight"]), seed=7, dtype=dtype)}
    assert not check(ops, case)["status"].any()
    case["block_table"][1, 0] = 10**6
    case["position"][sum(rows) - 1] = 10**6
    fused = check(ops, case)
    assert fused["status"].nonzero().numel() == 2 and fused["q_out"][-5:].isnan().all()


def test_bad_rows_are_refused_as_append_kv_refuses_them(ops):
    """A page outside the cache, a negative length, a position past the table, bad row_start."""
    case = make_case([3, 10, 4, 6], [2, 2, 2, 2])
    case["block_table"][0, 0] = 10**6
    case["context_len"][1] = -5
    case["position"][4] = 10**6
    case["row_start"][4] = 99
    fused = check(ops, case)
    assert all(fused["status"]) and not fused["q_out"][:4].any()


def test_no_rows(ops):
    case = make_case([3], [2], dtype=torch.float32)
    before = [case[n].clone() for n in ("k_cache", "v_cache", "status")]
    empty = {"x": case["x"][:0], "q_out": case["q_out"][:0], "position": case["position"][:0]}
    ops.linear_append(**(case | empty))
    assert all(map(kit.same_bits, before, (case[n] for n in ("k_cache", "v_cache", "status"))))


def test_checks_its_arguments():
    case = make_case([3], [2], dtype=torch.float32)

    def refused(error, match, **changed):
        with pytest.raises(error, match=f"linear_append: {match}"):
            flat.linear_append(**(case | changed))

    refused(TypeError, "x: expected dtype float32 or float16", x=case["x"].int())
    refused(TypeError, "norm_weight: expected the dtype of x", norm_weight=torch.ones(576).half())
    refused(ValueError, r"norm_weight: expected shape \[576\]", norm_weight=torch.ones(575))
    refused(TypeError, "weight: expected the dtype of x", weight=case["weight"].half())
    refused(ValueError, r"weight: expected shape \[960, 576\]", weight=case["weight"][:959])
    refused(ValueError, r"bias: expected shape \[960\]", bias=torch.ones(959))
    refused(TypeError, "bias: expected the dtype of x", bias=torch.ones(960).half())
    refused(ValueError, "eps: expected 0 or more", eps=-1.0)
    refused(ValueError, r"weight: expected shape \[896, 576\]", q_out=case["q_out"][:, :8])
    refused(ValueError, "q_out: expected 1 head or more, got 0", q_out=case["q_out"][:, :0])
    refused(ValueError, r"q_out: expected shape \[2, \*, 64\]", q_out=case["q_out"][:1])
    refused(ValueError, "q_out: expected memory separate from x", x=case["q_out"].flatten(1))
    refused(TypeError, "k_cache: expected", k_cache=case["k_cache"].half())
    refused(TypeError, "position: expected dtype int32", position=case["position"].long())


@kit.gpu
@kit.needs_gpu
def test_cuda_takes_aligned_rows():
    with pytest.raises(ValueError, match="expected 16-bit rows that start at and span multiples"):
        kit.Ops("cuda").linear_append(**make_case([3], [2], k=100))
