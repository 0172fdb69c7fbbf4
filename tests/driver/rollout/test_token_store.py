"""Rows of the token store: none is lost, siblings see each other, the oldest makes room."""

import random

import torch

from driver.rollout.request import Request, SamplingParams
from driver.rollout.scheduler import Sequence
from driver.rollout.token_store import GROUP_SLOTS, TokenStore


def sequence(prompt, more=()):
    return Sequence(Request(1, 0, tuple(prompt), SamplingParams()), [*prompt, *more])


def store(slots=4):
    return TokenStore(slots, 10, torch.device("cpu"))


def test_a_request_sees_itself_then_the_newest_of_its_prompt():
    made = store()
    first, other, second = sequence([1, 2]), sequence([3]), sequence([1, 2], more=[7])
    made.take([first, other, second])
    assert made.group_of(second) == [second.slot, first.slot]
    assert made.group_of(other) == [other.slot]
    assert made.tokens[second.slot, :3].tolist() == [1, 2, 7]
    assert made.tokens[first.slot, :2].tolist() == [1, 2]
    assert made.length[[first.slot, other.slot, second.slot]].tolist() == [2, 1, 3]
    past = first.slot
    made.give_back(first, keep=True)
    third = sequence([1, 2])
    made.take([third])
    assert made.group_of(third) == [third.slot, second.slot, past]


def test_rows_are_a_multiple_of_four_and_one_length_is_for_nobody():
    made = store()
    assert made.tokens.shape == (4, 12) and made.length.shape == (4,)
    made.advance(torch.tensor([1, made.spare]), torch.tensor([5, 99], dtype=torch.int32))
    assert made.length.tolist() == [0, 6, 0, 0]


def test_the_longest_finished_makes_room():
    made = store(slots=2)
    old, new = sequence([1]), sequence([2])
    made.take([])
    made.take([old, new])
    slots = old.slot, new.slot
    made.give_back(old, keep=True)
    made.give_back(new, keep=True)
    late = sequence([2])
    made.take([late])
    assert late.slot == slots[0]
    assert made.group_of(late) == [late.slot, slots[1]]
    before = made.changes
    made.give_back(late, keep=True)
    made.clear(since=before)
    assert list(made._past) == [slots[1]]
    made.clear()
    assert len(made._free) == 2 and not made._groups


def test_no_row_is_lost_under_random_load():
    rng = random.Random(0)
    made, running = store(slots=12), []
    for _ in range(2000):
        if running and (len(running) == 6 or rng.random() < 0.5):
            made.give_back(running.pop(rng.randrange(len(running))), keep=rng.random() < 0.7)
        else:
            running.append(sequence([rng.randrange(3)]))
            made.take(running[-1:])
        slots = [s.slot for s in running]
        assert len(set(slots)) == len(slots) and min([0, *slots]) >= 0
        for one in running:
            group = made.group_of(one)
            assert group[0] == one.slot and len(set(group)) == len(group) <= GROUP_SLOTS
    for one in running:
        made.give_back(one, keep=False)
    made.clear()
    assert len(made._free) == 12 and not made._groups


def test_a_request_that_never_ran_gives_nothing_back():
    made = store()
    made.give_back(sequence([1]), keep=True)
    assert len(made._free) == 4
