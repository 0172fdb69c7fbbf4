"""The adaptive rollout engine: continuous batching, tree speculation, the same tokens either way.

One pass serves every strategy: draft a tree (plain decoding's is the root alone), run the target on
its rows, follow the target's own keyed samples through it, commit what was followed. So turning
speculation on or off moves no KV, and the strategy decides how many passes are made and no token.

The host admits requests, grants pages and chooses a strategy; then the device makes passes by
itself (`passes.py`, `runner.py`) until pages run short or so many requests have ended that there is
something to decide; the rows of those that ended are inert. What a burst of passes emitted is read,
and who ended in it is retired, while the next one runs.
"""

from __future__ import annotations

import functools
import operator
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

import tlt_ext

from ..common.errors import UserError
from ..common.spans import Spans
from ..config.strategy import MAX_DRAFTED, OFF, Strategy, parse_strategies
from ..model.kv_cache import KvCache
from ..model.target import TargetModel
from .bandit import Bandit
from .graphs import PassGraphs, nothing
from .pages import PagePool, pages_for
from .passes import PassProgram
from .plan import BucketPlan, GraphCost, listed
from .prefill import Prefill
from .proposers import Proposer
from .request import Request, Response
from .runner import Burst, PassRunner
from .scheduler import Scheduler
from .scheduler import Sequence as Running
from .state import MAX_EMITTED, Batch, BatchState
from .stats import RolloutStats
from .token_store import TokenStore

if TYPE_CHECKING:
    from ..config.sections import EngineConfig
    from .rebalance import Rebalancer

HARMLESS = tlt_ext.Status.NAN_DRAFT | tlt_ext.Status.BAD_TOKEN  # the draft was ignored
VACANT = 1 / 8  # of the places, before the host wakes to let waiting requests in
RING_PASSES = 128  # twice the most of a burst: one is read while the next runs
FINISH = (None, "stop", "length")


