"""Tree attention equals its reference, reads only the keys it needs, and is row-invariant."""

from bisect import bisect_left

import pytest
import torch

import tlt_ext
from tests import kit, reference
from tests.csrc.paged import make_batch, random_tree
from tlt_ext import Status

EDGE_ROWS = [0, 1, 31, 32, 33, 63, 64, 65, 128]


def make_case(
    contexts,
    rows,
    *,
    page_size=5,
    heads=(6, 2),
    head_dim=16,
    dtype=torch.float32,
    tree=True,
    bases=None,
    seed=0,
):
    """Arguments of a call; cache slots that no row may read hold NaN."""
    num_heads, kv_heads = heads
    spare = max(bases or [0])
    batch = make_batch(contexts, rows, page_size, seed=seed, spare_slots=spare)
    shape = (batch.num_pages, page_size, kv_heads, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    position, ancestors = [], []
    for request, (context, count) in enumerate(zip(contexts, rows, strict=True)):
        base = bases[request] if bases else 0
        for i, cache in enumerate(caches):
            filled = context + base + count
            values = kit.randn(filled, kv_heads, head_dim, seed=seed + 10 * request + i)
            for slot in range(filled):
                cache[batch.where(request, slot)] = values[slot].to(dtype)
        depths, slots = random_tree(base + count, seed=seed + request)
        depths = depths if tree else range(base + count)
        position += [context + depth for depth in depths[base:]]
        ancestors.append(slots[base:])
    q = kit.randn(batch.num_rows, num_heads, head_dim, seed=seed + 7, dtype=dtype)
    return {
        "q": q,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "row_start": batch.row_start,
        "context_len": batch.context_len,
        "position": torch.tensor(position, dtype=torch.int32),
        "block_table": batch.block_table,
        "ancestors": torch.cat(ancestors) if tree else None,
        "slot_base": torch.tensor(bases, dtype=torch.int32) if bases else None,
    }


def attend(ops, case, **changes):
    """Runs the op; returns out, lse and status."""
    q = case["q"]
    outputs = {
        "out": torch.full_like(q, float("nan")),
        "lse": torch.full(q.shape[:2], float("nan")),
        "status": torch.zeros(len(case["row_start"]) - 1, dtype=torch.int32),
    }
    args = {**outputs, **case, **changes}
    ops.tree_attention(**args)
    return args["out"], args["lse"], args["status"]


def check(ops, case, **changes):
    out, lse, status = attend(ops, case, **changes)
    expected, expected_lse = reference.tree_attention(**{**case, **changes})
    assert not status.any()
    kit.assert_close(out, expected)
    tolerance = kit.TOLERANCE[out.dtype]
    assert (lse - expected_lse).abs().max() <= tolerance * expected_lse.abs().max()


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("page_size", [1, 5, 16, 128])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((3, 3), 8), ((9, 3), 64), ((8, 1), 24), ((10, 2), 128), ((2, 2), 256)]
)
def test_equals_reference_on_odd_shapes(ops, heads, head_dim, page_size, tree):
    case = make_case(
        [0, 33, 7, 128], [5, 9, 0, 17], page_size=page_size, heads=heads, head_dim=head_dim,
        tree=tree,
    )  # fmt: skip
    check(ops, case)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("tree", [True, False])
def test_equals_reference_at_the_edges_of_row_counts(ops, dtype, tree):
    """Fault 27: 31, 32, 33, 63, 64, 65, 128 rows a request; fault 32: none at all."""
    contexts = [3, 0, 1, 31, 32, 33, 64, 5, 17]
    check(ops, make_case(contexts, EDGE_ROWS, page_size=16, head_dim=64, dtype=dtype, tree=tree))


@pytest.mark.parametrize("tree", [True, False])
def test_slot_base_places_later_levels(ops, tree):
    """A drafter's later level: its rows lie behind the earlier levels, their ancestors."""
    check(ops, make_case([20, 0, 41], [4, 8, 1], bases=[4, 12, 0], tree=tree))


def test_scale_is_a_factor_of_the_scores(ops):
    check(ops, make_case([9], [3]), scale=0.5)


