"""The rollout engine: continuous batching and tree speculation that changes no token.

A pass is the same for every strategy: draft a tree (the root alone for plain decoding), run the
target on its rows, follow the target's samples through the tree, commit the accepted rows
(`passes.py`). So a switch of strategies moves no KV, and a strategy changes the number of passes
but no token.

The scheduler admits requests and grants pages, and the bandit chooses a strategy. The device then
makes a burst: passes without the host in between (`runner.py`; `graphs.py` launches them). A burst
ends at its limit of passes, when pages run short, or when enough requests have finished that
others can be admitted or a smaller graph can take over. Until then the rows of finished requests
are inert. The host reads the results of a burst while the next one runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import tlt_ext
from tlt_ext.limits import MAX_EMITTED

from ..common.spans import Spans
from ..config.strategy import MAX_DRAFTED, OFF, Strategy
from ..model.kv_cache import KvCache
from ..model.target import TargetModel
from . import token_store
from .bandit import Bandit
from .graphs import build_graphs
from .observer import RolloutObserver
from .pages import PagePool, pages_for
from .passes import PassProgram
from .prefill import Prefill
from .proposers import Proposer
from .request import Request, Response, RunningRequest
from .runner import Burst, PassRunner
from .scheduler import Scheduler
from .source import RequestSource
from .state import Batch, BatchState
from .stats import RolloutStats
from .token_store import TokenStore

if TYPE_CHECKING:
    from ..config.sections import EngineConfig

RING_PASSES = 128  # twice the longest burst: one is read while the next runs


@dataclass(eq=False)
class RolloutEngine:
    """Generates responses to requests, which may arrive while others run."""

    model: TargetModel  # the engine never writes its weights
    cache: KvCache
    config: EngineConfig
    bandit: Bandit  # chooses the strategy of each burst
    proposers: dict[str, Proposer]  # by strategy kind
    seed: int  # of the keyed noise
    observer: RolloutObserver | None = None  # of rollouts that are recorded; the spot trainer

    def __post_init__(self) -> None:
        model, cache, config = self.model, self.cache, self.config
        self.target_version = 0  # of the policy, written into responses
        self.page_limit: int | None = None  # use only this many pages (tests of preemption)
        self.stats = RolloutStats()  # of the last rollout
        self.spans = Spans("rollout")
        self.spec_max_rows = config.spec_max_rows or model.max_rows
        self.prefill = Prefill(model, cache, config.prefill_chunk)
        device, size = cache.k.device, cache.page_size
        max_len = min(model.spec.max_position, cache.num_pages * size)
        max_pages = pages_for(max_len + MAX_DRAFTED, size)
        self.store = TokenStore(token_store.HISTORY * config.max_batch, max_len, device)
        self.state = BatchState(config.max_batch, max_pages, size, self.store, device)
        self.ring = tlt_ext.PassRing(
            RING_PASSES, config.max_batch, MAX_EMITTED, pinned=device.type == "cuda"
        )
        self.program = PassProgram(
            model,
            cache,
            self.state,
            self.ring,
            self.proposers,
            self.seed,
            self.spans,
            config.verify,
        )
        rows, buckets = self.spec_max_rows, self.bandit.config.buckets
        graphs = build_graphs(config, buckets, rows, self.program)
        self.runner = PassRunner(self.program, graphs)

    def generate(
        self,
        requests: Sequence[Request],
        record: bool = True,
        observer: RolloutObserver | None = None,
        source: RequestSource | None = None,
    ) -> list[Response]:
        """Responses to the requests, in their order.

        Raises UserError if a request can never run: it is too long for the context or the page
        pool.

        Args:
            record: whether the observer is called and n-gram drafts of later rollouts use the
                responses (not for an evaluation).
            observer: instead of the engine's own.
            source: adds requests, whose responses it keeps, and takes others out.
        """
        for state in self.state.running:  # of a rollout that an error ended
            self.store.release(state, keep=False)
        self.runner.prepare()
        self._started = time.perf_counter()
        self._observer = (record and (observer or self.observer)) or RolloutObserver()
        self._source = source or RequestSource()
        self._traced = bool(requests)  # a rollout of arrivals alone may never end
        self._choice, self._horizon = OFF, 1  # of the bandit
        self.stats = RolloutStats()
        self.prefill.rows = self.prefill.recomputed = 0
        self.scheduler = Scheduler(
            PagePool(self.page_limit or self.cache.num_pages),
            self.cache.page_size,
            self.config.max_batch,
            self.model.spec.max_position,
            self.config.spec_max_batch,
            self._observer.on_finish,
        )
        added = self.scheduler.add(requests)
        for state in added:
            if state.finish and self._source.ended(state):
                self.scheduler.paused.append(state)
        strategy, changes = OFF, self.store.changes
        while self._unfinished():
            if self.scheduler.idle:  # all requests wait for tools
                self._observer.on_pass(self.scheduler.active, 0)
                continue
            if admission := self.scheduler.admit():
                with self.spans("prefill"):
                    self.prefill.admit(admission)
            self.scheduler.prefixes.release_unused()
            previous, strategy = strategy, self._choose()
            for state in self.scheduler.reserve(*self._demand(strategy)):
                self.store.release(state, keep=False)
            limit = self._most_passes(strategy)
            switched = strategy != previous and self.stats.bursts > 0  # not at the first burst
            self._run_bursts(self._fill(strategy, switched), strategy, limit)
        self.scheduler.release()
        if not record:
            self.store.clear(since=changes)
        self.stats.close(self.scheduler, self.prefill)
        self.stats.elapsed_s = time.perf_counter() - self._started
        return [state.response(self.target_version) for state in added]

    def remove(self, state: RunningRequest) -> None:
        """Takes an unfinished request out of the rollout, which must be between two bursts."""
        self.scheduler.remove(state)
        self.store.release(state, keep=False)

    def forget(self) -> None:
        """Drops the finished responses that n-gram drafts use."""
        self.store.clear()

    def metrics(self) -> dict[str, float]:
        return {} if self.runner.graphs is None else self.runner.graphs.metrics()

    # ---- between bursts -------------------------------------------------------------------------

    def _unfinished(self) -> bool:
        """Lets the source add and remove requests; whether any is left."""
        for state in self._source.exchange(self.scheduler):
            self.store.release(state, keep=False)
        return self.scheduler.active > 0

    def _choose(self) -> Strategy:
        running = self.scheduler.running
        # A drafter cannot start from a prompt of one token, which has no committed entry.
        started = all(s.context_len > 0 for s in running)

        def usable(arm: Strategy) -> bool:
            if arm == OFF:
                return True
            proposer = self.proposers.get(arm.kind)
            if proposer is None or not proposer.usable():
                return False
            narrow = len(running) * arm.num_verify <= self.spec_max_rows
            ready = started and narrow and self.runner.covers(len(running), arm)
            # Short of pages, speculation is given up before a request is preempted.
            return ready and self.scheduler.has_room(self.program.lookahead(arm))

        def choose() -> tuple[Strategy, int]:
            strategy = self.bandit.choose(len(running), usable, self.runner.step_s)
            return strategy, self.bandit.horizon

        self._choice, self._horizon = self.model.parallel.decide(choose)
        return self._choice

    def _demand(self, strategy: Strategy) -> tuple[int, int]:
        """Per request: KV slots that a pass may write, and tokens that a burst may commit."""
        tokens = self._most_passes(strategy) * (strategy.levels + 1)
        return self.program.lookahead(strategy), tokens

    def _most_passes(self, strategy: Strategy) -> int:
        passes = self.runner.most_passes(len(self.scheduler.running), strategy)
        return min(passes, self._horizon)

    def _fill(self, strategy: Strategy, switched: bool) -> Batch:
        running = self.scheduler.running
        if self.state.is_stale(running):
            self.state.fill(running)
        else:
            self.state.grant()
        batch = self.state.rows(len(running))
        began, lengths = time.perf_counter(), None
        if strategy != OFF:
            proposer = self.proposers[strategy.kind]
            lengths = proposer.prepare(batch, strategy, self.store)
            if lengths is not None:
                self.scheduler.set_draft_lens(batch.running, lengths, proposer.version)
            if lengths is not None or switched:  # passes with other strategies do not update it
                self.state.update_num_new()
        spent = time.perf_counter() - began
        if lengths is not None:
            self.stats.catchup_s += spent
        elif switched:
            self.stats.switch_s += spent
        self.stats.switches += switched
        return batch

    # ---- bursts ---------------------------------------------------------------------------------

    def _run_bursts(self, batch: Batch, strategy: Strategy, limit: int) -> None:
        """Runs bursts until a decision needs their results.

        If a burst ended at its limit, the next one is launched at once, and the results of the
        first are read while it runs. If the bandit then chooses another strategy, the running burst
        is stopped.
        """
        count, unread = len(batch), None
        ends = self.scheduler.burst_ends(self.runner.spare(count, strategy))
        while True:
            meanwhile = partial(self._overlap, batch, unread)
            burst = self.runner.run(count, strategy, limit, ends, meanwhile)
            if burst.unbroken:
                self._observer.on_pass(self.scheduler.active - burst.ended, burst.passes)
            if not (burst.unbroken and self._can_continue(burst)):
                break
            limit, ends, unread = self._most_passes(strategy), ends - burst.ended, burst
        self._harvest(batch, burst)
        if not burst.unbroken:
            self._observer.on_pass(self.scheduler.active, burst.passes)

    def _can_continue(self, burst: Burst) -> bool:
        """Whether the next burst can start before this one is read."""
        if self.scheduler.waiting and burst.ended:  # there is a free place
            return False
        if self._source.due(self.scheduler):
            return False
        same_drafter = self.program.version(burst.strategy) == burst.version
        return burst.captured and same_drafter and burst.strategy == self._choice

    def _overlap(self, batch: Batch, unread: Burst | None) -> bool:
        """Host work during a burst: reads the previous one, then works for the observer.

        Returns whether this burst is to stop.
        """
        stop = False
        if unread is None:
            self.scheduler.release()
        else:
            stop = self._read(batch, unread)
        while self.runner.graphs and not (stop or self.ring.reason) and self._observer.on_wait():
            pass
        return stop

    def _read(self, batch: Batch, burst: Burst) -> bool:
        """Reads a burst while the next one runs, and grants pages for the one after that.

        Pages of finished requests go to others only with `state.grant`, which also takes them from
        the inert rows. Returns whether the running burst is to stop.
        """
        self._harvest(batch, burst)
        self.scheduler.release()
        if self._choose() != burst.strategy:
            return True
        if self.scheduler.grant(*self._demand(burst.strategy)):
            self.state.grant()  # enqueued after the running burst
        return False

    def _harvest(self, batch: Batch, burst: Burst) -> None:
        """Records what the passes emitted and retires finished requests."""
        rows = self.ring.collect(burst.begin, burst.end, len(batch))
        self.scheduler.record(batch.running, rows, burst.strategy, burst.version)
        if burst.strategy == self._choice:  # otherwise the bandit has opened another window
            self.bandit.record(burst.total, burst.elapsed_s, burst.passes, burst.request_passes)
        self.stats.add_burst(burst, burst.begun_s - self._started, self._traced)
        done = self.scheduler.retire(self._source.ended)
        if done:  # n-gram drafts use all tokens, including those of passes without n-grams
            self.store.advance(batch.store_row, batch.context_len)
        paused = set(self.scheduler.paused)
        for state in done:  # a continued request gets a row again, with all of its tokens
            self.store.release(state, keep=state not in paused)
