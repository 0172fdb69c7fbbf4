"""The paged cache: rows are written to their slots, paths are kept, nothing else changes."""

import pytest
import torch

import tlt_ext
from tests import kit, reference
from tests.csrc.paged import make_batch
from tests.grouping import flat
from tlt_ext import Status

NAN = float("nan")
BAD_SLOTS = Status.BAD_PAGE | Status.BAD_LENGTH


# On a GPU 16-bit heads that are not normed go by aligned chunks of 8, all else by element.
WIDTHS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def rope_table(max_position, head_dim, seed=5):
    angles = kit.randn(max_position, head_dim // 2, seed=seed)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


# ---- append_kv ---------------------------------------------------------------------------------


def append_case(contexts, rows, *, page_size=5, heads=(6, 2), head_dim=16, dtype=torch.float32):
    num_heads, kv_heads = heads
    batch = make_batch(contexts, rows, page_size, spare_slots=9)
    cache = torch.full((batch.num_pages, page_size, kv_heads, head_dim), NAN, dtype=dtype)
    width = (num_heads + 2 * kv_heads) * head_dim
    starts = zip(contexts, rows, strict=True)
    return {
        "qkv": kit.randn(batch.num_rows, width, seed=1, dtype=dtype),
        "q_out": torch.full((batch.num_rows, num_heads, head_dim), NAN, dtype=dtype),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "cos_sin": rope_table(max(contexts) + max(rows), head_dim),
        "row_start": batch.row_start,
        "context_len": batch.context_len,
        "position": ints(*(c + i for c, r in starts for i in range(r))),
        "block_table": batch.block_table,
        "status": batch.status,
    }


def check_append(ops, case):
    """Runs the op; compares q and every slot of the caches, untouched ones included."""
    options = {name: case[name] for name in ("q_norm", "k_norm", "eps") if name in case}
    heads = case["q_out"].shape[1], case["k_cache"].shape[2]
    q, k, v = reference.append_kv(case["qkv"], case["cos_sin"], case["position"], *heads, **options)
    k_expected, v_expected = case["k_cache"].double(), case["v_cache"].double()
    chain = {name: case[name] for name in ("row_start", "context_len", "position")}
    for request in range(len(case["context_len"])):
        begin, end = case["row_start"][request : request + 2].tolist()
        for row in range(begin, end):
            *_, slot = reference.row_slots(row, request, **chain, slot_base=case.get("slot_base"))
            where = reference.places(case["block_table"], request, [slot], k_expected.shape[1])
            k_expected[where], v_expected[where] = k[row], v[row]
    ops.append_kv(**case)
    assert not case["status"].any()
    kit.assert_close(case["q_out"], q)
    for cache, expected in ((case["k_cache"], k_expected), (case["v_cache"], v_expected)):
        assert torch.equal(cache.isnan(), expected.isnan())  # written in the right slots only
        kit.assert_close(cache.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("page_size", [1, 5, 16, 128])
@pytest.mark.parametrize(("heads", "head_dim"), [((1, 1), 8), ((9, 3), 64), ((8, 1), 256)])
def test_append_kv_equals_reference(ops, heads, head_dim, page_size, dtype):
    """Fault 32: an empty request and an empty context among them."""
    contexts, rows = [0, 33, 7, 1], [5, 9, 0, 1]
    check_append(
        ops,
        append_case(
            contexts, rows, page_size=page_size, heads=heads, head_dim=head_dim, dtype=dtype
        ),
    )


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_append_kv_norms_heads_first(ops, dtype):
    case = append_case([3, 0], [4, 2], head_dim=64, dtype=dtype)
    norms = {f"{x}_norm": 1 + kit.randn(64, seed=i, dtype=dtype) for i, x in enumerate("qk")}
    check_append(ops, case | norms | {"eps": 1e-3})


def test_append_kv_may_norm_one_of_the_two(ops):
    case = append_case([3, 0], [4, 2])
    check_append(ops, case | {"k_norm": 1 + kit.randn(16, seed=0)})


@WIDTHS
def test_append_kv_with_slot_base(ops, dtype):
    case = append_case([3, 10], [4, 2], dtype=dtype)
    check_append(ops, case | {"slot_base": ints(6, 0)})


@WIDTHS
def test_append_kv_positions_may_repeat_in_a_tree(ops, dtype):
    case = append_case([3, 10], [4, 2], dtype=dtype)
    check_append(ops, case | {"position": ints(3, 4, 4, 5, 10, 11)})


@WIDTHS
@pytest.mark.parametrize(("offset", "stride"), [(3, 20), (8, 20), (3, 24), (8, 24)])
def test_append_kv_strided_and_in_place(ops, offset, stride, dtype):
    """qkv rows inside a larger array, q_out the q part of qkv, caches with strides of their own."""
    plain = append_case([3, 10], [4, 2], dtype=dtype)
    case = dict(plain)
    wide = torch.full((8, 200), NAN, dtype=dtype)
    case["qkv"] = wide[1:7, offset : offset + 160].copy_(plain["qkv"])
    case["q_out"] = case["qkv"][:, : 6 * 16].unflatten(-1, (6, 16))
    pages = plain["k_cache"].shape[0]
    k_cache = torch.full((pages, 2, 5, stride), NAN, dtype=dtype)
    case["k_cache"] = k_cache[..., :16].transpose(1, 2)
    case["v_cache"] = torch.full((pages, 5, 4, 16), NAN, dtype=dtype)[:, :, ::2]
    case["cos_sin"] = torch.full((14, 20), NAN)[:, :16].copy_(plain["cos_sin"])
    ops.append_kv(**plain)
    ops.append_kv(**case)
    assert kit.same_bits(case["q_out"], plain["q_out"])
    for name in ("k_cache", "v_cache"):
        assert kit.same_bits(case[name], plain[name])


@WIDTHS
def test_append_kv_row_equals_a_batch_of_one(ops, dtype):
    case = append_case([3, 10], [4, 2], head_dim=64, dtype=dtype)
    ops.append_kv(**case)
    for row in range(6):
        request = int(row >= 4)
        alone = append_case([3, 10], [4, 2], head_dim=64, dtype=dtype)
        alone |= {name: alone[name][row : row + 1] for name in ("qkv", "q_out", "position")}
        alone |= {n: alone[n][request : request + 1] for n in ("block_table", "status")}
        alone |= {"context_len": alone["position"].clone(), "row_start": ints(0, 1)}
        ops.append_kv(**alone)
        assert kit.same_bits(alone["q_out"][0], case["q_out"][row])
        slot = int(alone["position"][0])
        where = reference.places(case["block_table"], request, [slot], 5)
        for name in ("k_cache", "v_cache"):
            assert kit.same_bits(alone[name][where], case[name][where])


@pytest.mark.sanitize
@WIDTHS
def test_append_kv_leaves_padded_rows_alone(ops, dtype):
    """Fault 26: rows past row_start's end; fault 25: no request at all."""
    case = append_case([3, 10], [4, 2], dtype=dtype)
    case["row_start"][:] = ints(0, 4, 4)
    case["block_table"][1] = -7
    case["position"][4:] = 2**31 - 1
    ops.append_kv(**case)
    assert not case["status"].any()
    assert case["q_out"][4:].isnan().all() and not case["q_out"][:4].isnan().any()
    names = ("context_len", "block_table", "status")
    ops.append_kv(**case | {n: case[n][:0] for n in names} | {"row_start": ints(0)})


@WIDTHS
@pytest.mark.parametrize(
    ("name", "index", "value", "status"),
    [
        ("position", 0, 14, Status.BAD_LENGTH),  # cos_sin has 14 rows
        ("position", 0, -1, Status.BAD_LENGTH),
        ("position", 0, 2**31 - 1, Status.BAD_LENGTH),
        ("context_len", 0, 2**31 - 1, Status.BAD_LENGTH),
        ("context_len", 0, -2, Status.BAD_LENGTH),
        ("slot_base", 0, 2**31 - 1, Status.BAD_LENGTH),
        ("slot_base", 0, -3, Status.BAD_LENGTH),
        ("block_table", (0, 0), -1, Status.BAD_PAGE),
        ("block_table", (0, 0), 2**31 - 1, Status.BAD_PAGE),
    ],
)
def test_append_kv_reports_and_skips_bad_rows(ops, name, index, value, status, dtype):
    case = append_case([3, 10], [1, 2], dtype=dtype) | {"slot_base": ints(0, 0)}
    case["cos_sin"] = rope_table(14, 16)
    case[name][index] = value
    ops.append_kv(**case)
    assert case["status"].tolist() == [status, Status.OK]
    assert (case["q_out"][0] == 0).all() and not case["q_out"].isnan().any()
    written = ~case["k_cache"].isnan().all(-1).all(-1)
    assert int(written.sum()) == 2  # the two rows of the healthy request
    assert torch.equal(written, ~case["v_cache"].isnan().all(-1).all(-1))


@WIDTHS
@pytest.mark.parametrize("row_start", [[0, 5, 3], [-1, 4, 6], [0, 4, 7]])
def test_append_kv_reports_row_start_outside_the_rows(ops, row_start, dtype):
    case = append_case([3, 10], [4, 2], dtype=dtype)
    ops.append_kv(**case | {"row_start": ints(*row_start)})
    assert (case["status"] == Status.BAD_LENGTH).any()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"qkv": torch.zeros(6, 160).int()}, TypeError, "qkv: expected dtype float32 or float16"),
        ({"qkv": torch.zeros(160, 6).t()}, ValueError, "qkv: expected a contiguous last axis"),
        ({"qkv": torch.zeros(6)}, ValueError, r"qkv: expected shape \[\*, \*\]"),
        ({"qkv": torch.zeros(6, 150)}, ValueError, r"qkv: expected shape \[6, 160\]"),
        ({"q_out": torch.zeros(6, 6, 16).half()}, TypeError, "q_out: expected the dtype of qkv"),
        ({"q_out": torch.zeros(6, 16, 6).mT}, ValueError, "q_out: expected a contiguous last"),
        ({"q_out": torch.zeros(5, 6, 16)}, ValueError, r"q_out: expected shape \[6, \*, 16\]"),
        ({"q_out": torch.zeros(6, 5, 16)}, ValueError, r"qkv: expected shape \[6, 144\], got"),
        ({"q_out": torch.zeros(6, 0, 16)}, ValueError, "q_out: expected 1 head or more, got 0"),
        ({"k_cache": torch.zeros(9, 5, 2, 16).half()}, TypeError, "k_cache: expected the dtype"),
        ({"v_cache": torch.zeros(9, 4, 2, 16)}, ValueError, "v_cache: expected shape"),
        ({"cos_sin": torch.zeros(14, 16).half()}, TypeError, "cos_sin: expected dtype float32"),
        ({"cos_sin": torch.zeros(14, 8)}, ValueError, r"cos_sin: expected shape \[\*, 16\]"),
        ({"position": torch.zeros(6)}, TypeError, "position: expected dtype int32"),
        ({"position": ints(0)}, ValueError, r"position: expected shape \[6\]"),
        ({"row_start": torch.zeros(3)}, TypeError, "row_start: expected dtype int32"),
        ({"context_len": ints(0)}, ValueError, r"context_len: expected shape \[2\]"),
        ({"block_table": ints(0)}, ValueError, r"block_table: expected shape \[2, \*\]"),
        ({"status": ints(0)}, ValueError, r"status: expected shape \[2\]"),
        ({"slot_base": ints(0)}, ValueError, r"slot_base: expected shape \[2\]"),
        ({"q_norm": torch.zeros(16).half()}, TypeError, "q_norm: expected the dtype of qkv"),
        ({"k_norm": torch.zeros(8)}, ValueError, r"k_norm: expected shape \[16\]"),
        ({"eps": -1.0}, ValueError, "eps: expected 0 or more"),
    ],
)
def test_append_kv_checks_its_arguments(changes, error, match):
    with pytest.raises(error, match="append_kv: " + match):
        flat.append_kv(**append_case([3, 10], [4, 2]) | changes)