def test_strided_arrays(ops):
    """q, out, lse, ancestors and both caches inside larger arrays full of NaN."""
    case = make_case([21, 4], [7, 3], heads=(6, 2), head_dim=24)

    def inside(x):
        larger = [size + 3 for size in x.shape]
        fill = float("nan") if x.is_floating_point() else 255
        view = torch.full(larger, fill, dtype=x.dtype)[tuple(slice(1, 1 + n) for n in x.shape)]
        return view.copy_(x)

    names = ("q", "k_cache", "v_cache", "ancestors", "block_table")
    strided = {name: inside(case[name]) for name in names}
    expected = attend(ops, case)
    out, lse, status = attend(
        ops, case, out=inside(torch.zeros_like(case["q"])), lse=inside(expected[1] * 0), **strided
    )
    assert not status.any()
    assert kit.same_bits(out, expected[0]) and kit.same_bits(lse, expected[1])


def test_v_cache_may_have_other_strides_than_k_cache(ops):
    case = make_case([21], [7])
    v = case["v_cache"].transpose(1, 2).contiguous().transpose(1, 2)
    assert kit.same_bits(attend(ops, case, v_cache=v)[0], attend(ops, case)[0])


def path_case(context, length, slots, *, rows, others, dtype, seed=3):
    """A path of keys of one text, its tail in flight at `slots` among rejected siblings.

    Of `length` keys the first `context` are committed; key context + i lies at in-flight slot
    slots[i]. Returns the case and the index of the path's last row.
    """
    kv_heads, head_dim = 2, 64
    page_size = 5 if dtype == torch.float32 else 16
    contexts, counts = [context, *([11] * others)], [rows, *([3] * others)]
    case = make_case(
        contexts, counts, page_size=page_size, heads=(6, kv_heads), head_dim=head_dim,
        dtype=dtype, seed=100 * seed + rows + others,
    )  # fmt: skip
    batch = make_batch(contexts, counts, page_size, seed=100 * seed + rows + others)
    assert torch.equal(batch.block_table, case["block_table"])
    for i, name in enumerate(("k_cache", "v_cache")):
        text = kit.randn(length, kv_heads, head_dim, seed=seed + i, dtype=dtype)
        for key in range(length):
            slot = key if key < context else context + slots[key - context]
            case[name][batch.where(0, slot)] = text[key]
    row = slots[-1]
    case["q"][row] = kit.randn(6, head_dim, seed=seed + 9, dtype=dtype)
    case["position"][row] = length - 1
    case["ancestors"][row, : len(slots) - 1] = torch.tensor(slots[:-1], dtype=torch.uint8)
    return case, row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 31, 32, 33, 34, 48, 63, 64, 65, 97, 129, 200])
def test_a_row_depends_on_its_keys_in_position_order_alone(ops, length, dtype):
    """Permuted slots, rejected siblings, other committed lengths and other requests beside it."""
    alone, row = path_case(length - 1, length, [0], rows=1, others=0, dtype=dtype)
    out, lse, status = attend(ops, alone, ancestors=None)  # plain decoding of one row
    assert not status.any()
    expected = out[row], lse[row]
    draw = kit.generator(length)
    for in_flight in range(1, min(length, 17) + 1):
        for rows in {in_flight, in_flight + 5, 128}:
            slots = torch.randperm(rows, generator=draw)[:in_flight].sort().values.tolist()
            case, row = path_case(
                length - in_flight, length, slots, rows=rows, others=in_flight % 3, dtype=dtype
            )
            out, lse, status = attend(ops, case)
            assert not status.any()
            assert kit.same_bits(out[row], expected[0]), (in_flight, slots)
            assert kit.same_bits(lse[row], expected[1])


def test_prefill_in_any_chunks_equals_decoding_one_by_one(ops):
    whole = make_case([0], [75], tree=False, heads=(6, 2), head_dim=64)
    expected, _, _ = attend(ops, whole)
    for chunk in (1, 7, 8, 32):
        out = torch.full_like(expected, float("nan"))
        for start in range(0, 75, chunk):
            rows = slice(start, min(75, start + chunk))
            attend(
                ops,
                whole,
                q=whole["q"][rows],
                out=out[rows],
                lse=None,
                position=whole["position"][rows],
                row_start=torch.tensor([0, rows.stop - start], dtype=torch.int32),
                context_len=torch.tensor([start], dtype=torch.int32),
            )
        assert kit.same_bits(out, expected)


