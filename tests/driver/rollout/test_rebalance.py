"""Requests that move between ranks: one owner at any time, the same tokens and bits."""

import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from driver.rollout import rebalance
from driver.rollout.pages import PagePool
from driver.rollout.rebalance import Rebalancer
from driver.rollout.scheduler import Scheduler
from driver.rollout.source import RequestSource
from tests.driver.rollout import test_engine
from tests.driver.rollout.test_bursts import looping
from tests.driver.rollout.test_engine import (
    Choose,
    generate,
    make_rollout,
    observer,
    requests,
    same,
)
from tests.driver.run.test_world import KILLED, launch, run

policy, rollout, plain = test_engine.policy, test_engine.rollout, test_engine.plain  # fixtures


class HandsOver(RequestSource):
    """A stand-in for the rebalancer: hands over the running requests at the `look`-th call."""

    def __init__(self, look):
        self.look, self.parcels = look, []

    def due(self, scheduler):
        return True

    def exchange(self, scheduler):
        self.look -= 1
        if self.look:
            return []
        assert not scheduler.waiting
        self.parcels = [
            pickle.dumps(replace(s, pages=[], context_len=0, draft_len=0))
            for s in scheduler.running
        ]
        return scheduler.hand_over()


class TakesIn(HandsOver):
    """Adopts the requests that another one handed over."""

    def exchange(self, scheduler):
        self.look -= 1
        if not self.look:
            scheduler.adopt(map(pickle.loads, self.parcels))
        return []


def features(sequence, cache):
    slots = cache.features[sequence.pages].flatten(0, 1)
    return slots[: sequence.context_len].clone()


@pytest.mark.parametrize("strategy", ["off", "ngram:4,1,5", "learned:4,3,12"])
@pytest.mark.parametrize("pages", [None, 20])
def test_a_request_that_moves_between_engines_has_the_same_bits(
    policy, rollout, plain, strategy, pages, monkeypatch
):
    """Tokens, log-probs and features, also if the receiver preempts for lack of pages."""
    other = make_rollout(policy)
    other.spot.swap()
    jobs, kept = requests(), {}
    one, two = rollout.engine, other.engine
    for engine in (one, two):

        def note(sequence, cache=engine.cache):
            kept.setdefault(sequence.request.id, []).append(features(sequence, cache))

        monkeypatch.setattr(engine, "observer", observer(note))
    one.generate(jobs)
    gives, takes = HandsOver(6), TakesIn(4)
    given = generate(rollout, jobs[:6], strategy, sources=[gives])
    takes.parcels = gives.parcels
    two.bandit, two.page_limit = Choose(strategy), pages
    received = two.generate(jobs[6:], sources=[takes])
    moved = {pickle.loads(p).request.id for p in takes.parcels}
    assert moved and moved.isdisjoint(r.request.id for r in given)
    assert [r.request for r in received[:6]] == jobs[6:]
    assert {r.request.id for r in received[6:]} == moved
    assert same(sorted(given + received, key=lambda r: r.request.id), plain)
    assert two.stats.adopted == len(moved) and one.stats.adopted == 0
    assert one.stats.reprefilled_tokens == 0
    assert two.stats.reprefilled_tokens == 0 and (two.stats.preemptions > 0) == bool(pages)
    for request in moved:
        alone, after = kept[request]
        assert alone.equal(after)


def test_consecutive_bursts_stop_for_an_exchange(policy):
    """Without it the device would make passes until a request finishes."""
    one, two = looping(policy), looping(policy)
    jobs = requests(stop=())
    wanted = generate(one, jobs, horizon=2)
    gives, takes = HandsOver(4), TakesIn(2)
    given = generate(one, jobs[:6], horizon=2, sources=[gives])
    takes.parcels = gives.parcels
    received = generate(two, jobs[6:], horizon=2, sources=[takes])
    assert one.engine.stats.target_passes == 6 and two.engine.stats.adopted == 6
    assert not given and same(sorted(received, key=lambda r: r.request.id), wanted)