# ---- commit_path -------------------------------------------------------------------------------


def commit_case(contexts, rows, paths, *, page_size=5, dtype=torch.float32, layers=3, seed=0):
    """The rows of a pass at their slots; unused memory holds NaN."""
    batch = make_batch(contexts, rows, page_size, seed=seed)
    shape = (layers, batch.num_pages, page_size, 2, 8)
    caches = [torch.full(shape, NAN, dtype=dtype) for _ in range(2)]
    features = torch.full((batch.num_pages, page_size, 7), NAN, dtype=torch.bfloat16)
    for request, (context, count) in enumerate(zip(contexts, rows, strict=True)):
        where = reference.places(batch.block_table, request, range(context + count), page_size)
        for i, cache in enumerate(caches):
            values = kit.randn(layers, context + count, 2, 8, seed=9 * request + i, dtype=dtype)
            cache[:, where[0], where[1]] = values
    path = torch.full((len(rows), 17), -5, dtype=torch.int32)
    for request, kept in enumerate(paths):
        path[request, : len(kept)] = ints(*kept)
    return {
        "k_cache": caches[0],
        "v_cache": caches[1],
        "features": features,
        "feature_rows": kit.randn(batch.num_rows, 7, seed=3, dtype=torch.bfloat16),
        "row_start": batch.row_start,
        "path": path,
        "num_emitted": ints(*(len(kept) for kept in paths)),
        "context_len": batch.context_len,
        "block_table": batch.block_table,
        "status": batch.status,
    }