def test_a_request_equals_a_batch_of_one(ops):
    case = make_case([40, 3, 77], [12, 1, 20])
    expected, _, _ = attend(ops, case)
    for request in range(3):
        begin, end = case["row_start"][request : request + 2].tolist()
        alone = {name: case[name][begin:end] for name in ("q", "position", "ancestors")}
        alone |= {n: case[n][request : request + 1] for n in ("context_len", "block_table")}
        alone["row_start"] = torch.tensor([0, end - begin], dtype=torch.int32)
        out, _, _ = attend(ops, case | alone)
        assert kit.same_bits(out, expected[begin:end])


def test_threads_do_not_change_bits(ops):
    case = make_case([700, 900], [16, 64], heads=(8, 2), head_dim=64, page_size=16)
    threads = tlt_ext.num_threads()
    try:
        tlt_ext.set_num_threads(1)
        expected, _, _ = attend(ops, case)
        tlt_ext.set_num_threads(3)
        assert kit.same_bits(attend(ops, case)[0], expected)
    finally:
        tlt_ext.set_num_threads(threads)


def test_padded_rows_and_requests_are_inert(ops):
    """Fault 26: a bucket larger than the batch; fault 25: no request at all."""
    case = make_case([6, 9, 2], [3, 2, 4])
    expected, _, _ = attend(ops, case)
    starts = torch.tensor([0, 3, 5, 5], dtype=torch.int32)  # the last request became empty
    bad = case["block_table"].clone()
    bad[2] = -7
    case["context_len"][2] = 2**31 - 1
    out, _, status = attend(ops, case, row_start=starts, block_table=bad)
    assert not status.any()
    assert kit.same_bits(out[:5], expected[:5])
    assert out[5:].isnan().all()
    empty = {name: case[name][:0] for name in ("context_len", "block_table")}
    out, _, _ = attend(ops, case | empty | {"row_start": starts[:1]})
    assert out.isnan().all()


def zeroed(out, lse):
    return [bool((o == 0).all() and (x == -torch.inf).all()) for o, x in zip(out, lse, strict=True)]


@pytest.mark.parametrize("page", [-1, 2**31 - 1, -(2**31)])
def test_a_garbage_page_that_is_needed_is_reported(ops, page):
    case = make_case([12, 12], [3, 3], page_size=4)
    expected, _, _ = attend(ops, case)
    case["block_table"][1, 1] = page
    out, lse, status = attend(ops, case)
    assert status.tolist() == [Status.OK, Status.BAD_PAGE]
    assert zeroed(out, lse) == [False] * 3 + [True] * 3
    assert kit.same_bits(out[:3], expected[:3])


def test_a_garbage_page_hurts_only_rows_that_need_it(ops):
    case = make_case([4], [8], page_size=4)
    case["position"][:] = 4  # eight roots
    case["block_table"][0, 2] = -1
    out, lse, status = attend(ops, case)
    assert status.tolist() == [Status.BAD_PAGE]
    assert zeroed(out, lse) == [False] * 4 + [True] * 4


@pytest.mark.parametrize("context", [-1, 41, 2**31 - 1])
def test_lengths_past_the_table_are_reported(ops, context):
    case = make_case([12, 12], [3, 3], page_size=4)
    case["context_len"][0] = context
    case["position"][:3] = context
    out, lse, status = attend(ops, case)
    assert status.tolist() == [Status.BAD_LENGTH, Status.OK]
    assert zeroed(out, lse) == [True] * 3 + [False] * 3


@pytest.mark.parametrize("base", [-1, 2**31 - 1])
def test_slot_base_past_the_table_is_reported(ops, base):
    case = make_case([12], [3], bases=[0])
    out, lse, status = attend(ops, case, slot_base=torch.tensor([base], dtype=torch.int32))
    assert status.tolist() == [Status.BAD_LENGTH] and all(zeroed(out, lse))


def test_positions_outside_the_request_are_reported(ops):
    case = make_case([12], [3])
    case["position"][:] = torch.tensor([12, 11, 12 + 17])
    out, lse, status = attend(ops, case)
    assert status.tolist() == [Status.BAD_LENGTH]
    assert zeroed(out, lse) == [False, True, True]
    chain = make_case([12], [3], tree=False)
    chain["position"][1] += 1
    out, lse, status = attend(ops, chain)
    assert status.tolist() == [Status.BAD_LENGTH]
    assert zeroed(out, lse) == [False, True, False]