class RolloutEngine:
    """Generates responses for a fixed set of requests.

    Args:
        model: the target; the engine reads its weights and never writes them.
        cache: KV pages (and feature pages, where a drafter is trained or used).
        config: batch and page limits.
        bandit: chooses the strategy of each burst of passes.
        proposers: strategy kind -> who drafts it.
        seed: run seed of the keyed noise.
        on_pass: called between bursts with the requests that are left and the passes made (the spot
            trainer).
        on_finish: called with each finished sequence while its features are still in the cache.
    """

    def __init__(
        self,
        model: TargetModel,
        cache: KvCache,
        config: EngineConfig,
        bandit: Bandit,
        proposers: dict[str, Proposer],
        seed: int,
        on_pass: Callable[[int, int], None] | None = None,
        on_finish: Callable[[Running], None] | None = None,
    ) -> None:
        self.model, self.cache, self.config = model, cache, config
        self.bandit, self.proposers = bandit, proposers
        self.on_pass, self.on_finish = on_pass, on_finish
        self.aside: Callable[[], bool] = nothing  # does a piece of work beside passes, if any
        self.rebalancer: Rebalancer | None = None  # hands requests to other ranks, takes theirs
        self.target_version = 0
        self.page_limit: int | None = None  # use fewer pages than there are (tests of preemption)
        self.stats = RolloutStats()
        self.spans = Spans("rollout")
        self._wanted = OFF  # what the bandit chose last
        self._left: list[Running] = []  # ended, with features to take and pages to free
        self.spec_max_rows = config.spec_max_rows or model.max_rows
        self.prefill = Prefill(model, cache, config.prefill_chunk)
        device, size = cache.k.device, cache.page_size
        max_len = min(model.spec.max_position, cache.num_pages * size)
        max_pages = pages_for(max_len + MAX_DRAFTED, size)
        store = TokenStore(config.history * config.max_batch, max_len, device)
        share = config.draft_temperature
        self.state = BatchState(config.max_batch, max_pages, size, store, device, share)
        ring = tlt_ext.PassRing(
            RING_PASSES, config.max_batch, MAX_EMITTED, pinned=device.type == "cuda"
        )
        self.ring = ring
        self.program = PassProgram(model, cache, self.state, ring, proposers, seed, self.spans)
        self.runner = PassRunner(self.program, self.state, ring, self._graphs())
        bandit.step_s = self.runner.step_s

    def _graphs(self) -> PassGraphs | None:
        config, device = self.config, self.cache.k.device
        if config.graphs == "false" or device.type == "cpu":
            if config.graphs == "true":
                raise UserError("engine.graphs=true: CUDA graphs need run.device=cuda")
            if config.loop == "true":
                raise UserError(
                    "engine.loop=true: there are no graphs to loop in; it needs run.device=cuda"
                    " without engine.graphs=false"
                )
            return None
        loops = tlt_ext.GraphPool.supports_loop(device.index or 0)
        if config.loop == "true" and not loops:
            raise UserError("engine.loop=true: this driver cannot loop inside a CUDA graph")
        loop, budget = loops and config.loop != "false", config.graph_mib << 20
        plan = BucketPlan(
            config.max_batch,
            config.spec_max_batch,
            parse_strategies(config.strategies),
            self.bandit.config.buckets,
            self.spec_max_rows,
            GraphCost(self.model.spec, loop),
            budget,
        )
        if plan.dropped:
            warnings.warn(
                f"engine.graph_mib={config.graph_mib}: too little for the graphs of"
                f" {listed(plan.dropped)}; such speculation is not chosen, plain decoding runs"
                " without a graph, slower",
                stacklevel=3,
            )
        return PassGraphs(plan, self.program, self.state, self.ring, loop, budget)

    # ---- the rollout ----------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], record: bool = True) -> list[Response]:
        """Responses in the order of the requests, then those of requests taken from other ranks.

        Requests that another rank took have none here.

        Args:
            requests: all of them; they join the batch as slots and pages allow.
            record: whether `on_pass` and `on_finish` are called and n-gram drafts of later
                rollouts look at the responses (not for an evaluation).

        Raises:
            UserError: a request that can never run (too long for the context or the page pool).
        """
        for sequence in self.state.sequences:  # of a rollout that an error ended
            self.state.store.give_back(sequence, keep=False)
        self._left.clear()
        self.runner.prepare()
        started = time.perf_counter()
        self.stats = RolloutStats()
        self.prefill.rows = self.prefill.recomputed = 0
        pool = PagePool(self.page_limit or self.cache.num_pages)
        scheduler = Scheduler(
            pool, self.cache.page_size, self.config.max_batch, self.model.spec.max_position
        )
        sequences = scheduler.add(requests)
        strategy, before = OFF, self.state.store.changes
        while self._unfinished(scheduler):
            self._admit(scheduler)
            previous, strategy = strategy, self._choose(scheduler)
            limit = self._make_room(scheduler, strategy)
            switched = strategy != previous and self.stats.bursts > 0  # the first one starts
            batch = self._fill(scheduler.running, strategy, switched)
            self._make_passes(scheduler, batch, strategy, limit, record, started)
        self._settle(scheduler)
        if not record:
            self.state.store.clear(since=before)
        ended = [s for s in (*sequences, *scheduler.adopted) if s.finish]
        self._account(scheduler, sequences, ended)
        self.stats.elapsed_s = time.perf_counter() - started
        return [self._response(sequence) for sequence in ended]

    def forget(self) -> None:
        """Drops the finished responses that n-gram drafts look at."""
        self.state.store.clear()

    def metrics(self) -> dict[str, float]:
        """Of its graphs, under the names of the metrics file."""
        return {} if self.runner.graphs is None else self.runner.graphs.metrics()

    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """The target's logits after `tokens`, float32 [V]; not while `generate` runs."""
        pages = list(range(pages_for(len(tokens), self.cache.page_size)))
        return self.prefill.next_logits(list(tokens), pages)

    # ---- bursts ---------------------------------------------------------------------------------

    def _make_passes(
        self,
        scheduler: Scheduler,
        batch: Batch,
        strategy: Strategy,
        limit: int,
        record: bool,
        started: float,
    ) -> None:
        """Bursts until there is something to decide that needs to know what they emitted.

        A burst that nothing but its limit ended is followed by the same again at once, and read
        while that runs; what is done for who ended is queued behind it, and their rows are inert.
        Should the bandit then want another strategy, the device is asked to stop.
        """
        count, ends = len(batch), self._ends(scheduler, strategy)
        read = functools.partial(self._settle, scheduler)
        while True:
            burst = self.runner.run(count, strategy, limit, ends, lambda r=read: self._beside(r))
            if not burst.unbroken:
                break
            self._pause(scheduler, burst, record, burst.ended)
            if not self._goes_on(scheduler, burst):
                break
            limit, ends = self._most_passes(scheduler, strategy), ends - burst.ended
            read = functools.partial(self._read, scheduler, batch, burst, record, started)
        self._harvest(batch, burst, started)
        self._retire(scheduler, batch, record)
        if not burst.unbroken:
            self._pause(scheduler, burst, record)

    def _goes_on(self, scheduler: Scheduler, burst: Burst) -> bool:
        """Whether another may follow at once: wanted still, and it needs nothing of the host."""
        if scheduler.waiting and burst.ended:  # there is a place
            return False
        if self.rebalancer is not None and self.rebalancer.due(scheduler):
            return False
        same_drafter = self.program.version(burst.strategy) == burst.version
        return burst.captured and same_drafter and burst.strategy == self._wanted

    def _beside(self, read: Callable[[], bool]) -> bool:
        stop = read()
        while self.runner.graphs and not (stop or self.ring.reason) and self.aside():
            pass
        return stop

    def _read(
        self, scheduler: Scheduler, batch: Batch, burst: Burst, record: bool, started: float
    ) -> bool:
        """Reads a burst while the next one runs, and grants pages for the one after that.

        Pages of who ended are others' once the device has been granted them, which takes them from
        the inert row, too.

        Returns:
            Whether the one that runs is to stop.
        """
        self._harvest(batch, burst, started)
        self._retire(scheduler, batch, record)
        self._settle(scheduler)
        if self._choose(scheduler) != burst.strategy:
            return True
        if self._grow_ahead(scheduler, burst.strategy):
            self.state.grant()  # queued behind what runs
        return False

    def _pause(self, scheduler: Scheduler, burst: Burst, record: bool, ended: int = 0) -> None:
        if record and self.on_pass is not None:
            left = len(scheduler.running) + len(scheduler.waiting) - ended
            self.on_pass(left, burst.passes)

    # ---- between bursts -------------------------------------------------------------------------

    def _unfinished(self, scheduler: Scheduler) -> bool:
        """Whether requests are left, those of other ranks included."""
        if self.rebalancer is not None:
            for sequence in self.rebalancer.exchange(scheduler):
                self.state.store.give_back(sequence, keep=False)
        return scheduler.unfinished

    def _admit(self, scheduler: Scheduler) -> None:
        admission = scheduler.admit()
        if self._left and scheduler.lacks_pages:
            self._settle(scheduler)
            admission += scheduler.admit()
        if admission:
            with self.spans("prefill"):
                self.prefill.admit(admission)
        scheduler.release_spent()  # also where nothing was to be computed

    def _choose(self, scheduler: Scheduler) -> Strategy:
        running = scheduler.running
        # A prompt of one token has nothing committed that a drafter could start from.
        started = all(s.context_len > 0 for s in running)

        def usable(arm: Strategy) -> bool:
            if arm == OFF:
                return True
            proposer = self.proposers.get(arm.kind)
            if proposer is None or not proposer.usable():
                return False
            narrow = len(running) * arm.num_verify <= self.spec_max_rows
            ready = started and narrow and self.runner.covers(len(running), arm)
            # Speculation gives way before a request does.
            return ready and scheduler.has_room(self.program.lookahead(arm))

        self._wanted = self.bandit.choose(len(running), usable)
        return self._wanted

    def _make_room(self, scheduler: Scheduler, strategy: Strategy) -> int:
        """Grows every request's pages, for as many passes as returned at most.

        Pages are granted ahead, so that the device need not stop for them; with requests waiting
        for pages, not for places, no more than a page each. It may well run short: then it stops.
        """
        lookahead = self.program.lookahead(strategy)
        if self._grow_ahead(scheduler, strategy) or scheduler.grow(lookahead):
            return self._most_passes(scheduler, strategy)
        self._settle(scheduler)
        scheduler.take_back(lookahead)
        while not scheduler.grow(lookahead):
            if len(scheduler.running) > 1:
                self.state.store.give_back(scheduler.preempt_youngest(), keep=False)
            elif not scheduler.evict_prefixes():
                raise UserError(
                    f"engine.num_pages={self.cache.num_pages}: too few for one request;"
                    " raise it or lower sampling.max_new_tokens"
                )
        return self._most_passes(scheduler, strategy)

    def _grow_ahead(self, scheduler: Scheduler, strategy: Strategy) -> bool:
        """Grants pages for two bursts, the second of which may begin unseen, or else for one."""
        most, lookahead = self._most_passes(scheduler, strategy), self.program.lookahead(strategy)
        for passes in (2 * most, most):
            ahead = passes * (strategy.levels + 1)
            if scheduler.lacks_pages:
                ahead = min(ahead, self.cache.page_size)
            if scheduler.grow(lookahead, ahead):
                return True
        return False

    def _most_passes(self, scheduler: Scheduler, strategy: Strategy) -> int:
        passes = self.runner.most_passes(len(scheduler.running), strategy)
        return min(passes, self.bandit.horizon)

    def _ends(self, scheduler: Scheduler, strategy: Strategy) -> int:
        """Requests that may end before the host has something to decide."""
        count = len(scheduler.running)
        spare, over = self.runner.spare(count, strategy), count - self.config.spec_max_batch
        if scheduler.waiting:  # those that come are let in some at a time
            spare = min(spare, max(1, int(count * VACANT)))
        return min(spare, over) if over > 0 else spare

    def _fill(self, running: list[Running], strategy: Strategy, switched: bool) -> Batch:
        """The state of the running requests on the device, ready for passes with the strategy."""
        if self.state.is_stale(running):
            self.state.fill(running)
        else:
            self.state.grant()
        batch = self.state.rows(len(running))
        began, late = time.perf_counter(), False
        if strategy != OFF:
            proposer = self.proposers[strategy.kind]
            late = proposer.prepare(batch, strategy, self.state.store)
            if late or switched:  # other passes than its own know of no lag
                self.state.lag()
        spent = time.perf_counter() - began
        if late:
            self.stats.catchup_s += spent
        elif switched:
            self.stats.switch_s += spent
        self.stats.switches += switched
        return batch

    def _harvest(self, batch: Batch, burst: Burst, started: float) -> None:
        """Hands what the passes emitted to their sequences, the statistics and the bandit."""
        rows = self.ring.collect(burst.begin, burst.end, len(batch))
        proposer = None if burst.strategy == OFF else self.proposers[burst.strategy.kind]
        for sequence, row in zip(batch.sequences, rows, strict=True):
            if sequence.finish:  # in an earlier burst
                continue
            tokens, logprobs, counts, end, bits = row
            sequence.status |= bits
            if counts[-1] == 0:  # only damaged pages or lengths do this; a loop would not end
                raise RuntimeError(
                    f"request {sequence.request.id} emitted nothing in a pass:"
                    f" {tlt_ext.Status(bits)!r}"
                )
            if burst.strategy.needs_drafter:
                sequence.note_passes(counts, burst.strategy.depth)
            sequence.tokens += tokens
            sequence.logprobs += logprobs
            sequence.context_len += len(tokens)
            sequence.finish = FINISH[end]
            if proposer is not None:
                proposer.passed(sequence, counts[-1])
                sequence.served_by(burst.version)
        # Else another window is open by now, or passes take longer than they will.
        if burst.strategy == self._wanted and not self.runner.graphs_aside:
            self.bandit.record(burst.total, burst.elapsed_s, burst.passes, burst.request_passes)
        self.stats.book(burst, burst.begun_s - started)

    def _retire(self, scheduler: Scheduler, batch: Batch, record: bool) -> None:
        done = scheduler.retire()
        if done:  # n-gram drafts look at all of it, whoever drafted for it
            self.state.store.advance(batch.store_row, batch.context_len)
        for sequence in done:
            self.state.store.give_back(sequence, keep=True)
        if record and self.on_finish is not None:
            self._left += done
        else:
            scheduler.release(done)

    def _settle(self, scheduler: Scheduler) -> bool:
        """Takes what is to be had of requests that ended, and frees their pages.

        It is done beside passes, unless their pages are wanted at once.

        Returns:
            False: no passes that run are to stop for it.
        """
        for sequence in self._left:
            self.on_finish(sequence)
        scheduler.release(self._left)
        self._left.clear()
        return False

    # ---- the end --------------------------------------------------------------------------------

    def _account(
        self, scheduler: Scheduler, sequences: list[Running], ended: list[Running]
    ) -> None:
        stats = self.stats
        stats.adopted = len(scheduler.adopted)
        stats.preemptions = scheduler.preemptions
        stats.prefilled_tokens = self.prefill.rows
        stats.recomputed_tokens = self.prefill.recomputed
        ran = [s for s in sequences if s.num_emitted]
        once = sum(len(prompt) - 1 for prompt in {s.request.prompt_ids for s in ran})
        stats.reprefilled_tokens = stats.prefilled_tokens - once - stats.recomputed_tokens
        # Responses that met what should not be; a bad draft costs nothing.
        flagged = [s.status & ~HARMLESS for s in ended if s.status & ~HARMLESS]
        stats.flagged = len(flagged)
        if flagged:
            bits = functools.reduce(operator.or_, flagged)
            seen = ", ".join(bit.name for bit in tlt_ext.Status if bit & bits)
            warnings.warn(
                f"{len(flagged)} of {len(ended)} responses are flagged ({seen}): the target's"
                " weights or caches are damaged",
                stacklevel=3,
            )

    def _response(self, sequence: Running) -> Response:
        assert sequence.finish in ("stop", "length")
        return Response(
            sequence.request,
            sequence.tokens[len(sequence.request.prompt_ids) :],
            sequence.logprobs,
            sequence.finish,
            self.target_version,
            sequence.drafter_versions,
        )