def expected_commit(case):
    return reference.commit_path(**{name: case[name] for name in case if name != "status"})


def check_commit(ops, case):
    expected = expected_commit(case)
    ops.commit_path(**case)
    assert not case["status"].any()
    names = ("k_cache", "v_cache", "features", "context_len")
    for name, want in zip(names, expected, strict=True):
        assert kit.same_bits(case[name], want.to(case[name].dtype)), name


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("page_size", [1, 5, 16, 128])
def test_commit_path_keeps_the_paths_rows(ops, page_size, dtype):
    """Fault 28: off the first branch, so the rows kept are not the first ones; the moves overlap.

    Requests that keep one row, none at all and (fault 32) have no rows are among them.
    """
    paths = [[0, 2, 3, 5, 11], [0], [], [0, 1, 2, 7], []]
    check_commit(ops, commit_case([4, 33, 2, 0, 6], [12, 3, 4, 8, 0], paths, page_size=page_size,
                             dtype=dtype))  # fmt: skip


@pytest.mark.sanitize
def test_commit_path_keeps_the_last_accepted_row(ops):
    """Fault 29: every draft is accepted, and the deepest row's KV and feature stay with it."""
    case = commit_case([4], [17], [list(range(17))])
    last = reference.places(case["block_table"], 0, [4 + 16], 5)
    key = case["k_cache"][:, last[0], last[1]].clone()
    check_commit(ops, case)
    assert case["context_len"].tolist() == [21]
    assert kit.same_bits(case["k_cache"][:, last[0], last[1]], key)
    assert kit.same_bits(case["features"][last][0], case["feature_rows"][16])


