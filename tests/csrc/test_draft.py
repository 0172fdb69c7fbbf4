"""The input rows of a drafter: the right token and the right hidden state, both normed."""

import pytest
import torch

from tests import kit, reference
from tests.grouping import flat

NAN, NOBODY, EPS = float("nan"), -77, 1e-5


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def weights(rows, *, dim, vocab=50, dtype=torch.float32):
    return {
        "embedding": kit.randn(vocab, dim, seed=1, dtype=dtype),
        "hidden": 3 * kit.randn(rows, dim, seed=2, dtype=dtype),
        "input_norm": 1 + kit.randn(dim, seed=3, dtype=dtype),
        "hidden_norm": 1 + kit.randn(dim, seed=4, dtype=dtype),
        "eps": EPS,
    }


def entries_case(ids, *, dim=24, dtype=torch.float32):
    case = weights(len(ids), dim=dim, dtype=dtype)
    return case | {"ids": ints(*ids), "out": torch.full((len(ids), 2 * dim), NAN, dtype=dtype)}


def level_case(frontier, row, *, dim=24, dtype=torch.float32, hidden_rows=9, capacity=11):
    frontier, row = (torch.as_tensor(x, dtype=torch.int32) for x in (frontier, row))
    requests, rows = len(frontier), frontier.numel()
    draw = kit.generator(0)
    return weights(hidden_rows, dim=dim, dtype=dtype) | {
        "node_token": torch.randint(0, 50, (requests, capacity), generator=draw).int(),
        "frontier": frontier,
        "row": row,
        "context_len": ints(*(100 + 7 * b for b in range(requests))),
        "out": torch.full((rows, 2 * dim), NAN, dtype=dtype),
        "hidden_out": torch.full((rows, dim), NAN, dtype=dtype),
        "position": torch.full((rows,), NOBODY, dtype=torch.int32),
        "depth": 2,
    }


def expected_inputs(case, ids, rows):
    hidden = case["hidden"][rows]
    return reference.draft_inputs(
        case["embedding"], ids, hidden, case["input_norm"], case["hidden_norm"], EPS
    )


def check_level(ops, case):
    ops.draft_level_inputs(**case)
    width = case["frontier"].shape[1]
    tokens = case["node_token"].gather(1, case["frontier"].clamp_min(0).long()).flatten().tolist()
    rows = case["row"].flatten().tolist()
    kit.assert_close(case["out"], expected_inputs(case, tokens, rows))
    assert kit.same_bits(case["hidden_out"], case["hidden"][rows])
    want = [p + 2 for p in case["context_len"].tolist() for _ in range(width)]
    assert case["position"].tolist() == want


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 24, 576, 1030])
def test_draft_inputs_equals_reference(ops, dim, dtype):
    ids = [3, 49, 0, 3, 17]
    case = entries_case(ids, dim=dim, dtype=dtype)
    ops.draft_inputs(**case)
    kit.assert_close(case["out"], expected_inputs(case, ids, range(5)))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dim", [7, 576, 1536, 1544, 3584])
@pytest.mark.parametrize("rows", [3, 67])  # on a GPU warps own the halves of 67 short rows
def test_draft_inputs_has_the_bits_of_rms_norm(ops, rows, dim, dtype):
    ids = [(3 + 46 * r) % 50 for r in range(rows)]
    case = entries_case(ids, dim=dim, dtype=dtype)
    ops.draft_inputs(**case)
    for half, x, weight in (
        (0, case["embedding"][ids], case["input_norm"]),
        (1, case["hidden"], case["hidden_norm"]),
    ):
        normed = torch.empty(rows, dim, dtype=dtype)
        ops.rms_norm(x, weight, normed, eps=EPS)
        assert kit.same_bits(case["out"][:, half * dim : (half + 1) * dim], normed)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dim", [7, 576])
def test_draft_level_inputs_equals_reference(ops, dim, dtype):
    frontier, row = [[4, 9, 2], [10, 1, 1]], [[0, 8, 3], [3, 3, 5]]
    check_level(ops, level_case(frontier, row, dim=dim, dtype=dtype))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dim", [7, 24, 776, 1544])
def test_draft_level_inputs_of_many_requests(ops, dim, dtype):
    draw = kit.generator(3)
    frontier = torch.randint(0, 11, (35, 9), generator=draw).tolist()
    row = torch.randint(0, 9, (35, 9), generator=draw).tolist()
    check_level(ops, level_case(frontier, row, dim=dim, dtype=dtype))


def test_draft_level_inputs_inert_rows_are_the_roots(ops):
    """Fault 26: a frontier shorter than the bucket."""
    check_level(ops, level_case([[4, -1, -1], [-1, -1, -1]], [[5, 0, 0], [0, 0, 0]]))


def test_draft_inputs_strided(ops):
    plain, case = (level_case([[4, 9], [1, 2]], [[0, 8], [3, 3]]) for _ in range(2))
    for name, wide in (("embedding", 30), ("hidden", 27), ("out", 56), ("hidden_out", 25)):
        shape = case[name].shape
        case[name] = torch.full((shape[0], wide), NAN)[:, : shape[1]].copy_(plain[name])
    case["node_token"] = torch.full((2, 20), NOBODY, dtype=torch.int32)[:, 3:14].copy_(
        plain["node_token"]
    )
    check_level(ops, case)
    ops.draft_level_inputs(**plain)
    assert kit.same_bits(case["out"].contiguous(), plain["out"])


