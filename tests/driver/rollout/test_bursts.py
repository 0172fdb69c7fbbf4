"""Bursts of passes over buckets with inert rows, without a GPU: a Python loop replaces a graph."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch

import tlt_ext
from driver.common.errors import UserError
from driver.config.strategy import OFF, Strategy, parse_strategies
from driver.rollout import graphs, runner
from driver.rollout.bandit import ArmSums, Bandit
from driver.rollout.graphs import PassGraphs
from driver.rollout.pages import pages_for
from driver.rollout.plan import BucketPlan
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_engine import (
    STRATEGIES,
    Choose,
    generate,
    looping_requests,
    make_rollout,
    observer,
    requests,
    same,
)
from tests.kit import same_bits

ARMS = ["off", *STRATEGIES]


class Pool:
    """A stand-in for `tlt_ext.GraphPool`."""

    def __init__(self, graphs):
        self.graphs, self.launches = graphs, 0

    def __contains__(self, name):
        return True  # none is evicted

    def launch(self, name):
        self.launches += 1
        self.make_passes(name)

    def make_passes(self, name):
        graphs = self.graphs
        (cell,) = [c for c in graphs.plan.cells if str(c) == name]
        rows = graphs.state.rows(cell.batch)
        graphs.program.run(rows, cell.strategy)
        while graphs.loop and graphs.state.control[tlt_ext.Control.GO]:
            graphs.program.run(rows, cell.strategy)


class LatePool(Pool):
    """A device that starts when the host waits, and receives later uploads after the passes."""

    def __init__(self, graphs):
        super().__init__(graphs)
        self.queued, wait = None, graphs.ring.wait

        def run_and_wait(timeout_s):
            if self.queued is not None:  # else passes were launched op by op
                self.run()
            return wait(timeout_s)

        graphs.ring.wait = run_and_wait

    def launch(self, name):
        assert self.queued is None
        self.launches += 1
        batch = self.graphs.state.rows(self.graphs.state.max_batch)
        self.arrays = [batch.granted, batch.block_table]
        self.queued = name, [array.clone() for array in self.arrays]

    def run(self):
        (name, before), self.queued = self.queued, None
        after = [array.clone() for array in self.arrays]
        for array, value in zip(self.arrays, before, strict=True):
            array.copy_(value)
        self.make_passes(name)
        for array, value in zip(self.arrays, after, strict=True):
            array.copy_(value)


class Loops(PassGraphs):
    """Graphs whose passes run op by op, over all rows of their bucket."""

    def __init__(self, engine, plan, loop, pool):
        self.plan, self.program, self.state, self.ring = (
            plan, engine.program, engine.state, engine.ring,
        )  # fmt: skip
        self.loop, self.failed, self.capture_s, self.step_s = loop, "", 0.0, {}
        self._tried, self._captured, self._pool = set(), {}, pool(self)

    def capture(self):
        """Measures one pass of a cell: eight take longer than the test itself."""
        with mock.patch.object(graphs, "PROFILE_PASSES", 1):
            super().capture()

    def _capture(self, cell):
        self._captured[cell] = cell


def looping(policy, *words, loop=True, max_rows=1 << 20, pool=Pool, parallel=None):
    arms = f"engine.strategies={' '.join(ARMS)}"
    rollout = make_rollout(policy, arms, *words, parallel=parallel)
    rollout.spot.swap()
    engine = rollout.engine
    plan = BucketPlan(
        engine.config.max_batch,
        engine.config.spec_max_batch,
        parse_strategies(ARMS),
        rollout.bandit.config.buckets,
        min(max_rows, engine.model.max_rows),
    )
    engine.runner.graphs = Loops(engine, plan, loop, pool)
    return rollout


@pytest.fixture(scope="module")
def policy():
    return random_model("llama-tied-llama3")


@pytest.fixture(scope="module")
def rollout(policy):
    return looping(policy)


@pytest.fixture(scope="module")
def plain(policy):
    return generate(make_rollout(policy), requests())


@pytest.mark.parametrize("pool", [Pool, LatePool])
@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("horizon", [1, 5, 64])
@pytest.mark.parametrize("strategy", ["off", "ngram:6,4,16", "learned:4,3,12", "hybrid:4,3,12"])
def test_a_burst_emits_the_same_as_single_passes(policy, plain, strategy, horizon, loop, pool):
    """Faults 23, 25, 26: twelve requests in a batch of eight, buckets of 1, 2, 4 and 8 rows."""
    rollout = looping(policy, loop=loop, pool=pool)
    assert same(generate(rollout, requests(), strategy, horizon=horizon), plain)
    stats = rollout.engine.stats
    assert (stats.bursts == stats.target_passes) == (horizon == 1)
    assert stats.reprefilled_tokens == 0


@pytest.mark.parametrize("pool", [Pool, LatePool])
def test_switching_speculation_during_a_rollout(policy, plain, pool):
    """Faults 31 and 34: the drafter writes the entries that plain passes left out."""
    rollout = looping(policy, pool=pool)
    for seed in range(3):
        assert same(generate(rollout, requests(), *ARMS, seed=seed, horizon=6), plain)
        assert rollout.engine.stats.switches > 3


def drafter_kv(rollout, *menu, jobs=None, on_pass=None, **options):
    """The drafter's keys and values of each finished request, by request."""
    engine, runner, found = rollout.engine, rollout.spot.runner, {}
    size = engine.cache.page_size

    def take(sequence):
        slots = [sequence.pages[t // size] * size + t % size for t in range(sequence.draft_len)]
        rows = [cache.flatten(0, 1)[slots] for cache in (runner.k, runner.v)]
        found[sequence.request.id] = torch.cat(rows, -1)

    engine.bandit, engine.observer = Choose(*menu, **options), observer(take, on_pass)
    engine.generate(jobs or requests(new=40, stop=()))
    return found


def test_the_drafter_writes_entries_that_other_strategies_emitted(policy, rollout):
    """Faults 29, 30, 34: its cache has the same bits as if it had drafted in every pass."""
    always = drafter_kv(looping(policy), "learned:4,3,12")
    for seed in range(3):
        mixed = drafter_kv(rollout, *ARMS, seed=seed, horizon=2)
        shared = {i: min(len(kv), len(always[i])) for i, kv in mixed.items()}
        assert sum(shared.values()) > 150
        assert all(same_bits(mixed[i][:n], always[i][:n]) for i, n in shared.items())


@pytest.mark.parametrize("others", [(), ("learned:3,1,4",), ("off", "ngram:6,4,16")])
def test_the_drafter_writes_chains_longer_than_its_depth(policy, others):
    """In its own passes, or before passes of an arm that writes fewer entries than a chain has."""
    jobs = looping_requests()
    always = drafter_kv(looping(policy), "learned:4,3,12", jobs=jobs)
    rollout = looping(policy)
    engine, runner = rollout.engine, rollout.spot.runner
    got = drafter_kv(rollout, "hybrid:2,1,17", *others, jobs=jobs, horizon=2, seed=2)
    assert engine.ring.num_emitted.max() > 8  # a long accepted chain
    assert (runner.late_rows > 0) == bool(others)
    shared = {i: min(len(kv), len(always[i])) for i, kv in got.items()}
    assert sum(shared.values()) > 500
    assert all(same_bits(got[i][:n], always[i][:n]) for i, n in shared.items())
    assert engine.stats.flagged == 0


def test_pages_are_granted_in_advance(rollout):
    """One request: the host wakes for the length of the ring, not for each page."""
    generate(rollout, requests(count=1, new=60, stop=()), "off", horizon=64)
    assert rollout.engine.stats.target_passes == 60
    assert rollout.engine.stats.bursts == 1


@pytest.mark.parametrize("limit", range(24, 40, 3))
def test_pages_that_run_short_during_a_burst(policy, rollout, limit):
    jobs = requests(count=8, new=40, stop=())
    wanted = generate(make_rollout(policy), jobs)
    assert same(generate(rollout, jobs, *ARMS, seed=limit, page_limit=limit, horizon=64), wanted)


def test_a_pass_launched_op_by_op_is_timed_without_the_prefill_before_it(monkeypatch):
    clock, spent = [0.0], {"prefill": 5.0, "pass": 2.0}

    def work(*names):
        clock[0] += sum(spent.pop(name, 0.0) for name in names)

    stream = mock.Mock(query=mock.Mock(side_effect=[False, True]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(runner, "time", mock.Mock(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(runner, "wait_for", lambda *args: work("prefill", "pass"))
    monkeypatch.setattr(tlt_ext, "arm_passes", mock.Mock())
    program = mock.Mock(state=mock.Mock(device=torch.device("cuda")), ring=mock.Mock(sequence=0))
    program.model.parallel.check = lambda begun: work("prefill")
    burst = runner.PassRunner(program).run(1, OFF, limit=1)
    assert (burst.begun_s, burst.elapsed_s) == (5.0, 2.0)


def test_an_arm_the_plan_lacks_is_not_chosen(policy, plain):
    rollout = looping(policy, max_rows=1)
    graphs = rollout.engine.runner.graphs
    assert {c.strategy for c in graphs.plan.cells} == {OFF}
    assert same(generate(rollout, requests(), "learned:8,4,32", horizon=64), plain)
    assert rollout.engine.stats.spec_passes == 0


def test_capture_out_of_memory_is_a_warning_and_the_same_tokens(policy, plain, monkeypatch):
    rollout = looping(policy)
    graphs = rollout.engine.runner.graphs
    capture = graphs._capture

    def fail(cell):
        if len(graphs._captured) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        capture(cell)

    monkeypatch.setattr(graphs, "_capture", fail)
    with pytest.warns(UserWarning, match=r"x 8 could not be captured \(CUDA out"):
        assert same(generate(rollout, requests(), *ARMS, horizon=3), plain)
    assert rollout.engine.stats.spec_passes > 0
    rollout.engine.forget()
    assert same(generate(rollout, requests(), "learned:3,1,4", horizon=3), plain)
    assert rollout.engine.stats.bursts == rollout.engine.stats.target_passes  # op by op


def test_graphs_of_the_drafter_are_captured_once_there_is_one(policy):
    rollout = looping(policy)
    graphs, runner = rollout.engine.runner.graphs, rollout.spot.runner
    runner.version, version = 0, runner.version
    generate(rollout, requests(count=2), *ARMS, horizon=8)
    assert {c.strategy.kind for c in graphs._captured} == {"off", "ngram"}
    assert rollout.engine.runner.step_s(2, Strategy.parse("learned:4,3,12")) is None
    runner.version = version
    generate(rollout, requests(count=2), *ARMS, horizon=8)
    assert len(graphs._captured) == len(graphs.plan.cells)
    assert rollout.engine.runner.step_s(2, Strategy.parse("learned:4,3,12")) > 0


def test_graphs_on_a_cpu_are_refused(policy):
    with pytest.raises(UserError, match="engine.graphs=pass: CUDA graphs need run.device=cuda"):
        make_rollout(policy, "engine.graphs=pass")


def one_by_one(count=8, first=9, apart=3):
    """Requests that finish one after the other."""
    jobs = requests(count=count, stop=())
    limits = [first + apart * i for i in range(count)]
    return [
        replace(job, params=replace(job.params, max_new_tokens=limit))
        for job, limit in zip(jobs, limits, strict=True)
    ]


@pytest.mark.parametrize("strategy", ["off", "ngram:6,4,16", "learned:4,3,12", "hybrid:4,3,12"])
def test_several_requests_finish_in_one_burst(policy, strategy):
    """Eight requests that finish one by one: a burst ends when a smaller graph can take over."""
    jobs = one_by_one()
    wanted = generate(make_rollout(policy), jobs)
    rollout = looping(policy)
    assert same(generate(rollout, jobs, strategy, horizon=64), wanted)
    stats = rollout.engine.stats
    assert stats.bursts == 4  # 8, 4, 2 and 1 rows
    actives = [active for _, active, _ in stats.trace]
    assert actives == sorted(actives, reverse=True) and len(set(actives)) > 5
    assert len(actives) == stats.target_passes
    request_passes = sum(actives)
    assert stats.spec_request_passes == (0 if strategy == "off" else request_passes)
    assert stats.emitted == sum(job.params.max_new_tokens for job in jobs)
    unlooped = looping(policy, loop=False)
    assert same(generate(unlooped, jobs, strategy, horizon=64), wanted)
    assert unlooped.engine.stats.target_passes == stats.target_passes
    assert unlooped.engine.stats.spec_request_passes == stats.spec_request_passes


def test_speculation_starts_as_soon_as_the_batch_is_small_enough(policy):
    """Six requests may speculate; plain graphs exist for eight and four."""
    rollout = looping(policy, "engine.spec_max_batch=6")
    generate(rollout, one_by_one(), "learned:4,3,12", horizon=64)
    trace = rollout.engine.stats.trace
    assert max(active for _, active, arm in trace if arm != "off") == 6
    assert min(active for _, active, arm in trace if arm == "off") == 7


def test_a_waiting_request_takes_the_first_free_place(policy):
    """A request that finishes while others wait ends the burst: all eight rows stay in use."""
    rollout = looping(policy)
    generate(rollout, one_by_one(12, first=5, apart=4), "off", horizon=64)
    actives = [active for _, active, _ in rollout.engine.stats.trace]
    assert actives[: 5 + 4 * 4] == [8] * 21  # until the fifth finishes; then no request waits


# ---- consecutive bursts -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def late(policy):
    return looping(policy, pool=LatePool)


def log_of(rollout, monkeypatch):
    """Names of the engine's calls from now on, in order."""
    log, engine = [], rollout.engine

    def watch(thing, name):
        call = getattr(thing, name)
        monkeypatch.setattr(thing, name, lambda *a, **more: log.append(name) or call(*a, **more))

    watch(engine.runner.graphs._pool, "launch")
    watch(engine.ring, "collect")
    watch(engine.ring, "request_stop")
    watch(engine.state, "fill")
    return log


@pytest.mark.parametrize("strategy", ["off", "ngram:6,4,16", "learned:4,3,12", "hybrid:4,3,12"])
def test_the_next_burst_is_launched_before_the_last_one_is_read(
    policy, late, strategy, monkeypatch
):
    jobs = requests(count=1, new=70, stop=())
    wanted = generate(make_rollout(policy), jobs)
    late.engine.runner.prepare()
    log = log_of(late, monkeypatch)
    assert same(generate(late, jobs, strategy, horizon=5), wanted)
    bursts = late.engine.stats.bursts
    assert bursts == -(-late.engine.stats.target_passes // 5)  # pages never ran short
    assert log == ["fill", "launch", *["launch", "collect"] * (bursts - 1), "collect"]


def recorded(rollout, jobs, strategy, monkeypatch, horizon=1, page_limit=None):
    """Responses; of each request its tokens, its features, and whether passes were in flight."""
    engine, found = rollout.engine, {}
    pool = getattr(engine.runner.graphs, "_pool", None)

    def take(sequence):
        rows = engine.cache.features[sequence.pages].flatten(0, 1)[: sequence.context_len]
        in_flight = pool is not None and getattr(pool, "queued", None) is not None
        found[sequence.request.id] = sequence.tokens[:], rows.clone(), in_flight

    engine.forget()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "observer", observer(take))
        patch.setattr(engine, "page_limit", page_limit)
        engine.bandit = Choose(strategy, horizon=horizon)
        return engine.generate(jobs), found


def assert_recorded(got, wanted):
    assert same(got[0], wanted[0]) and got[1].keys() == wanted[1].keys()
    for request, (tokens, rows, _) in got[1].items():
        assert tokens == wanted[1][request][0] and same_bits(rows, wanted[1][request][1])


@pytest.mark.parametrize("strategy", ["off", "ngram:6,4,16", "learned:4,3,12", "hybrid:4,3,12"])
def test_finished_requests_are_retired_during_the_next_burst(policy, late, strategy, monkeypatch):
    """Rows are refilled only for a smaller graph; features equal those of passes op by op."""
    jobs = one_by_one()
    wanted = recorded(make_rollout(policy), jobs, strategy, monkeypatch)
    late.engine.runner.prepare()
    log = log_of(late, monkeypatch)
    got = recorded(late, jobs, strategy, monkeypatch, horizon=3)
    assert_recorded(got, wanted)
    assert (
        sum(in_flight for _, _, in_flight in got[1].values()) == len(jobs) - 1
    )  # all but the last
    assert log.count("fill") == 4  # 8, 4, 2 and 1 rows
    assert late.engine.stats.bursts > 8


@pytest.mark.parametrize("pool", [Pool, LatePool])
@pytest.mark.parametrize("limit", [19, 24, 32, 48])
def test_features_where_pages_are_short(policy, pool, limit, monkeypatch):
    """Three times as many requests as rows: finished ones hold pages that others wait for."""
    jobs = one_by_one(24, first=3, apart=1)
    wanted = recorded(make_rollout(policy), jobs, "learned:4,3,12", monkeypatch)
    rollout = looping(policy, pool=pool)
    short = {"horizon": 3, "page_limit": limit}
    assert_recorded(recorded(rollout, jobs, "learned:4,3,12", monkeypatch, **short), wanted)


def test_the_last_request_gets_the_pages_at_once(policy, monkeypatch):
    """Of seventeen pages eight are full when the other request, which holds the rest, finishes."""
    jobs = one_by_one(2, first=60, apart=-29)
    wanted = recorded(make_rollout(policy), jobs, "off", monkeypatch)
    rollout = looping(policy, pool=LatePool)
    got = recorded(rollout, jobs, "off", monkeypatch, horizon=64, page_limit=17)
    assert_recorded(got, wanted)
    assert rollout.engine.stats.preemptions == 0


@pytest.mark.parametrize("pool", [Pool, LatePool])
@pytest.mark.parametrize("limit", [28, 31, 35, 39])
@pytest.mark.parametrize("strategy", ["off", "ngram:6,4,16", "learned:4,3,12"])
def test_pages_of_finished_requests_go_to_running_ones(policy, pool, limit, strategy):
    """The grant also removes them from the inert rows, whose passes would write into them."""
    jobs = one_by_one(first=3, apart=6)
    wanted = generate(make_rollout(policy), jobs)
    rollout = looping(policy, pool=pool)
    got = generate(rollout, jobs, strategy, page_limit=limit, horizon=3)
    assert same(got, wanted) and rollout.engine.stats.flagged == 0


def test_waiting_requests_are_admitted_several_at_a_time(policy, monkeypatch):
    """Sixteen rows: a burst ends at two free places, which costs less than one burst per place."""
    words = ["engine.max_batch=16", "engine.spec_max_batch=16", "engine.num_pages=0"]
    jobs = one_by_one(40, first=6, apart=1)
    wanted = generate(make_rollout(policy, *words), jobs)
    rollout = looping(policy, *words, pool=LatePool)
    rollout.engine.runner.prepare()
    log = log_of(rollout, monkeypatch)
    assert same(generate(rollout, jobs, "off", horizon=64), wanted)
    assert log.count("fill") <= 1 + (40 - 16) / 2 + 5  # then 16, 8, 4, 2 and 1 rows
    actives = [active for _, active, _ in rollout.engine.stats.trace]
    assert min(actives[:30]) >= 15


def test_a_free_place_is_taken_before_the_next_burst(policy):
    """Although fewer requests finished than would end a burst."""
    words = ["engine.max_batch=16", "engine.spec_max_batch=16", "engine.num_pages=0"]
    rollout = looping(policy, *words, pool=LatePool)
    generate(rollout, one_by_one(24, first=6, apart=4), "off", horizon=3)
    actives = "".join("-" if active < 16 else "#" for _, active, _ in rollout.engine.stats.trace)
    assert 3 <= actives.count("#-") and "#---" not in actives[: 4 * 8]


def test_two_bursts_fit_the_ring(policy, monkeypatch):
    """The longest bursts, one of them unread, across the end of the ring."""
    monkeypatch.setattr("driver.rollout.engine.RING_PASSES", 16)
    jobs = requests(count=2, new=70, stop=())
    wanted = generate(make_rollout(policy), jobs)
    rollout = looping(policy, pool=LatePool)
    assert same(generate(rollout, jobs, "off", horizon=64), wanted)
    assert rollout.engine.stats.bursts == 9


class Script(Choose):
    """One strategy after the other, each for one window."""

    def choose(self, batch, usable, step_s=None):
        return self.menu[0]

    def record(self, *window):
        self.windows.append((self.menu[0], *window))
        if len(self.menu) > 1:
            self.menu.pop(0)


@pytest.mark.parametrize("pool, loop", [(LatePool, True), (LatePool, False), (Pool, False)])
def test_a_burst_of_the_wrong_strategy_is_stopped(policy, pool, loop, monkeypatch):
    """One pass of it was in flight; the bandit does not count it for the next arm."""
    jobs = requests(count=1, new=40, stop=())
    wanted = generate(make_rollout(policy), jobs)
    rollout = looping(policy, pool=pool, loop=loop)
    engine, bandit = rollout.engine, Script("off", "ngram:6,4,16", "off", horizon=5)
    engine.runner.prepare()
    log, engine.bandit, bandit.windows = log_of(rollout, monkeypatch), bandit, []
    assert same(engine.generate(jobs, record=False), wanted)
    arms = [arm for _, _, arm in engine.stats.trace]
    assert arms[:14] == ["off"] * 6 + ["ngram:6,4,16"] * 6 + ["off"] * 2
    windows = [(str(arm), passes) for arm, _, _, passes, _ in bandit.windows]
    assert windows[:3] == [("off", 5), ("ngram:6,4,16", 5), ("off", 5)]
    assert log[: 2 if loop else 6] == ["fill", *["launch"] * (1 if loop else 5)]
    assert log.index("launch", 2) < log.index("collect") < log.index("request_stop")


def test_new_drafter_weights_are_used_from_the_next_burst(policy):
    """Faults 29, 30: its cache is recomputed, and a burst is stamped with its own drafter."""
    strategy = "learned:4,3,12"

    def worse(rollout):
        runner, state = rollout.spot.runner, rollout.spot.drafter.state_dict()
        state["midlayer.hidden_norm.weight"] = 0.5 * state["midlayer.hidden_norm.weight"]
        runner.load(state, runner.version + 1)

    old, new, swapped = (looping(policy, pool=LatePool) for _ in range(3))
    worse(new)
    one = requests(count=1, new=40, stop=())
    before, after = (drafter_kv(rollout, strategy, jobs=one) for rollout in (old, new))
    swaps = iter([lambda: worse(swapped)])
    taken = drafter_kv(
        swapped, strategy, jobs=one, horizon=5, on_pass=lambda *_: next(swaps, lambda: None)()
    )
    for i, kv in taken.items():
        n = min(len(kv), len(after[i]), len(before[i]))
        assert same_bits(kv[:n], after[i][:n]) and not same_bits(kv[:n], before[i][:n])
    assert [s.drafter_versions for s in swapped.engine.state.running] == [[1, 2]]


def test_an_error_of_the_host_leaves_nothing_in_flight(policy, late, monkeypatch):
    jobs = requests(count=1, new=40, stop=())
    wanted = generate(make_rollout(policy), jobs)
    with monkeypatch.context() as patch:
        patch.setattr(late.engine, "_harvest", None)
        with pytest.raises(TypeError):
            generate(late, jobs, "off", horizon=5)
    assert late.engine.runner.graphs._pool.queued is None
    assert same(generate(late, jobs, "off", horizon=5), wanted)


# ---- few pages ----------------------------------------------------------------------------------


def test_an_arm_without_pages_is_replaced_by_one_that_has_them(policy, monkeypatch):
    """The bandit counts no passes of other arms and does not wait for pages."""
    large, small = Strategy.parse("learned:8,4,32"), Strategy.parse("ngram:4,1,5")
    jobs = requests(count=4, new=60, stop=())
    wanted = generate(make_rollout(policy), jobs)
    rollout = looping(policy, pool=LatePool)
    engine, config = rollout.engine, replace(rollout.bandit.config, epsilon=0.0, window_passes=4)
    engine.bandit = bandit = Bandit([OFF, large, small], config, spec_max_batch=8)
    monkeypatch.setattr(engine.runner, "step_s", lambda batch, arm: 1.0)
    known = {large: 6.0, small: 2.0}  # tokens of a request in a pass
    bandit._sums |= {(4, arm): ArmSums(0, 99.0, 99 * accept, 99.0) for arm, accept in known.items()}
    engine.page_limit = 56  # 4 requests of 60 tokens and 32 rows of each: some 70
    try:
        assert same(engine.generate(jobs, record=False), wanted)
    finally:
        engine.page_limit = None
    arms = Counter(arm for _, _, arm in engine.stats.trace)
    assert arms[str(large)] > 5 and arms[str(small)] > 5


@pytest.mark.parametrize("count", [2, 3])
def test_a_pool_that_holds_all_requests_preempts_none(policy, rollout, count):
    """Requests with fewer accepted tokens give back pages granted in advance."""
    jobs = requests(count=count, new=70, stop=())
    wanted = generate(make_rollout(policy), jobs)
    pages = sum(pages_for(len(job.prompt_ids) - 1 + 70, 4) for job in jobs)
    for strategy in ("hybrid:4,3,12", "hybrid:2,1,17", "learned:8,4,32", "ngram:6,4,16"):
        for horizon in (1, 5, 64):
            got = generate(rollout, jobs, strategy, horizon=horizon, page_limit=pages)
            assert same(got, wanted)
            assert rollout.engine.stats.preemptions == 0
            assert rollout.engine.stats.spec_passes > 0