def test_commit_path_after_a_verify_pass_reads_the_accepted_keys(ops):
    """Appended tree rows, then a commit: the cache equals one filled by the accepted text alone."""
    tree = append_case([6], [5]) | {"position": ints(6, 7, 7, 8, 8)}
    ops.append_kv(**tree)
    names = ("row_start", "context_len", "block_table", "status")
    caches = {name: tree[name].unsqueeze(0) for name in ("k_cache", "v_cache")}
    kept = {"path": ints(0, 2, 4)[None], "num_emitted": ints(3)}
    ops.commit_path(**caches, **kept, **{name: tree[name] for name in names})
    text = append_case([6], [5])
    text |= {name: tree[name] for name in ("block_table", "cos_sin")}
    text |= {"qkv": tree["qkv"][[0, 2, 4]], "q_out": text["q_out"][:3], "row_start": ints(0, 3)}
    ops.append_kv(**text | {"position": ints(6, 7, 8)})
    where = reference.places(tree["block_table"], 0, range(6, 9), 5)
    for name in ("k_cache", "v_cache"):
        assert kit.same_bits(tree[name][where], text[name][where])
    assert tree["context_len"].tolist() == [9]


def test_commit_path_without_features(ops):
    case = commit_case([4], [6], [[0, 3, 4]])
    expected = expected_commit(case)
    case |= {"features": None, "feature_rows": None}
    ops.commit_path(**case)
    assert kit.same_bits(case["k_cache"], expected[0])
    assert case["context_len"].tolist() == [7]


