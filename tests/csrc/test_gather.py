"""The entries that a drafter has yet to write: features of a position and the next token."""

import pytest
import torch

from tests import kit, reference
from tests.csrc.paged import make_batch
from tests.grouping import flat
from tlt_ext import Status

NAN, NOBODY = float("nan"), -77


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def gather_case(contexts, counts, *, most, slots=None, page_size=5, dim=24, dtype=torch.float32):
    batch = make_batch(contexts, [1] * len(contexts), page_size)
    size, length = len(contexts), max(contexts, default=0) + 3
    features = torch.full((batch.num_pages, page_size, dim), NAN, dtype=dtype)
    for request, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        where = reference.places(
            batch.block_table, request, range(max(0, context - max(count, 0)), context), page_size
        )
        if where[0]:
            features[where] = kit.randn(len(where[0]), dim, seed=request, dtype=dtype)
    slots = list(range(size))[::-1] if slots is None else slots
    return {
        "features": features,
        "tokens": torch.arange((size + 1) * length, dtype=torch.int32).view(size + 1, length),
        "slot": ints(*slots),
        "context_len": batch.context_len,
        "num_new": ints(*counts),
        "block_table": batch.block_table,
        "status": batch.status,
        "row_start": torch.full((size + 1,), NOBODY, dtype=torch.int32),
        "ids": torch.full((size * most,), NOBODY, dtype=torch.int32),
        "position": torch.full((size * most,), NOBODY, dtype=torch.int32),
        "first": torch.full((size,), NOBODY, dtype=torch.int32),
        "last": torch.full((size,), NOBODY, dtype=torch.int32),
        "new_features": torch.full((size * most, dim), NAN, dtype=dtype),
    }


def check_gather(ops, case):
    arguments = [case[name].tolist() for name in ("slot", "context_len", "num_new")]
    row_start, ids, position, rows = reference.gather_new_rows(
        case["features"], case["tokens"], *arguments, case["block_table"]
    )
    ops.gather_new_rows(**case)
    total = row_start[-1]
    assert not case["status"].any()
    assert case["row_start"].tolist() == row_start
    assert case["ids"].tolist() == ids + [0] * (len(case["ids"]) - total)
    assert case["position"].tolist() == position + [0] * (len(case["ids"]) - total)
    counts = [b - a for a, b in zip(row_start, row_start[1:], strict=False)]
    ends = zip(row_start[1:], counts, strict=True)
    assert case["last"].tolist() == [end - 1 if count else 0 for end, count in ends]
    contexts = zip(case["context_len"].tolist(), counts, strict=True)
    assert case["first"].tolist() == [context - count for context, count in contexts]
    assert kit.same_bits(case["new_features"][:total], rows)
    assert case["new_features"][total:].isnan().all()  # padding rows keep their values


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dim", [24, 7])
def test_gather_new_rows_equals_reference(ops, dim, page_size, dtype):
    """Fault 32: requests without new entries and without any context among them."""
    contexts, counts = [12, 30, 4, 0, 7], [3, 17, 0, 0, 7]
    check_gather(
        ops, gather_case(contexts, counts, most=17, page_size=page_size, dim=dim, dtype=dtype)
    )


@pytest.mark.parametrize("size", [1, 2, 129, 256])
def test_gather_new_rows_of_many_requests(ops, size):
    counts = [1 + b * 7 % 5 for b in range(size)]
    check_gather(ops, gather_case([40 + b % 9 for b in range(size)], counts, most=5))


def test_gather_new_rows_in_bulk(ops):
    check_gather(ops, gather_case([700, 3, 300], [256, 3, 256], most=256))


def test_gather_new_rows_of_all_and_of_none(ops):
    check_gather(ops, gather_case([9, 9], [4, 4], most=4))
    check_gather(ops, gather_case([9, 9], [0, 0], most=4))


def test_gather_new_rows_leaves_inert_requests_alone(ops):
    """Fault 26: a padded request has no rows, whatever its fields hold."""
    case = gather_case([9, 9, 9], [4, 2, 3], most=4, slots=[0, -1, 2])
    case["num_new"][1], case["context_len"][1] = 2**31 - 1, -5
    case["block_table"][1] = 2**31 - 1
    ops.gather_new_rows(**case)
    assert case["row_start"].tolist() == [0, 4, 4, 7]
    assert not case["status"].any()
    assert case["last"].tolist() == [3, 0, 6]


