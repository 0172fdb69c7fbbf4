"""The end of a pass: tokens in the table and the ring, lengths, and whether passes continue."""

import threading

import numpy as np
import pytest
import torch

import tlt_ext
from tests import kit, reference
from tests.grouping import flat
from tlt_ext import Control, PassRing, Status, StopReason

NOBODY = -77  # must not be overwritten


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def make_ring(ops, passes=8, max_batch=300, max_emitted=17):
    return PassRing(passes, max_batch, max_emitted, pinned=ops.device != "cpu")


def pass_case(ring, counts, *, slots=None, finish=None, width=17, seed=0):
    """A pass after its commit: request b has emitted counts[b] tokens from position 10 + b on."""
    batch = len(counts)
    context = [9 + b + count for b, count in enumerate(counts)]
    draw = torch.randint(0, 1000, (batch, width), generator=kit.generator(seed), dtype=torch.int32)
    slots = list(range(batch)) if slots is None else slots
    return {
        "emitted": draw,
        "logprobs": kit.randn(batch, width, seed=seed),
        "num_emitted": ints(*counts),
        "finish": ints(*(finish or [0] * batch)),
        "status": torch.zeros(batch, dtype=torch.int32),
        "context_len": ints(*context),
        "slot": ints(*slots),
        "tokens": torch.full((batch + 2, 10 + batch + width), NOBODY, dtype=torch.int32),
        "last_token": ints(*range(batch)),
        "remaining": torch.full((batch,), 100, dtype=torch.int32),
        "num_new": torch.full((batch,), NOBODY, dtype=torch.int32),
        "granted": torch.full((batch,), 1000, dtype=torch.int32),
        "control": ints(1, 0, 8, 0, 0, 0, 0, 0),
        "ring": ring,
        "lookahead": 4,
    }


def emitted_rows(case):
    counts = case["num_emitted"].tolist()
    return [row[:count] for row, count in zip(case["emitted"].tolist(), counts, strict=True)]


def check_pass(ops, case):
    """Runs the op and compares all that it writes."""
    rows, slots = emitted_rows(case), case["slot"].tolist()
    last = case["last_token"].tolist()
    expected, reason = reference.advance_batch(
        rows,
        case["finish"].tolist(),
        case["context_len"].tolist(),
        slots,
        case["tokens"],
        case["granted"].tolist(),
        case["lookahead"],
    )
    ring, record = case["ring"], int(case["control"][Control.SEQUENCE]) % case["ring"].passes
    ops.advance_batch(**case)
    assert torch.equal(case["tokens"], expected)
    taken = [row if slot >= 0 else [] for row, slot in zip(rows, slots, strict=True)]
    assert case["num_new"].tolist() == [len(row) for row in taken]
    finish = case["finish"].tolist()
    ended = [f if slot >= 0 else 0 for f, slot in zip(finish, slots, strict=True)]
    left = [0 if end else 100 - len(row) for end, row in zip(ended, taken, strict=True)]
    assert case["remaining"].tolist() == left
    assert case["slot"].tolist() == [-1 if e else s for e, s in zip(ended, slots, strict=True)]
    last = [row[-1] if row else kept for row, kept in zip(taken, last, strict=True)]
    assert case["last_token"].tolist() == last
    batch = len(rows)
    assert ring.num_emitted[record, :batch].tolist() == [len(row) for row in taken]
    assert ring.finish[record, :batch].tolist() == ended
    assert ring.status[record, :batch].tolist() == case["status"].tolist()
    for b, row in enumerate(taken):
        assert ring.tokens[record, b, : len(row)].tolist() == row
        logprobs = torch.from_numpy(ring.logprobs[record, b, : len(row)].copy())
        assert torch.equal(logprobs, case["logprobs"][b, : len(row)])
    return StopReason(reason)


@pytest.mark.parametrize("counts", [[3], [1] * 256, [17, 1, 5, 2], [1, 17] * 37])
def test_advance_batch_stores_and_records(ops, counts):
    ring = make_ring(ops)
    case = pass_case(ring, counts)
    assert check_pass(ops, case) == 0
    assert case["control"].tolist()[:5] == [1, 1, 8, 0, 1]
    assert (ring.sequence, ring.reason) == (1, 0)
    assert not case["status"].any()


def test_advance_batch_leaves_inert_rows_alone(ops):
    """Fault 26: padding rows of a bucket store no token, stop no pass and have no record."""
    case = pass_case(make_ring(ops), [2, 3, 0, 1], slots=[4, -1, -1, 0], finish=[0, 1, 2, 0])
    case["granted"][1] = 0
    case["emitted"][1] = NOBODY
    assert check_pass(ops, case) == 0
    assert case["control"][Control.GO] == 1


