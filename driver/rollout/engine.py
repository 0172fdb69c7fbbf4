"""The adaptive rollout engine: continuous batching, tree speculation, the same tokens either way.

One pass serves every strategy: draft a tree (plain decoding's is the root alone), run the target on
its rows, follow the target's own keyed samples through it, commit what was followed. So turning
speculation on or off moves no KV, and the strategy decides how many passes are made and no token.
"""

from __future__ import annotations

import functools
import operator
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import tlt_ext
from driver.bandit import OFF, Bandit
from driver.errors import UserError
from driver.model import RowBatch, TargetModel
from driver.rollout.batch import Batch, block_table, build_batch
from driver.rollout.kv_cache import KvCache
from driver.rollout.pages import PagePool, pages_for
from driver.rollout.proposers import Proposer
from driver.rollout.request import Request, Response
from driver.rollout.scheduler import Admission, Scheduler
from driver.rollout.scheduler import Sequence as Running
from driver.rollout.stats import RolloutStats
from driver.rollout.tree import MAX_DEPTH, Tree, roots
from driver.spans import Spans
from driver.strategy import Strategy

if TYPE_CHECKING:
    from driver.sections import EngineConfig

MAX_EMITTED = MAX_DEPTH + 1
MAX_ROWS = 128  # of a request in one pass
HARMLESS = tlt_ext.Status.NAN_DRAFT | tlt_ext.Status.BAD_TOKEN  # the draft was ignored