# ---- senders and receivers ----------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch):
    """Ranks with one store, which they read at every call; arguments: requests of each rank."""
    monkeypatch.setattr(rebalance, "LOOK_S", 0.0)

    def make(*running, most=2, max_batch=8):
        made, store = [], dist.PrefixStore("tlt", dist.HashStore())
        for rank, count in enumerate(running):
            world = SimpleNamespace(rank=rank, size=len(running), store=store)
            scheduler = Scheduler(PagePool(100), 4, max_batch, 100)
            jobs = [replace(job, id=100 * rank + i) for i, job in enumerate(requests(count))]
            scheduler.add(jobs)
            scheduler.admit()
            for sequence in scheduler.running:
                sequence.tokens.append(7)
            made.append((Rebalancer(world, most, max_batch, "0.0"), scheduler))
        return made

    return make


def look(rank):
    part, scheduler = rank
    return [s.request.id for s in part.exchange(scheduler)]


def end(rank):
    for sequence in rank[1].running:
        sequence.finish = "stop"
    rank[1].retire()
    return look(rank)


def held(rank):
    return [s.request.id for s in (*rank[1].running, *rank[1].waiting)]


def test_nearly_idle_ranks_hand_over_to_a_busy_one(ranks):
    few, busy, late = ranks(2, 3, 1)
    assert look(busy) == [] and look(few) == [] and look(busy) == []  # its wish is seen
    free = few[1].pool.num_free
    assert look(few) == [0, 1] and not few[1].active and few[1].pool.num_free > free
    assert look(late) == [200] and look(few) == look(late) == []
    assert look(busy) == [] and held(busy) == [100, 101, 102, 0, 1, 200]
    tokens = [s.tokens[-1] for s in busy[1].waiting]
    assert tokens == [7] * 3 and busy[1].adopted == list(busy[1].waiting)
    assert end(few) == end(late) == []


def test_one_of_two_nearly_idle_ranks_takes_all(ranks):
    one, two = ranks(2, 1)
    for rank in (one, two, one, two):
        look(rank)
    assert held(one) == [] and held(two) == [100, 0, 1]


def test_a_rank_that_handed_over_is_not_the_receiver_of_later_ones(ranks):
    few, busy, late = ranks(1, 5, 2)
    look(few), look(busy), look(few)
    end(busy)  # takes the last ones in
    assert held(busy) == [0]
    assert look(late) == [] and held(late) == [200, 201]  # its slot is closed: it keeps them
    assert look(few) == [] and not few[1].active


def test_a_finished_receiver_adopts_what_was_sent_and_closes(ranks):
    few, busy = ranks(1, 3)
    look(few), look(busy)
    assert end(busy) == [] and not busy[1].active  # nothing was sent
    assert look(few) == [] and held(few) == [0]


def test_the_wish_of_a_finished_rank_is_withdrawn(ranks):
    """Otherwise the next nearly idle rank would become the receiver instead of handing over."""
    first, few, busy = ranks(1, 2, 5)
    look(first), end(first)
    look(few), look(busy)
    assert look(few) == [100, 101]


def test_a_full_batch_receives_nothing(ranks):
    few, busy, late = ranks(2, 5, 2, max_batch=7)
    look(few), look(busy), look(few), look(busy)
    assert len(held(busy)) == 7 and look(late) == []
    few, busy = ranks(2, 5, max_batch=6)
    assert look(few) == look(busy) == look(few) == []


def test_ranks_with_waiting_requests_do_not_read_the_store(ranks):
    few, busy = ranks(2, 3)
    busy[1].add(requests(1))
    busy[0].store = few[0].store = None  # any use of it fails
    assert not busy[0].due(busy[1]) and look(busy) == []
    assert few[0].due(few[1])
    few[0]._next_look = time.monotonic() + 60  # has just looked
    assert not few[0].due(few[1]) and look(few) == []