def test_commit_path_strided(ops):
    plain = commit_case([4], [6], [[0, 3, 4]])
    strided = dict(plain)
    strided["context_len"] = plain["context_len"].clone()
    # Layers inside heads; heads outside slots; features inside wider rows.
    strided["k_cache"] = plain["k_cache"].permute(1, 2, 3, 0, 4).clone().permute(3, 0, 1, 2, 4)
    strided["v_cache"] = plain["v_cache"].transpose(2, 3).contiguous().transpose(2, 3)
    for name in ("features", "feature_rows"):
        wide = torch.full((*plain[name].shape[:-1], 11), NAN, dtype=torch.bfloat16)
        strided[name] = wide[..., 2:9].copy_(plain[name])
    check_commit(ops, strided)
    ops.commit_path(**plain)
    for name in ("k_cache", "v_cache", "features"):
        assert kit.same_bits(strided[name], plain[name])


@pytest.mark.parametrize(
    ("name", "index", "value", "status"),
    [
        ("path", (0, 0), 1, Status.BAD_TREE),
        ("path", (0, 1), 3, Status.BAD_TREE),  # 0, 3, 3: not rising
        ("path", (0, 2), 1, Status.BAD_TREE),
        ("path", (0, 2), 6, Status.BAD_TREE),  # the request has six rows
        ("path", (0, 2), 2**31 - 1, Status.BAD_TREE),
        ("path", (0, 1), -1, Status.BAD_TREE),
        ("num_emitted", 0, -1, Status.BAD_LENGTH),
        ("num_emitted", 0, 18, Status.BAD_LENGTH),
        ("context_len", 0, -1, Status.BAD_LENGTH),
        ("context_len", 0, 2**31 - 1, Status.BAD_LENGTH),
        ("block_table", (0, 1), -1, Status.BAD_PAGE),
        ("block_table", (0, 1), 2**31 - 1, Status.BAD_PAGE),
    ],
)
def test_commit_path_reports_and_leaves_a_bad_request_untouched(ops, name, index, value, status):
    case = commit_case([4, 8], [6, 3], [[0, 2, 3], [0, 2]])
    pages = case["block_table"][0, :2].tolist()
    case[name][index] = value
    before = {n: case[n].clone() for n in ("k_cache", "v_cache", "features", "context_len")}
    ops.commit_path(**case)
    assert case["status"].tolist() == [status, Status.OK]
    assert case["context_len"].tolist() == [int(before["context_len"][0]), 10]
    for n in ("k_cache", "v_cache"):
        assert kit.same_bits(case[n][:, pages], before[n][:, pages])
    assert kit.same_bits(case["features"][pages], before["features"][pages])


def test_commit_path_reports_a_bad_path_before_bad_slots(ops):
    """The slots of a path that does not rise have no meaning. Bits of bad slots are ORed."""
    for path, status in ([0, 2, 1], Status.BAD_TREE), ([0, 2, 5], BAD_SLOTS):
        case = commit_case([4], [6], [path])
        case["block_table"][0, 0] = -1  # of slot 4
        case["block_table"] = case["block_table"][:, :1]  # slots 5 and later have no entry
        ops.commit_path(**case)
        assert case["status"].tolist() == [status]


def test_commit_path_without_requests(ops):
    case = commit_case([4], [6], [[0, 2]])
    before = {n: case[n].clone() for n in ("k_cache", "v_cache", "features")}
    names = ("path", "num_emitted", "context_len", "block_table", "status")
    ops.commit_path(**case | {n: case[n][:0] for n in names} | {"row_start": ints(0)})
    assert all(kit.same_bits(case[n], array) for n, array in before.items())


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"k_cache": torch.zeros(1, 9, 5, 2, 8).int()}, TypeError, "k_cache: expected dtype float"),
        ({"k_cache": torch.zeros(9, 5, 2, 8)}, ValueError, r"k_cache: expected shape \[\*, \*, \*"),
        ({"k_cache": torch.zeros(1, 9, 5, 8, 2).mT}, ValueError, "k_cache: expected a contiguous"),
        ({"v_cache": torch.zeros(3, 9, 5, 2, 8).half()}, TypeError, "v_cache: expected the dtype"),
        ({"v_cache": torch.zeros(2, 9, 5, 2, 8)}, ValueError, "v_cache: expected shape"),
        ({"features": None}, ValueError, "features and feature_rows: expected both or neither"),
        ({"features": torch.zeros(6, 5, 7).int()}, TypeError, "features: expected dtype float32"),
        ({"features": torch.zeros(1, 5, 7)}, ValueError, "features: expected shape"),
        ({"feature_rows": torch.zeros(6, 7)}, TypeError, "feature_rows: expected the dtype of"),
        (
            {"feature_rows": torch.zeros(6, 6).bfloat16()},
            ValueError,
            r"feature_rows: expected shape \[\*, 7\]",
        ),
        ({"row_start": torch.zeros(2)}, TypeError, "row_start: expected dtype int32"),
        ({"path": torch.zeros(1, 17)}, TypeError, "path: expected dtype int32"),
        ({"path": ints(0)}, ValueError, r"path: expected shape \[1, \*\]"),
        ({"num_emitted": torch.zeros(1)}, TypeError, "num_emitted: expected dtype int32"),
        ({"num_emitted": ints(0, 0)}, ValueError, r"num_emitted: expected shape \[1\]"),
        ({"context_len": ints(0, 0)}, ValueError, r"context_len: expected shape \[1\]"),
        ({"block_table": ints(0)}, ValueError, r"block_table: expected shape \[1, \*\]"),
        ({"status": ints(0, 0)}, ValueError, r"status: expected shape \[1\]"),
    ],
)
def test_commit_path_checks_its_arguments(changes, error, match):
    with pytest.raises(error, match="commit_path: " + match):
        flat.commit_path(**commit_case([4], [6], [[0, 3, 4]]) | changes)