class RolloutEngine:
    """Generates responses for a fixed set of requests.

    Args:
        model: the target; the engine reads its weights and never writes them.
        cache: KV pages (and feature pages, where a drafter is trained or used).
        config: batch and page limits.
        bandit: chooses the strategy of each pass.
        proposers: strategy kind -> who drafts it.
        seed: run seed of the keyed noise.
        on_pass: called between passes with the number of running requests (the spot trainer).
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
        on_pass: Callable[[int], None] | None = None,
        on_finish: Callable[[Running], None] | None = None,
    ) -> None:
        self.model, self.cache, self.config = model, cache, config
        self.bandit, self.proposers, self.seed = bandit, proposers, seed
        self.on_pass, self.on_finish = on_pass, on_finish
        self.target_version = 0
        self.page_limit: int | None = None  # use fewer pages than there are (tests of preemption)
        self.device = cache.k.device
        self.stats = RolloutStats()
        self.spans = Spans("rollout")

    # ---- the rollout ----------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], record: bool = True) -> list[Response]:
        """Responses in the order of the requests.

        Args:
            requests: all of them; they join the batch as slots and pages allow.
            record: whether `on_pass` and `on_finish` are called (not for an evaluation).

        Raises:
            UserError: a request that can never run (too long for the context or the page pool).
        """
        started = time.perf_counter()
        self.stats = RolloutStats()
        page_size = self.cache.page_size
        pool = PagePool(self.page_limit or self.cache.num_pages)
        scheduler = Scheduler(pool, page_size, self.config.max_batch, self.model.spec.max_position)
        sequences = scheduler.add(requests)
        batch: Batch | None = None
        strategy = OFF
        while scheduler.unfinished:
            admission = scheduler.admit()
            if admission:
                with self.spans("prefill"):
                    self._prefill(admission)
                scheduler.release_spent()
                batch = None
            previous, strategy = strategy, self._choose(scheduler.running)
            strategy, moved = self._make_room(scheduler, strategy)
            if batch is None or moved:
                batch = build_batch(scheduler.running, self.device)
            if strategy != previous:
                self.stats.switches += 1
            self._pass(batch, strategy, started)
            if self._retire(scheduler, record):
                batch = None
            if record and self.on_pass is not None:
                self.on_pass(len(scheduler.running) + len(scheduler.waiting))
        self.stats.preemptions = scheduler.preemptions
        ran = [s for s in sequences if s.num_emitted]
        once = sum(len(prompt) - 1 for prompt in {s.request.prompt_ids for s in ran})
        self.stats.reprefilled_tokens = (
            self.stats.prefilled_tokens - once - self.stats.recomputed_tokens
        )
        self._flag(sequences)
        self.stats.elapsed_s = time.perf_counter() - started
        return [self._response(sequence) for sequence in sequences]

    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """The target's logits after `tokens`, float32 [V]; not while `generate` runs."""
        pages = list(range(pages_for(len(tokens), self.cache.page_size)))
        *context, last = tokens
        self._run_chunks([(context, pages)] if context else [])

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        table = block_table([pages], self.device)
        here = ints(len(context))
        rows = RowBatch(ints(0, 1), here, here, table, None, ints(0))
        logits, _ = self.model.forward(ints(last), rows, self.cache)
        return logits[0, : self.model.spec.vocab_size].clone()

    def _choose(self, running: list[Running]) -> Strategy:
        # A prompt of one token has nothing committed that a drafter could start from.
        started = all(s.context_len > 0 for s in running)

        def usable(arm: Strategy) -> bool:
            if arm == OFF:
                return True
            proposer = self.proposers.get(arm.kind)
            return started and proposer is not None and proposer.usable()

        return self.bandit.choose(len(running), usable)

    def _make_room(self, scheduler: Scheduler, strategy: Strategy) -> tuple[Strategy, bool]:
        """Grows every request's pages for the pass; speculation gives way before a request does."""
        held = [(s, len(s.pages)) for s in scheduler.running]
        while True:
            lookahead = strategy.num_verify
            if strategy != OFF:
                drafting = self.proposers[strategy.kind].lookahead(strategy)
                lookahead = max(lookahead, drafting)
            if scheduler.grow(lookahead):
                return strategy, held != [(s, len(s.pages)) for s in scheduler.running]
            if strategy != OFF:
                strategy = OFF
            elif len(scheduler.running) > 1:
                scheduler.preempt_youngest()
            elif not scheduler.evict_prefixes():
                raise UserError(
                    f"engine.num_pages={self.cache.num_pages}: too few for one request;"
                    " raise it or lower sampling.max_new_tokens"
                )

    def _retire(self, scheduler: Scheduler, record: bool) -> bool:
        for sequence in scheduler.running:
            if sequence.finish:
                for proposer in self.proposers.values():
                    proposer.finished(sequence)
                if record and self.on_finish is not None:
                    self.on_finish(sequence)
        return bool(scheduler.retire())

    def _flag(self, sequences: list[Running]) -> None:
        """Counts and reports responses that met what should not be; a bad draft costs nothing."""
        flagged = [s.status & ~HARMLESS for s in sequences if s.status & ~HARMLESS]
        self.stats.flagged = len(flagged)
        if flagged:
            bits = functools.reduce(operator.or_, flagged)
            seen = ", ".join(bit.name for bit in tlt_ext.Status if bit & bits)
            warnings.warn(
                f"{len(flagged)} of {len(sequences)} responses are flagged ({seen}): the target's"
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

    # ---- a pass ---------------------------------------------------------------------------------

    def _pass(self, batch: Batch, strategy: Strategy, started: float) -> None:
        begin = time.perf_counter()
        if strategy == OFF:
            tree = roots(batch.last_tokens(), batch.context_len.clone())
        else:
            with self.spans("draft", active=len(batch), strategy=str(strategy)):
                tree = self.proposers[strategy.kind].propose(batch, strategy)
        with self.spans("verify", active=len(batch), strategy=str(strategy)):
            emitted = self._verify(batch, tree)
        self._account(batch, strategy, tree, emitted)
        now = time.perf_counter()
        self.bandit.record(sum(emitted), now - begin)
        self.stats.trace.append((begin - started, len(batch), str(strategy)))

    def _verify(self, batch: Batch, tree: Tree) -> list[int]:
        """Runs the target on the tree, emits and commits; tokens emitted by each request."""
        size, device = len(batch), self.device
        rows = RowBatch(
            tree.row_start,
            batch.context_len,
            tree.position,
            batch.block_table,
            tree.ancestors,
            batch.status,
        )
        record = self.cache.features is not None
        logits, features = self.model.forward(tree.tokens, rows, self.cache, want_features=record)
        emitted, path = torch.zeros(2, size, MAX_EMITTED, dtype=torch.int32, device=device).unbind()
        logprobs = torch.zeros(size, MAX_EMITTED, device=device)
        num_emitted, finish = torch.zeros(2, size, dtype=torch.int32, device=device).unbind()
        tlt_ext.verify_tree(
            logits,
            tree.tokens,
            tree.parents,
            tree.position,
            tree.row_start,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.request,
            batch.stop_ids,
            batch.limits(),
            emitted,
            logprobs,
            num_emitted,
            path,
            finish,
            batch.status,
            seed=self.seed,
            vocab_size=self.model.spec.vocab_size,
            workspace=self.model.workspace.for_sampling(logits, self.model.spec.vocab_size),
        )
        self._commit(
            batch.context_len,
            batch.block_table,
            batch.status,
            tree.row_start,
            path,
            num_emitted,
            features,
        )
        counts = num_emitted.tolist()
        for sequence, count, tokens, logps, end, status in zip(
            batch.sequences,
            counts,
            emitted.tolist(),
            logprobs.tolist(),
            finish.tolist(),
            batch.status.tolist(),
            strict=True,
        ):
            sequence.status |= status
            if count == 0:  # only a damaged page table or length does this; a loop would not end
                raise RuntimeError(
                    f"request {sequence.request.id} emitted nothing in a pass:"
                    f" {tlt_ext.Status(status)!r}"
                )
            sequence.tokens += tokens[:count]
            sequence.logprobs += logps[:count]
            sequence.context_len += count
            sequence.finish = (None, "stop", "length")[end]
        return counts

    def _commit(
        self,
        context_len: Tensor,
        table: Tensor,
        status: Tensor,
        row_start: Tensor,
        path: Tensor,
        count: Tensor,
        features: Tensor | None,
    ) -> None:
        tlt_ext.commit_path(
            self.cache.k,
            self.cache.v,
            self.cache.features,
            features,
            row_start,
            path,
            count,
            context_len,
            table,
            status,
        )

    def _account(self, batch: Batch, strategy: Strategy, tree: Tree, emitted: list[int]) -> None:
        stats, size, total = self.stats, len(batch), sum(emitted)
        stats.target_passes += 1
        stats.emitted += total
        if strategy == OFF:
            return
        stats.spec_passes += 1
        stats.spec_request_passes += size
        stats.spec_emitted += total
        stats.drafted += tree.num_rows - size
        stats.accepted += total - size
        version = self.proposers[strategy.kind].version
        if version:
            for sequence in batch.sequences:
                if sequence.drafter_versions[-1:] != [version]:
                    sequence.drafter_versions.append(version)

    # ---- prefill --------------------------------------------------------------------------------

    def _prefill(self, admission: Admission) -> None:
        """Computes new prefixes and preempted requests in chunks, then copies partial pages."""
        jobs = [(list(prompt[:-1]), prefix.pages) for prompt, prefix in admission.prefixes]
        for sequence in admission.recompute:
            jobs.append((sequence.tokens[:-1], sequence.pages))
            sequence.context_len = len(sequence.tokens) - 1
            self.stats.recomputed_tokens += sequence.context_len
        self._run_chunks([job for job in jobs if job[0]])
        if admission.copies:
            source, destination = (
                torch.tensor(admission.copies, dtype=torch.int32, device=self.device)
                .t()
                .contiguous()
            )
            for pages in self.cache.paged_tensors():
                tlt_ext.copy_pages(pages, source, destination)

    def _run_chunks(self, jobs: list[tuple[list[int], list[int]]]) -> None:
        """Commits the KV and features of (token ids, pages) jobs, a few chunks to a pass."""
        chunk = self.config.prefill_chunk
        done = [0] * len(jobs)
        while pending := [j for j, (ids, _) in enumerate(jobs) if done[j] < len(ids)]:
            take, budget = {}, chunk
            for job in pending:
                take[job] = min(budget, MAX_ROWS, len(jobs[job][0]) - done[job])
                budget -= take[job]
                if budget == 0:
                    break
            self._chunk(jobs, done, take)
            for job, count in take.items():
                done[job] += count

    def _chunk(
        self, jobs: list[tuple[list[int], list[int]]], done: list[int], take: dict[int, int]
    ) -> None:
        device = self.device
        counts = list(take.values())

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.stats.prefilled_tokens += sum(counts)
        ids = [i for j, n in take.items() for i in jobs[j][0][done[j] : done[j] + n]]
        position = [p for j, n in take.items() for p in range(done[j], done[j] + n)]
        count = ints(counts)
        row_start = torch.cat([ints([0]), count.cumsum(0).to(torch.int32)])
        context_len = ints([done[j] for j in take])
        table = block_table([jobs[j][1] for j in take], device)
        status = torch.zeros_like(count)
        rows = RowBatch(row_start, context_len, ints(position), table, None, status)
        record = self.cache.features is not None
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        _, features = self.model.forward(
            ints(ids), rows, self.cache, logits_rows=nothing, want_features=record
        )
        path = torch.arange(max(counts), dtype=torch.int32, device=device)
        self._commit(
            context_len, table, status, row_start, path.repeat(len(counts), 1), count, features
        )