@pytest.mark.parametrize("seed", range(40))
def test_every_request_finishes_once_at_any_speed(ranks, seed):
    """Four concurrent ranks with random numbers of requests, which finish at random times."""
    chances = [random.Random(4 * seed + rank) for rank in range(4)]
    made = ranks(*[chance.randrange(1, 9) for chance in chances], most=3)
    wanted = sorted(id for rank in made for id in held(rank))

    def roll_out(rank, chance):
        ended, scheduler = [], rank[1]
        while True:
            look(rank)
            scheduler.admit()
            if not scheduler.active:
                return ended
            time.sleep(1e-4 * chance.random())
            for sequence in scheduler.running:
                sequence.finish = "stop" if chance.random() < 0.2 else None
            ended += [state.request.id for state in scheduler.retire()]

    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(roll_out, made, chances))
    assert sorted(id for ids in ended for id in ids) == wanted
    assert sum(bool(scheduler.adopted) for _, scheduler in made) <= 1


# ---- real processes -----------------------------------------------------------------------------

TAIL = """
import json
from pathlib import Path
from driver.rollout import rebalance
from driver.rollout.engine import RolloutEngine
from driver.rollout.scheduler import Scheduler
from driver.rollout.source import RequestSource
from driver.tasks.sums import SumsTask
from tests.driver.run.test_run import REWARDS
collector.Collector.rewards = REWARDS
SumsTask.reward = lambda self, prompt, text, finished: sum(map(ord, prompt.id + text)) % 97 / 100
rebalance.LOOK_S = 0.0
make = rebalance.Rebalancer.__init__
def one_receives(self, world, most, max_batch, rollout):
    make(self, world, most, max_batch if RANK == 1 else 0, rollout)
rebalance.Rebalancer.__init__ = one_receives
bursts = RolloutEngine._run_bursts
def slowly(self, *args):
    if self._observer is not None:
        self._observer.on_wait()  # scores a finished response, if there is one
    few = self._sources and len(self.scheduler.running) <= 2
    time.sleep(0.3 if few else 0.02 + 0.1 * RANK)
    return bursts(self, *args)
RolloutEngine._run_bursts = slowly
gather = collector.Collector.gather
def noted(self, step):
    got = gather(self, step)
    rows = [(r.request.id, r.token_ids, r.logprobs, r.finish) for r in got.responses]
    with open(Path(self.config.run.root) / f"drawn-{RANK}", "a") as file:
        print(json.dumps([rows, got.rewards]), file=file)
    return got
collector.Collector.gather = noted
"""
# Rank 0 has eight requests, two of which start when others finish; rank 1 has four.
STAGGERED = ("engine.max_batch=6", "engine.strategies=off")


@pytest.mark.slow
def test_a_run_that_hands_requests_over_learns_the_same(tmp_path):
    """Tokens, bits of log-probs and rewards, on both ranks."""
    drawn, records = [], []
    for most in (0, 2):
        folder = tmp_path / str(most)
        records.append(run(folder, 2, *STAGGERED, f"spot.rebalance={most}", script=TAIL))
        drawn.append([(folder / f"drawn-{rank}").read_text().splitlines() for rank in range(2)])
    assert drawn[0] == drawn[1] and len(drawn[0][0]) == len(set(drawn[0][0])) == 2
    assert records[1][1]["ranks/handed_over"] > 0
    assert "ranks/handed_over" not in records[0][1]


DIES = f"""
def dies(self, sequences):
    if list(sequences):
        {KILLED}
Scheduler.adopt = dies
"""


def test_a_receiver_that_dies_is_named(tmp_path):
    words = (*STAGGERED, "spot.rebalance=2", "run.timeout_s=15")
    code, log = launch(tmp_path, 2, *words, script=TAIL + DIES)
    assert code != 0 and "rank 1 (in gen)" in log, log[-3000:]