def test_ancestors_that_do_not_rise_to_the_row_are_reported(ops):
    """Fault 9: a row that is its own ancestor, a later row, a repeated one."""
    case = make_case([12], [5])
    case["position"][:] = torch.tensor([12, 13, 13, 14, 14])
    case["ancestors"][:, :2] = torch.tensor([[9, 9], [1, 9], [200, 9], [1, 1], [0, 1]])
    out, lse, status = attend(ops, case)
    assert status.tolist() == [Status.BAD_TREE]
    assert zeroed(out, lse) == [False, True, True, True, False]


@pytest.mark.parametrize("row_start", [[0, 5, 3], [-1, 2, 6], [0, 3, 7]])
def test_row_start_outside_the_rows_is_reported(ops, row_start):
    case = make_case([12, 12], [3, 3])
    _, _, status = attend(ops, case, row_start=torch.tensor(row_start, dtype=torch.int32))
    assert (status == Status.BAD_LENGTH).any()


def test_status_bits_are_ored(ops):
    case = make_case([12], [3])
    status = torch.tensor([int(Status.NAN_LOGITS)], dtype=torch.int32)
    case["block_table"][0, 0] = -1
    attend(ops, case, status=status)
    assert status.tolist() == [Status.NAN_LOGITS | Status.BAD_PAGE]


def test_nan_in_a_needed_key_or_value_stays_visible(ops):
    for name in ("k_cache", "v_cache"):
        case = make_case([12], [3], page_size=4)
        case[name][case["block_table"][0, 1], 2] = float("nan")
        out, _, _ = attend(ops, case)
        assert out.isnan().all()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"q": torch.zeros(3, 6, 16).int()}, TypeError, "q: expected dtype float32 or float16"),
        ({"q": torch.zeros(6, 3, 16).mT}, ValueError, "q: expected a contiguous last axis"),
        ({"q": torch.zeros(3, 6)}, ValueError, r"q: expected shape \[\*, \*, \*\]"),
        ({"q": torch.zeros(3, 6, 24)}, ValueError, r"q: expected shape \[3, 6, 16\]"),
        ({"q": torch.zeros(3, 5, 16)}, ValueError, "q: expected a multiple of the 2 kv heads"),
        ({"k_cache": torch.zeros(9, 5, 2, 16).half()}, TypeError, "k_cache: expected the dtype"),
        ({"k_cache": torch.zeros(9, 5, 2)}, ValueError, r"k_cache: expected shape \[\*, \*, \*"),
        ({"k_cache": torch.zeros(9, 5, 16, 2).mT}, ValueError, "k_cache: expected a contiguous"),
        ({"v_cache": torch.zeros(9, 5, 2, 16).half()}, TypeError, "v_cache: expected the dtype"),
        ({"v_cache": torch.zeros(9, 5, 1, 16)}, ValueError, "v_cache: expected shape"),
        ({"out": torch.zeros(3, 6, 16).half()}, TypeError, "out: expected the dtype of q"),
        ({"out": torch.zeros(2, 6, 16)}, ValueError, r"out: expected shape \[3, 6, 16\]"),
        ({"out": torch.zeros(3, 16, 6).mT}, ValueError, "out: expected a contiguous last axis"),
        ({"row_start": torch.zeros(2)}, TypeError, "row_start: expected dtype int32"),
        ({"row_start": torch.zeros(0).int()}, ValueError, "row_start: expected one entry more"),
        ({"context_len": torch.zeros(1)}, TypeError, "context_len: expected dtype int32"),
        ({"context_len": torch.zeros(2).int()}, ValueError, r"context_len: expected shape \[1\]"),
        ({"position": torch.zeros(3)}, TypeError, "position: expected dtype int32"),
        ({"position": torch.zeros(4).int()}, ValueError, r"position: expected shape \[3\]"),
        ({"block_table": torch.zeros(1, 9)}, TypeError, "block_table: expected dtype int32"),
        ({"block_table": torch.zeros(2, 9).int()}, ValueError, "block_table: expected shape"),
        ({"status": torch.zeros(1)}, TypeError, "status: expected dtype int32"),
        ({"status": torch.zeros(2).int()}, ValueError, r"status: expected shape \[1\]"),
        ({"slot_base": torch.zeros(1)}, TypeError, "slot_base: expected dtype int32"),
        ({"slot_base": torch.zeros(2).int()}, ValueError, r"slot_base: expected shape \[1\]"),
        ({"ancestors": torch.zeros(3, 16)}, TypeError, "ancestors: expected dtype uint8"),
        ({"ancestors": torch.zeros(3, 8).byte()}, ValueError, r"ancestors: expected shape \[3, 16"),
        ({"lse": torch.zeros(3, 6).half()}, TypeError, "lse: expected dtype float32"),
        ({"lse": torch.zeros(3, 5)}, ValueError, r"lse: expected shape \[3, 6\]"),
        ({"scale": float("nan")}, ValueError, "scale: expected a finite number"),
    ],
)
def test_checks_its_arguments(changes, error, match):
    with pytest.raises(error, match="tree_attention: " + match):
        attend(kit.Ops("cpu"), make_case([12], [3]), **changes)


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((9, 0, 2, 16), "a page size of 1 or more, got 0"),
        ((9, 5, 2, 12), "a head size that is a multiple of 8 up to 256, got 12"),
        ((9, 5, 2, 264), "a head size that is a multiple of 8 up to 256, got 264"),
    ],
)
def test_checks_the_cache_shape(shape, match):
    cache = torch.zeros(shape)
    with pytest.raises(ValueError, match="tree_attention: k_cache: expected " + match):
        attend(kit.Ops("cpu"), make_case([12], [3]), k_cache=cache, v_cache=cache)