def test_gather_new_rows_reads_a_part_of_the_features(ops):
    """Features inside wider rows, rows inside wider ones: a drafter takes three of four layers."""
    plain = gather_case([12, 30], [3, 17], most=17, dtype=torch.bfloat16)
    case = dict(plain)
    wide = torch.full((*plain["features"].shape[:2], 40), NAN, dtype=torch.bfloat16)
    case["features"] = wide[..., :24].copy_(plain["features"])
    case["new_features"] = torch.full((34, 72), NAN, dtype=torch.bfloat16)[:, 16:40]
    case["tokens"] = torch.full((3, 50), NOBODY, dtype=torch.int32)[:, 2:35].copy_(plain["tokens"])
    check_gather(ops, case)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_new", -1),
        ("num_new", 5),  # more than a request's share
        ("num_new", 2**31 - 1),
        ("context_len", 2),  # fewer than there are new
        ("context_len", -1),
        ("context_len", 12),  # the store has 12 tokens: the last entry has no next
        ("context_len", 2**31 - 1),
        ("slot", 4),
    ],
)
def test_gather_new_rows_reports_and_gathers_nothing(ops, name, value):
    case = gather_case([9, 9, 9], [4, 3, 2], most=4)
    case[name][1] = value
    ops.gather_new_rows(**case)
    assert case["status"].tolist() == [0, Status.BAD_LENGTH, 0]
    assert case["row_start"].tolist() == [0, 4, 4, 6]
    assert case["last"].tolist() == [3, 0, 5]
    assert case["ids"][6:].tolist() == [0] * 6


@pytest.mark.parametrize(
    ("page", "width", "status"),
    [(-1, None, Status.BAD_PAGE), (2**31 - 1, None, Status.BAD_PAGE), (0, 1, Status.BAD_LENGTH)],
)
def test_gather_new_rows_zeroes_rows_without_a_page(ops, page, width, status):
    case = gather_case([9, 4], [4, 2], most=4)
    case["block_table"][0, 1] = page
    case["block_table"] = case["block_table"][:, :width]  # slots 5 to 8 are on the second page
    ops.gather_new_rows(**case)
    assert case["status"].tolist() == [status, 0]
    assert (case["new_features"][:4] == 0).all() and not case["new_features"][4:6].isnan().any()
    assert case["position"][:6].tolist() == [5, 6, 7, 8, 2, 3]


def test_gather_new_rows_without_requests(ops):
    case = gather_case([9], [4], most=4)
    case = {name: x if name in ("features", "tokens") else x[:0] for name, x in case.items()}
    case["row_start"] = ints(NOBODY)
    ops.gather_new_rows(**case)
    assert case["row_start"].tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"features": torch.zeros(9, 5, 24).int()}, TypeError, "features: expected dtype float32"),
        ({"features": torch.zeros(9, 24, 5).mT}, ValueError, "features: expected a contiguous"),
        ({"features": torch.zeros(9, 24)}, ValueError, r"features: expected shape \[\*, \*, \*\]"),
        ({"features": torch.zeros(9, 0, 24)}, ValueError, "features: expected a page size of 1"),
        ({"tokens": torch.zeros(2, 9)}, TypeError, "tokens: expected dtype int32"),
        ({"tokens": ints(0)}, ValueError, r"tokens: expected shape \[\*, \*\]"),
        ({"slot": ints(0)}, ValueError, r"slot: expected shape \[2\]"),
        ({"context_len": ints(0)}, ValueError, r"context_len: expected shape \[2\]"),
        ({"num_new": torch.zeros(2)}, TypeError, "num_new: expected dtype int32"),
        ({"block_table": ints(0)}, ValueError, r"block_table: expected shape \[2, \*\]"),
        ({"status": ints(0)}, ValueError, r"status: expected shape \[2\]"),
        ({"row_start": torch.zeros(3)}, TypeError, "row_start: expected dtype int32"),
        ({"ids": torch.zeros(8)}, TypeError, "ids: expected dtype int32"),
        (
            {"ids": torch.zeros(7).int(), "position": torch.zeros(7).int()},
            ValueError,
            "ids: expected the same number of rows for each of 2 requests, got 7",
        ),
        (
            {"ids": torch.zeros(0).int(), "position": torch.zeros(0).int()},
            ValueError,
            "ids: expected the same number of rows for each of 2 requests, got 0",
        ),
        ({"position": ints(0)}, ValueError, r"position: expected shape \[8\]"),
        ({"first": ints(0)}, ValueError, r"first: expected shape \[2\]"),
        ({"last": ints(0)}, ValueError, r"last: expected shape \[2\]"),
        (
            {"new_features": torch.zeros(8, 24).half()},
            TypeError,
            "out.features: expected the dtype",
        ),
        (
            {"new_features": torch.zeros(8, 23)},
            ValueError,
            r"out.features: expected shape \[8, 24\]",
        ),
    ],
)
def test_gather_new_rows_checks_its_arguments(changes, error, match):
    with pytest.raises(error, match="gather_new_rows: " + match):
        flat.gather_new_rows(**gather_case([9, 9], [4, 3], most=4) | changes)