def test_commit_path_needs_a_page_size():
    cache = torch.zeros(1, 9, 0, 2, 8)
    case = commit_case([4], [6], [[0]]) | {"features": None, "feature_rows": None}
    with pytest.raises(ValueError, match="commit_path: k_cache: expected a page size of 1 or more"):
        flat.commit_path(**case | {"k_cache": cache, "v_cache": cache})


# ---- copy_pages --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("shape", [(3, 7, 5, 2, 8), (1, 7, 3), (2, 7, 5, 9)])
def test_copy_pages_equals_reference(ops, shape, dtype):
    cache = kit.randn(*shape, seed=0, dtype=dtype)
    expected = reference.copy_pages(cache, [3, 3, 0], [5, 6, 1])
    ops.copy_pages(cache, ints(3, 3, 0), ints(5, 6, 1))
    assert kit.same_bits(cache, expected)


def test_copy_pages_strided_over_layers_and_pages(ops):
    larger = kit.randn(4, 14, 5, 2, 8, seed=0)
    view, expected = larger[1:3, ::2], larger.clone()
    expected[1:3, 8] = expected[1:3, 4]
    ops.copy_pages(view, ints(2), ints(4))
    assert kit.same_bits(larger, expected)


@pytest.mark.sanitize
def test_copy_pages_skips_padding_and_empty_lists(ops):
    """Fault 32: ids outside the cache are not followed."""
    cache = kit.randn(2, 7, 5, 8, seed=0)
    expected = reference.copy_pages(cache, [1], [2])
    ops.copy_pages(cache, ints(-1, 1, 0, 2**31 - 1, 3), ints(4, 2, -1, 5, 7))
    assert kit.same_bits(cache, expected)
    ops.copy_pages(cache, ints(), ints())
    assert kit.same_bits(cache, expected)


@pytest.mark.parametrize(
    ("cache", "source", "destination", "error", "match"),
    [
        (torch.zeros(2, 7, 5).int(), ints(0), ints(1), TypeError, "cache: expected dtype float32"),
        (torch.zeros(2, 7), ints(0), ints(1), ValueError, "cache: expected 3 to 6 axes, got 2"),
        (
            torch.zeros(2, 7, 5, 8).mT,
            ints(0),
            ints(1),
            ValueError,
            "cache: a page: expected a contiguous array",
        ),
        (torch.zeros(2, 7, 5), torch.zeros(1), ints(1), TypeError, "source: expected dtype int32"),
        (torch.zeros(2, 7, 5), ints(0)[None], ints(1), ValueError, r"source: expected shape \[\*"),
        (
            torch.zeros(2, 7, 5),
            ints(0),
            torch.zeros(1),
            TypeError,
            "destination: expected dtype int32",
        ),
        (
            torch.zeros(2, 7, 5),
            ints(0),
            ints(1, 2),
            ValueError,
            r"destination: expected shape \[1\]",
        ),
    ],
)
def test_copy_pages_checks_its_arguments(cache, source, destination, error, match):
    with pytest.raises(error, match="copy_pages: " + match):
        tlt_ext.copy_pages(cache, source, destination)
