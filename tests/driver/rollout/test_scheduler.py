"""Pages are never lost, prefixes are shared, and the youngest request is preempted."""

import random

import pytest

from driver.common.errors import UserError
from driver.rollout.pages import PagePool, pages_for
from driver.rollout.request import MAX_STOP_IDS, Request, SamplingParams
from driver.rollout.scheduler import Scheduler


def request(number, prompt, new=8):
    return Request(number, number, tuple(prompt), SamplingParams(max_new_tokens=new))


def scheduler(pages=64, page_size=4, max_batch=8, max_len=256):
    return Scheduler(PagePool(pages), page_size, max_batch, max_len)


def test_page_pool_counts_holders():
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert pool.allocate(2) is None
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.num_free == 3
    pool.release(pages[:1])
    assert pool.num_free == 4
    with pytest.raises(ValueError, match="is free already"):
        pool.release(pages[:1])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(pages)


def test_siblings_share_whole_prompt_pages_and_copy_the_partial_one():
    made = scheduler()
    prompt = range(11)  # 10 committed slots: two whole pages of 4 and half a page
    siblings = made.add([request(i, prompt) for i in range(3)])
    admission = made.admit()
    assert len(admission.prefixes) == 1 and len(admission.copies) == 3
    assert len({tuple(s.pages[:2]) for s in siblings}) == 1
    assert len({s.pages[2] for s in siblings}) == 3
    assert all(s.context_len == 10 for s in siblings)
    made.prefixes.release_unused()
    assert made.pool.num_free == 64 - 2 - 3  # the prefix's own partial page is free again


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9])
def test_prompts_at_page_boundaries(length):
    made = scheduler()
    (sequence,) = made.add([request(0, range(length))])
    admission = made.admit()
    made.prefixes.release_unused()
    assert sequence.context_len == length - 1
    assert bool(admission.copies) == ((length - 1) % 4 != 0)
    assert made._grow(1)
    sequence.finish = "stop"
    made.retire()
    made.release()
    assert made.pool.num_free == 64


def test_growth_is_all_or_nothing():
    made = scheduler(pages=6, page_size=4)
    made.add([request(0, range(5)), request(1, range(6))])
    made.admit()
    made.prefixes.release_unused()
    held = [list(s.pages) for s in made.running]
    assert not made._grow(100)
    assert [s.pages for s in made.running] == held


def test_room_is_what_all_running_requests_can_be_granted():
    for lookahead in range(1, 20):
        made = scheduler(pages=8)
        made.add([request(i, range(5 * i, 5 * i + 5)) for i in range(2)])
        made.admit()
        made.prefixes.release_unused()
        assert made.has_room(lookahead) == made._grow(lookahead) == (lookahead <= 12)


def test_pages_granted_in_advance_are_taken_back():
    """Siblings keep shared pages, and the freed ones can be granted again."""
    made = scheduler(pages=12, page_size=4)
    pair = made.add([request(i, range(10), new=20) for i in range(2)])  # 9 slots: 2 pages and 1
    made.admit()
    made.prefixes.release_unused()
    shared = pair[0].pages[:2]
    pair[0].pages += made.pool.allocate(8)  # all free pages
    assert made.has_room(19) and not made.has_room(20)  # 5 unshared pages each, not 6
    assert not made._grow(19)
    made._trim(1)
    assert [s.pages[:2] for s in pair] == [shared, shared]
    assert [len(s.pages) for s in pair] == [3, 3] and made.pool.num_free == 8
    assert made._grow(19) and not made.has_room(20)


def test_the_youngest_is_preempted_and_recomputed():
    made = scheduler(pages=12, page_size=4)
    old, young = made.add([request(0, range(5)), request(1, range(6))])
    made.admit()
    made.prefixes.release_unused()
    young.tokens += [7, 8, 9]
    young.context_len += 3
    young.draft_len = young.context_len - 1
    assert made._preempt() is young
    assert young.context_len == young.draft_len == 0 and young.pages == []
    admission = made.admit()
    assert [job.pages for job in admission.recompute] == [young.pages]
    assert len(young.pages) == pages_for(len(young.tokens), 4)
    assert made.running == [old, young]