def test_advance_batch_without_requests(ops):
    """Fault 25: a batch that has drained."""
    case = pass_case(make_ring(ops), [2])
    names = [n for n, x in case.items() if isinstance(x, torch.Tensor) and n not in ("control",)]
    ops.advance_batch(**case | {name: case[name][:0] for name in names if name != "tokens"})
    assert case["control"].tolist()[:5] == [1, 1, 8, 0, 1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"finish": ints(0, 1, 0)}, StopReason.FINISHED),
        ({"finish": ints(0, 0, 2)}, StopReason.FINISHED),
        ({"granted": ints(1000, 16, 1000)}, StopReason.PAGES),  # context 13 and 4 more
        ({"granted": ints(1000, 17, 1000)}, 0),
        (
            {"granted": ints(0, 0, 0), "finish": ints(1, 0, 0)},
            StopReason.FINISHED | StopReason.PAGES,
        ),
        ({"granted": ints(0, 1000, 1000), "finish": ints(1, 0, 0)}, StopReason.FINISHED),
        ({"num_emitted": ints(1, 0, 1)}, StopReason.STALLED),
        ({"control": ints(1, 6, 8, 0, 6, 0, 0, 0)}, 0),
        ({"control": ints(1, 7, 8, 0, 7, 0, 0, 0)}, StopReason.LIMIT),
        ({"control": ints(1, 7, 100, 0, 7, 0, 0, 0)}, StopReason.LIMIT),  # the ring is full
        ({"control": ints(0, 0, 0, 0, 0, 0, 0, 0)}, StopReason.LIMIT),  # never armed
    ],
)
def test_advance_batch_says_why_passes_stop(ops, change, reason):
    case = pass_case(make_ring(ops), [2, 3, 1]) | change
    rows = check_pass(ops, case)
    assert rows == reason & ~StopReason.LIMIT
    assert case["control"][Control.REASON] == reason
    assert case["control"][Control.GO] == (reason == 0)
    assert case["ring"].reason == reason


@pytest.mark.parametrize("ends", [1, 2, 3])
def test_passes_go_on_until_several_requests_have_ended(ops, ends):
    """Three of five requests finish, one per pass; a finished one is inert and keeps its record."""
    ring, control = make_ring(ops, max_batch=5), torch.zeros(8, dtype=torch.int32)
    ops.arm_passes(control, ring, limit=8, ends=ends)
    case = pass_case(ring, [1, 2, 3, 2, 1]) | {"control": control}
    tokens = [[] for _ in range(5)]
    for index, leaving in enumerate((3, 0, 4)):
        case["finish"] = torch.zeros(5, dtype=torch.int32)
        case["finish"][leaving] = 1 + index % 2
        case["status"][leaving] = Status.NAN_DRAFT if index == 0 else 0
        case["remaining"] = torch.full((5,), 100, dtype=torch.int32)
        alive = [b for b, slot in enumerate(case["slot"].tolist()) if slot >= 0]
        check_pass(ops, case)
        case["status"][leaving] |= Status.BAD_LENGTH  # of rows that are inert by now
        for b in alive:
            tokens[b] += emitted_rows(case)[b]
        assert control[Control.ENDED] == index + 1
        assert control[Control.GO] == (index + 1 < ends)
        if index + 1 == ends:
            break
    assert ring.reason == StopReason.FINISHED
    rows = ring.collect(0, ring.sequence, 5)
    assert [row[0] for row in rows] == tokens
    passes = {3: 1, 0: min(2, ends), 4: ends}
    assert [len(row[2]) for row in rows] == [passes.get(b, ends) for b in range(5)]
    finished = {3: 1, 0: 2 * (ends > 1), 4: 1 * (ends > 2)}
    assert [row[3] for row in rows] == [finished.get(b, 0) for b in range(5)]
    assert [row[4] for row in rows] == [0, 0, 0, Status.NAN_DRAFT, 0]


def test_advance_batch_hears_the_host(ops):
    case = pass_case(make_ring(ops), [2])
    case["ring"].request_stop()
    check_pass(ops, case)
    assert case["ring"].reason == StopReason.STOPPED
    ops.arm_passes(case["control"], case["ring"], limit=5)  # takes the request back
    check_pass(ops, case | {"remaining": ints(100), "last_token": ints(0)})
    assert case["ring"].reason == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_emitted", -1),
        ("num_emitted", 18),
        ("num_emitted", 2**31 - 1),
        ("context_len", 2**31 - 1),
        ("context_len", 30),  # the store has 30 tokens a row
        ("context_len", -1),
        ("context_len", 0),  # the first of two tokens would lie before the sequence
        ("slot", 5),
        ("slot", 2**31 - 1),
    ],
)
def test_advance_batch_reports_and_takes_nothing(ops, name, value):
    case = pass_case(make_ring(ops), [2, 2, 2])
    case[name][1] = value
    ops.advance_batch(**case)
    assert case["status"].tolist() == [0, Status.BAD_LENGTH, 0]
    assert case["num_new"].tolist() == [2, 0, 2]
    assert case["remaining"].tolist() == [98, 100, 98]
    assert case["last_token"][1] == 1
    assert int((case["tokens"] != NOBODY).sum()) == 4
    assert case["ring"].reason == StopReason.STALLED