# The dimensions of a head, where splits of 256 keys end, and items of so many requests: to one
# block of each of 132 multiprocessors, or two.
SHARES = {
    "128": (128, 1024, ((1, 16), (3, 5), (8, 4))),
    "64": (64, 4096, ((1, 33), (5, 6), (16, 2))),
}


@pytest.mark.parametrize("name", SHARES)
def test_workspace_has_room_for_the_partials_of_every_length(name):
    """The splits of `csrc/attention/splits.h`, and how few of them the first block may fold."""
    rows, heads, slots = 16, 32, 40_000
    dim, mid, shares = SHARES[name]
    cuts = [
        *range(0, 1024, 128),
        *range(1024, mid, 256),
        *range(mid, 8192, 512),
        *range(8192, slots, 1024),
    ]

    def split_keys(key):
        return 128 if key < 1024 else 256 if key < mid else 512 if key < 8192 else 1024

    def up(key, unit):
        return -(-key // unit) * unit

    for batch, items in shares:
        size = tlt_ext.attention_workspace_bytes(
            num_requests=batch,
            num_rows=batch * rows,
            num_heads=heads,
            num_kv_heads=8,
            head_dim=dim,
            max_slots=slots,
        )
        partials = size // (batch * rows * heads * (dim + 2) * 4)
        for context in range(0, slots - 16, 61):
            end = context + 16
            share = end * 15 // (16 * items)
            first_item = up(share + 1, split_keys(end // 2))
            first = bisect_left(cuts, up(first_item, split_keys(first_item)))
            assert bisect_left(cuts, context) - first + 1 <= partials, context


def test_workspace_has_room_for_a_partial_of_every_split():
    """One request with a short table: each of the first splits has a block of its own."""
    rows, heads, dim, slots = 16, 32, 128, 16_000
    size = tlt_ext.attention_workspace_bytes(
        num_requests=1,
        num_rows=rows,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=dim,
        max_slots=slots,
    )
    splits = 1024 // 128 + (8192 - 1024) // 512 + -(-(slots - 8192) // 1024)
    assert size >= splits * rows * heads * (dim + 2) * 4


def workspace_of_heads(**changes):
    shape = {"num_requests": 1, "num_rows": 1, "num_heads": 8, "num_kv_heads": 1, "head_dim": 64}
    return tlt_ext.attention_workspace_bytes(**(shape | {"max_slots": 4096} | changes))


@pytest.mark.parametrize("heads", [8, 9, 71, 129, 2**16])
def test_workspace_of_any_number_of_heads_a_kv_head(heads):
    """A block has at least one row, also of more heads than a GPU takes."""
    assert workspace_of_heads(num_heads=heads) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 12, "num_kv_heads": 8},
        {"num_rows": -1},
        {"num_requests": 2**31},
        {"num_requests": 2**32, "num_heads": 2**32, "num_kv_heads": 2**32},
        {"num_rows": 2**62},
        {"head_dim": 2**40},
    ],
)
def test_workspace_checks_its_counts(changes):
    with pytest.raises(ValueError, match="attention_workspace_bytes: expected counts"):
        workspace_of_heads(**changes)