def test_requests_that_can_never_run_are_refused():
    made = scheduler(pages=4, page_size=4, max_len=64)
    with pytest.raises(UserError, match="exceed the 64 of a request; shorten the prompt"):
        made.add([request(0, range(64))])
    with pytest.raises(UserError, match="exceed the 64 of a request; at most 4 new tokens fit"):
        made.add([request(0, range(60))])
    with pytest.raises(UserError, match="engine.num_pages=4: one request of 18 tokens needs 6"):
        made.add([request(0, range(10))])
    with pytest.raises(UserError, match="prompt is empty"):
        made.add([request(0, [])])
    stops = SamplingParams(max_new_tokens=2, stop_ids=tuple(range(MAX_STOP_IDS + 1)))
    with pytest.raises(UserError, match="request 0: 17 stop ids; at most 16"):
        made.add([Request(0, 0, (1,), stops)])


def test_no_page_is_lost_under_random_load():
    for seed in range(20):
        rng = random.Random(seed)
        made = scheduler(pages=rng.randint(14, 40), page_size=4, max_batch=5)
        prompts = [range(rng.randint(1, 20)) for _ in range(4)]
        made.add([request(i, rng.choice(prompts), new=rng.randint(1, 20)) for i in range(25)])
        passes = 0
        while made.active:
            made.admit()
            made.prefixes.release_unused()
            assert made.running
            while not made._grow(rng.choice([1, 6])):
                made._trim(1)
                if len(made.running) > 1:
                    made._preempt()
                elif not made.prefixes.evict() and made._grow(1):
                    break
            for sequence in made.running:
                held = len(sequence.pages) * 4
                assert sequence.context_len + 1 <= held
                sequence.tokens.append(1)
                sequence.context_len += 1
                if sequence.remaining == 0:
                    sequence.finish = "length"
            made.retire()
            made.release()
            passes += 1
            assert passes < 2000
        assert made.pool.num_free == made.pool.num_pages


def test_no_page_is_lost_by_pauses_removals_and_lost_contents():
    """Each request keeps its tokens, and pages for them whenever it runs."""
    for seed in range(30):
        rng = random.Random(seed)
        made = scheduler(pages=rng.randint(11, 40), page_size=4, max_batch=5)
        prompts = [range(rng.randint(1, 20)) for _ in range(4)]
        left = set(
            made.add([request(i, rng.choice(prompts), rng.randint(1, 20)) for i in range(25)])
        )
        while made.active:
            for state in [s for s in made.paused if rng.random() < 0.3]:
                if rng.random() < 0.8:
                    made.resume(state, [2] * rng.randint(0, 3))
                else:
                    made.end(state)
            if rng.random() < 0.2:
                state = rng.choice([*made.running, *made.waiting, *made.paused] or [None])
                if state is not None:
                    made.remove(state)
                    assert not state.pages
                    left.discard(state)
            if rng.random() < 0.1:
                made.drop_kv()
                assert made.pool.num_free == made.pool.num_pages and not made.running
            if made.idle:
                continue
            admission = made.admit()
            assert all(
                begin + len(ids) <= 4 * len(pages) for ids, pages, begin in admission.recompute
            )
            made.prefixes.release_unused()
            assert made.running
            made.reserve(1, rng.choice([1, 6]))
            for state in made.running:
                assert state.context_len == len(state.tokens) - 1 < 4 * len(state.pages)
                state.tokens.append(1)
                state.context_len += 1
                state.finish = "stop" if rng.random() < 0.2 else None
                if state.remaining == 0:
                    state.finish = "length"
            made.retire(lambda state: state.finish == "stop" and state.room > 0)
        made.release()
        assert made.pool.num_free == made.pool.num_pages and all(s.finish for s in left)


def test_paused_requests_lose_their_pages_before_a_running_one_does():
    made = scheduler(pages=8, page_size=4)
    one, two = made.add([request(i, range(4 + i), new=20) for i in range(2)])
    made.admit()
    made.prefixes.release_unused()
    for state in (one, two):
        state.tokens.append(9)
        state.context_len += 1
    made.reserve(1, 1)
    two.finish = "stop"
    made.retire(lambda state: True)
    assert two in made.paused and two.pages and made.active == 2 and not made.idle
    kept, held = list(two.pages), made.pool.num_free
    made.resume(two, [7, 8])
    (job,) = made.admit().recompute  # from the last token of the turn on
    assert job.tokens == [9, 7] and job.begin == 5 and job.pages[: len(kept)] == kept
    assert made.running == [one, two] and made.pool.num_free <= held
    two.finish = "stop"
    made.retire(lambda state: True)
    made.running = [one]
    assert made.reserve(25, 1) == [] and not two.pages  # not preempted: it does not run
    made.resume(two, [])
    one.finish = "length"
    made.retire()
    (job,) = made.admit().recompute
    assert job.begin == 0 and job.tokens == two.tokens[:-1]
