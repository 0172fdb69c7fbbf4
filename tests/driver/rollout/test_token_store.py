"""Rows of the token store: none is lost, siblings share, the oldest is replaced."""

import random

import torch

from driver.rollout.request import Request, RunningRequest, SamplingParams
from driver.rollout.token_store import GROUP_SLOTS, TokenStore


def running(prompt, more=()):
    return RunningRequest(Request(1, 0, tuple(prompt), SamplingParams()), [*prompt, *more])


def store(slots=4):
    return TokenStore(slots, 10, torch.device("cpu"))


def test_a_request_reads_its_own_row_then_the_newest_of_its_prompt():
    made = store()
    first, other, second = running([1, 2]), running([3]), running([1, 2], more=[7])
    made.take([first, other, second])
    assert made.group_slots(second) == [made.slot(second), made.slot(first)]
    assert made.group_slots(other) == [made.slot(other)]
    assert made.tokens[made.slot(second), :3].tolist() == [1, 2, 7]
    assert made.tokens[made.slot(first), :2].tolist() == [1, 2]
    assert made.length[[made.slot(first), made.slot(other), made.slot(second)]].tolist() == [
        2,
        1,
        3,
    ]
    past = made.slot(first)
    made.release(first, keep=True)
    third = running([1, 2])
    made.take([third])
    assert made.group_slots(third) == [made.slot(third), made.slot(second), past]


def test_rows_are_a_multiple_of_four_and_one_length_is_spare():
    made = store()
    assert made.tokens.shape == (4, 12) and made.length.shape == (4,)
    made.advance(torch.tensor([1, made.spare]), torch.tensor([5, 99], dtype=torch.int32))
    assert made.length.tolist() == [0, 6, 0, 0]


def test_the_request_that_finished_first_is_replaced():
    made = store(slots=2)
    old, new = running([1]), running([2])
    made.take([])
    made.take([old, new])
    slots = made.slot(old), made.slot(new)
    made.release(old, keep=True)
    made.release(new, keep=True)
    late = running([2])
    made.take([late])
    assert made.slot(late) == slots[0]
    assert made.group_slots(late) == [made.slot(late), slots[1]]
    before = made.changes
    made.release(late, keep=True)
    made.clear(since=before)
    assert list(made._past) == [slots[1]]
    made.clear()
    assert len(made._free) == 2 and not made._groups


def test_no_row_is_lost_under_random_load():
    rng = random.Random(0)
    made, rows = store(slots=12), []
    for _ in range(2000):
        if rows and (len(rows) == 6 or rng.random() < 0.5):
            made.release(rows.pop(rng.randrange(len(rows))), keep=rng.random() < 0.7)
        else:
            rows.append(running([rng.randrange(3)]))
            made.take(rows[-1:])
        slots = [made.slot(s) for s in rows]
        assert len(set(slots)) == len(slots) and min([0, *slots]) >= 0
        for one in rows:
            group = made.group_slots(one)
            assert group[0] == made.slot(one) and len(set(group)) == len(group) <= GROUP_SLOTS
    for one in rows:
        made.release(one, keep=False)
    made.clear()
    assert len(made._free) == 12 and not made._groups


def test_releasing_a_request_that_never_ran_changes_nothing():
    made = store()
    made.release(running([1]), keep=True)
    assert len(made._free) == 4