def test_draft_inputs_row_equals_a_batch_of_one(ops):
    case = entries_case([3, 49, 0, 7], dim=576, dtype=torch.bfloat16)
    ops.draft_inputs(**case)
    alone = entries_case([0], dim=576, dtype=torch.bfloat16)
    alone["hidden"] = case["hidden"][2:3].clone()
    ops.draft_inputs(**alone)
    assert kit.same_bits(alone["out"][0], case["out"][2])


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("rows", [3, 70])
def test_an_id_outside_the_vocabulary_is_zeros(ops, bad, rows):
    """Like fault 22: values that only the device knows are checked before they become addresses."""
    case = entries_case([3, bad, 5] + [7] * (rows - 3))
    ops.draft_inputs(**case)
    assert (case["out"][1, :24] == 0).all()
    kit.assert_close(case["out"][[0, 2]], expected_inputs(case, [3, 5], [0, 2]))
    assert not case["out"].isnan().any()


@pytest.mark.parametrize(
    ("name", "value", "zeros"),
    [
        ("frontier", 11, slice(0, 24)),
        ("frontier", 2**31 - 1, slice(0, 24)),
        ("row", 9, slice(24, 48)),
        ("row", -1, slice(24, 48)),
        ("row", 2**31 - 1, slice(24, 48)),
    ],
)
@pytest.mark.parametrize("requests", [2, 40])
def test_a_level_reads_nothing_outside(ops, name, value, zeros, requests):
    case = level_case([[4, 9], [1, 2]] * (requests // 2), [[0, 8], [3, 3]] * (requests // 2))
    case[name][0, 1] = value
    ops.draft_level_inputs(**case)
    assert (case["out"][1, zeros] == 0).all()
    assert not case["out"].isnan().any() and not case["hidden_out"].isnan().any()
    if name == "row":
        assert (case["hidden_out"][1] == 0).all()


def test_draft_inputs_without_rows(ops):
    """Fault 25."""
    ops.draft_inputs(**entries_case([]))
    ops.draft_level_inputs(**level_case(torch.zeros(0, 3), torch.zeros(0, 3)))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"embedding": torch.zeros(50, 24).int()}, TypeError, "embedding: expected dtype float32"),
        ({"embedding": torch.zeros(24)}, ValueError, r"embedding: expected shape \[\*, \*\]"),
        ({"embedding": torch.zeros(24, 50).t()}, ValueError, "embedding: expected a contiguous"),
        ({"hidden": torch.zeros(3, 24).half()}, TypeError, "hidden: expected the dtype of embed"),
        ({"hidden": torch.zeros(3, 23)}, ValueError, r"hidden: expected shape \[\*, 24\]"),
        ({"hidden": torch.zeros(4, 24)}, ValueError, r"hidden: expected shape \[3, 24\]"),
        ({"input_norm": torch.zeros(23)}, ValueError, r"input_norm: expected shape \[24\]"),
        ({"hidden_norm": torch.zeros(24).half()}, TypeError, "hidden_norm: expected the dtype of"),
        ({"out": torch.zeros(3, 47)}, ValueError, r"out: expected shape \[\*, 48\]"),
        ({"ids": torch.zeros(3)}, TypeError, "ids: expected dtype int32"),
        ({"ids": ints(0)}, ValueError, r"ids: expected shape \[3\]"),
        ({"eps": -1.0}, ValueError, "eps: expected 0 or more"),
    ],
)
def test_draft_inputs_checks_its_arguments(changes, error, match):
    with pytest.raises(error, match="draft_inputs: " + match):
        flat.draft_inputs(**entries_case([1, 2, 3]) | changes)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"frontier": torch.zeros(2, 2)}, TypeError, "frontier.node: expected dtype"),
        ({"frontier": ints(0)}, ValueError, r"frontier.node: expected shape \[\*, \*\]"),
        ({"row": ints(0)}, ValueError, r"frontier.row: expected shape \[2, 2\]"),
        ({"node_token": ints(0)}, ValueError, r"nodes.token: expected shape \[2, \*\]"),
        ({"context_len": ints(0)}, ValueError, r"context_len: expected shape \[2\]"),
        ({"out": torch.zeros(3, 48)}, ValueError, r"out: expected shape \[4, 48\]"),
        ({"hidden_out": torch.zeros(4, 24).half()}, TypeError, "hidden_out: expected the dtype"),
        ({"hidden_out": torch.zeros(3, 24)}, ValueError, r"hidden_out: expected shape \[4, 24\]"),
        ({"position": ints(0)}, ValueError, r"position: expected shape \[4\]"),
        ({"depth": -1}, ValueError, "depth: expected 0 to 16, got -1"),
        ({"depth": 2**32}, ValueError, "depth: expected 0 to 16, got 4294967296"),
    ],
)
def test_draft_level_inputs_checks_its_arguments(changes, error, match):
    with pytest.raises(error, match="draft_level_inputs: " + match):
        flat.draft_level_inputs(**level_case([[4, 9], [1, 2]], [[0, 8], [3, 3]]) | changes)


def test_draft_level_inputs_does_not_copy_in_place():
    case = level_case([[4, 9], [1, 2]], [[0, 3], [3, 3]], hidden_rows=4)
    with pytest.raises(ValueError, match="hidden_out: expected memory separate from hidden"):
        flat.draft_level_inputs(**case | {"hidden_out": case["hidden"]})