def test_advance_batch_keeps_earlier_status(ops):
    case = pass_case(make_ring(ops), [1, 1]) | {"status": ints(0, Status.NAN_DRAFT)}
    check_pass(ops, case)
    assert case["status"].tolist() == [0, Status.NAN_DRAFT]


def test_advance_batch_strided(ops):
    plain, strided = (pass_case(make_ring(ops), [2, 17, 3]) for _ in range(2))
    for name, size in (("emitted", 20), ("logprobs", 19), ("tokens", 41)):
        wide = torch.full((len(plain[name]), size), NOBODY).to(plain[name].dtype)
        strided[name] = wide[:, : plain[name].shape[1]].copy_(plain[name])
    check_pass(ops, plain)
    check_pass(ops, strided)
    assert torch.equal(plain["tokens"], strided["tokens"])


def test_passes_wrap_around_the_ring(ops):
    """Two armings of a small ring: every record read in time, in order, and nothing else."""
    ring = make_ring(ops, passes=3, max_batch=2, max_emitted=4)
    control, seen, begun = torch.zeros(8, dtype=torch.int32), [], 0
    expected: list[list[int]] = [[], []]
    for armed in range(3):
        ops.arm_passes(control, ring, limit=2)
        assert control.tolist()[:5] == [1, 0, 2, 0, begun]
        for step in range(2):
            case = pass_case(ring, [1 + step, 3], width=4, seed=2 * armed + step)
            case["control"] = control
            check_pass(ops, case)
            for want, row in zip(expected, emitted_rows(case), strict=True):
                want += row
        assert ring.reason == StopReason.LIMIT and ring.wait(0.0) == StopReason.LIMIT
        seen.append(ring.collect(begun, ring.sequence, 2))
        begun = ring.sequence
    assert begun == 6
    for b in range(2):
        assert sum((rows[b][0] for rows in seen), []) == expected[b]
        assert [rows[b][2] for rows in seen] == [[1, 2] if b == 0 else [3, 3]] * 3
        assert all(len(rows[b][1]) == len(rows[b][0]) for rows in seen)
    assert ring.begin_ns[0] <= ring.time_ns[4 % 3] <= ring.time_ns[5 % 3]
    with pytest.raises(ValueError, match="PassRing: collect: expected passes that the ring holds"):
        ring.collect(2, 6, 2)
    with pytest.raises(ValueError, match="PassRing: collect: expected passes that the ring holds"):
        ring.collect(4, 7, 2)
    with pytest.raises(ValueError, match="PassRing: collect: rows: expected 0 to 2, got 3"):
        ring.collect(4, 6, 3)


def test_a_ring_counts_on_when_control_is_new(ops):
    ring = make_ring(ops)
    check_pass(ops, pass_case(ring, [2]))
    control = torch.zeros(8, dtype=torch.int32)
    ops.arm_passes(control, ring, limit=8)
    assert control[Control.SEQUENCE] == 1


def test_sequence_numbers_continue_past_the_device_counter(ops):
    """Records stay in order where the device's 32-bit number starts again."""
    ring = make_ring(ops, passes=6, max_batch=1, max_emitted=4)
    control = torch.zeros(8, dtype=torch.int32)
    wrap = (1 << 31) // 6 * 6

    def passes(count):
        for _ in range(count):
            case = pass_case(ring, [1], width=4, seed=ring.sequence % 100)
            ops.advance_batch(**case | {"control": control})
            tokens.append(int(case["emitted"][0, 0]))

    tokens: list[int] = []
    ops.arm_passes(control, ring, limit=6)
    control[Control.SEQUENCE] = wrap - 2  # as after that many passes
    passes(1)
    assert ring.sequence == wrap - 1
    ops.arm_passes(control, ring, limit=6)
    passes(4)
    assert ring.sequence == wrap + 3 and control[Control.SEQUENCE] == 3
    assert ring.collect(wrap - 2, wrap + 3, 1)[0][0] == tokens


def test_views_keep_the_ring_alive():
    tokens = PassRing(4, 2).tokens
    tokens[...] = 5
    assert tokens.shape == (4, 2, 17) and int(tokens.sum()) == 5 * 4 * 2 * 17
    assert tokens.dtype == np.int32 and PassRing(1, 1).time_ns.dtype == np.int64


def test_wait_times_out_and_lets_others_run():
    ring = PassRing(4, 2)
    seen = []
    other = threading.Thread(target=lambda: seen.append(ring.wait(30.0)))
    assert ring.wait(0.001) == 0
    other.start()
    ring.request_stop()
    flat.advance_batch(**pass_case(ring, [1]))
    other.join(10)
    assert seen == [StopReason.STOPPED]


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ((0, 1, 1), "passes: expected 1 to 1048576, got 0"),
        ((1, 0, 1), "max_batch: expected 1 to 65536, got 0"),
        ((1, 1, 33), "max_emitted: expected 1 to 32, got 33"),
    ],
)
def test_a_ring_checks_its_sizes(sizes, match):
    with pytest.raises(ValueError, match="PassRing: " + match):
        PassRing(*sizes)


@pytest.mark.skipif(bool(tlt_ext._C.cuda_ops()), reason="this build has CUDA")
def test_pinned_memory_needs_cuda():
    with pytest.raises(ValueError, match="PassRing: pinned: this build has no CUDA"):
        PassRing(1, 1, pinned=True)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"control": torch.zeros(8)}, TypeError, "control: expected dtype int32"),
        ({"control": ints(0)}, ValueError, r"control: expected shape \[8\]"),
        ({"emitted": torch.zeros(2, 17)}, TypeError, "emitted: expected dtype int32"),
        (
            {"emitted": torch.zeros(9, 17).int()},
            ValueError,
            "emitted: expected at most the ring's 4 rows of 17, got 9 of 17",
        ),
        (
            {"emitted": torch.zeros(2, 18).int()},
            ValueError,
            "emitted: expected at most the ring's 4 rows of 17, got 2 of 18",
        ),
        ({"logprobs": torch.zeros(2, 17).half()}, TypeError, "logprobs: expected dtype float32"),
        ({"logprobs": torch.zeros(2, 16)}, ValueError, r"logprobs: expected shape \[2, 17\]"),
        ({"num_emitted": ints(0)}, ValueError, r"num_emitted: expected shape \[2\]"),
        ({"finish": torch.zeros(2)}, TypeError, "finish: expected dtype int32"),
        ({"status": ints(0)}, ValueError, r"status: expected shape \[2\]"),
        ({"context_len": ints(0)}, ValueError, r"context_len: expected shape \[2\]"),
        ({"slot": torch.zeros(2).long()}, TypeError, "slot: expected dtype int32"),
        ({"tokens": ints(0)}, ValueError, r"tokens: expected shape \[\*, \*\]"),
        ({"tokens": torch.zeros(4, 9).int().t()}, ValueError, "tokens: expected a contiguous last"),
        ({"last_token": ints(0)}, ValueError, r"last_token: expected shape \[2\]"),
        ({"remaining": ints(0)}, ValueError, r"remaining: expected shape \[2\]"),
        ({"num_new": ints(0)}, ValueError, r"num_new: expected shape \[2\]"),
        ({"granted": ints(0)}, ValueError, r"granted: expected shape \[2\]"),
        ({"lookahead": -1}, ValueError, r"lookahead: expected 0 to 2\^31 - 1, got -1"),
        ({"lookahead": 2**63 - 1}, ValueError, r"lookahead: expected 0 to 2\^31 - 1, got 922"),
    ],
)
def test_advance_batch_checks_its_arguments(changes, error, match):
    with pytest.raises(error, match="advance_batch: " + match):
        flat.advance_batch(**pass_case(PassRing(4, 4), [1, 2]) | changes)


@pytest.mark.parametrize("limit", [0, 5, -1])
def test_arm_passes_checks_its_limit(limit):
    with pytest.raises(ValueError, match=r"arm_passes: limit: expected 1 to 4, the passes that"):
        tlt_ext.arm_passes(torch.zeros(8, dtype=torch.int32), PassRing(4, 1), limit=limit)


@pytest.mark.parametrize("ends", [0, 3, -1])
def test_arm_passes_checks_how_many_may_end(ends):
    with pytest.raises(
        ValueError, match=r"arm_passes: ends: expected 1 to 2, the rows of the ring"
    ):
        tlt_ext.arm_passes(torch.zeros(8, dtype=torch.int32), PassRing(4, 2), limit=1, ends=ends)


@kit.gpu
@kit.needs_gpu
def test_a_gpu_needs_a_pinned_ring():
    control = torch.zeros(8, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="arm_passes: ring: expected pinned memory"):
        tlt_ext.arm_passes(control, PassRing(4, 1), limit=1)
