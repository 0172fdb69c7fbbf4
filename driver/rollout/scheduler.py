"""The scheduler: which requests run, which pages they hold, and which one is preempted."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..common.errors import UserError
from ..config.strategy import OFF, Strategy
from .pages import Admission, Job, PagePool, PrefixCache, pages_for
from .request import Emitted, Request, RunningRequest

FREE_SHARE = 1 / 8  # of the running requests that finish before waiting ones are admitted


@dataclass(eq=False)
class Scheduler:
    """Continuous batching: requests wait, run, and may pause while a tool answers a turn."""

    pool: PagePool
    page_size: int
    max_batch: int  # largest number of running requests
    max_len: int  # largest number of tokens of a request, prompt included
    spec_max_batch: int = 0  # largest batch that may speculate
    # Called with each finished request before its pages are freed, which `release` does.
    on_release: Callable[[RunningRequest], None] = lambda state: None

    def __post_init__(self) -> None:
        self.waiting: deque[RunningRequest] = deque()
        self.running: list[RunningRequest] = []
        # Finished turns that a tool may continue; they hold pages while there are enough.
        self.paused: list[RunningRequest] = []
        self.preemptions = self.num_finished = 0
        self.prompt_tokens = 0  # of each prompt once, to be prefilled
        self._prompts: set[int] = set()  # hashes of those counted
        self.statuses: list[int] = []  # status words of finished requests that are not 0
        self._finished: list[RunningRequest] = []  # hold pages until `release`
        self.prefixes = PrefixCache(self.pool, self.page_size)

    @property
    def active(self) -> int:
        return len(self.running) + len(self.waiting) + len(self.paused)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def least_emitted(self) -> int:
        """Tokens of the shortest response for which `on_release` has not been called."""
        states = (*self.running, *self.waiting, *self.paused, *self._finished)
        return min((state.num_emitted for state in states), default=0)

    @property
    def lacks_pages(self) -> bool:
        """Whether requests wait for pages, not for a place in the batch."""
        return bool(self.waiting) and len(self.running) < self.max_batch

    def add(self, requests: Iterable[Request]) -> list[RunningRequest]:
        """Queues requests; returns their states, some finished. UserError: one can never run."""
        added = []
        for request in requests:
            request.check(self.max_len, self.page_size, self.pool.num_pages)
            state = RunningRequest.begin(request)
            if not state.finish:
                self.waiting.append(state)
                self._expect(state)
            added.append(state)
        return added

    def _expect(self, state: RunningRequest) -> None:
        if state.num_emitted:
            return  # it is computed alone
        prompt = state.request.prompt_ids
        self.prefixes.expect(prompt)
        key = hash(prompt)
        if key not in self._prompts:
            self._prompts.add(key)
            self.prompt_tokens += len(prompt) - 1

    # ---- admission ------------------------------------------------------------------------------

    def admit(self) -> Admission:
        """Moves waiting requests into the batch while places and pages last.

        Besides what a request needs at once, a page for each running request stays free, so that no
        request is admitted only to be preempted in the same pass. Returns what to compute for them;
        call `prefixes.release_unused` afterwards.
        """
        admission = Admission()
        self._admit_while_room(admission)
        if self._finished and self.lacks_pages:
            self.release()
            self._admit_while_room(admission)
        return admission

    def _admit_while_room(self, admission: Admission) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            while not (admitted := self._admit_first(admission)):
                if self.running or not (self.prefixes.evict() or self._reclaim()):
                    break
            if not admitted:
                break
            self.running.append(self.waiting.popleft())

    def _admit_first(self, admission: Admission) -> bool:
        state = self.waiting[0]
        spare = len(self.running) + 1 if self.running else 0
        if state.num_emitted:  # a continued request still has the pages of its earlier turns
            count = max(0, pages_for(len(state.tokens), self.page_size) - len(state.pages))
            if self.pool.num_free < count + spare:
                return False
            state.pages += self.pool.allocate(count) or []
            begin, state.context_len = state.context_len, len(state.tokens) - 1
            admission.recompute.append(Job(state.tokens[begin:-1], state.pages, begin))
            return True
        pages = self.prefixes.take(state.request.prompt_ids, spare, admission)
        if pages is None:
            return False
        state.pages, state.context_len = pages, len(state.tokens) - 1
        return True

    # ---- pages of running requests --------------------------------------------------------------

    def has_room(self, lookahead: int) -> bool:
        """Whether all running requests can have `lookahead` slots past their committed ones."""
        if len(self.running) * pages_for(lookahead, self.page_size) <= self.pool.num_free:
            return True  # each has pages for its committed ones
        needed = sum(pages_for(s.context_len + lookahead, self.page_size) for s in self.running)
        return needed - sum(len(s.pages) for s in self.running) <= self.pool.num_free

    def grant(self, lookahead: int, burst: int) -> bool:
        """Grants pages for two bursts, or else for one; False if there are not enough.

        The second burst may start before the host has read the first one. While requests wait for
        pages, at most a page per request is granted. A pass may write `lookahead` slots past the
        committed ones; a request may commit `burst` tokens in a burst.
        """
        for ahead in (2 * burst, burst):
            if self.lacks_pages:
                ahead = min(ahead, self.page_size)
            if self._grow(lookahead, ahead):
                return True
        return False

    def reserve(self, lookahead: int, burst: int) -> list[RunningRequest]:
        """Grants pages for the next burst, at least for its first pass; preempts if it must.

        Returns the preempted requests, the youngest first. They are recomputed later, to the same
        tokens. Raises UserError if there are not enough pages for one request.
        """
        preempted: list[RunningRequest] = []
        if self.grant(lookahead, burst) or self._grow(lookahead):
            return preempted
        self.release()
        self._trim(lookahead)
        while not self._grow(lookahead):
            if self._reclaim():
                continue
            if len(self.running) > 1:
                preempted.append(self._preempt())
            elif not self.prefixes.evict():
                raise UserError(
                    f"engine.num_pages={self.pool.num_pages}: too few for one request; raise it"
                    " or lower sampling.max_new_tokens"
                )
        return preempted

    def _grow(self, lookahead: int, ahead: int = 0) -> bool:
        """Gives every running request pages for `lookahead` slots and `ahead` tokens, or none."""
        short = []  # few of hundreds of requests lack a page
        for state in self.running:
            free = len(state.pages) * self.page_size - state.context_len
            if free >= lookahead + ahead:
                continue
            lacking = lookahead + min(ahead, state.remaining) - free
            if lacking > 0:
                short.append((state, pages_for(lacking, self.page_size)))
        pages = self.pool.allocate(sum(count for _, count in short))
        if pages is None:
            return False
        for state, count in short:
            state.pages += [pages.pop() for _ in range(count)]
        return True

    def _trim(self, lookahead: int) -> None:
        """Frees pages past `lookahead` slots; the device must not be running."""
        for state in self.running:
            kept = pages_for(state.context_len + lookahead, self.page_size)
            self.pool.release(state.pages[kept:])
            del state.pages[kept:]

    def _preempt(self) -> RunningRequest:
        state = self.running.pop()
        self._reset(state)
        self._expect(state)
        self.waiting.appendleft(state)
        self.preemptions += 1
        return state

    def _reclaim(self) -> bool:
        """Frees the pages of the last request that holds some outside of the batch, if any does."""
        outside = (*reversed(self.paused), *reversed(self.waiting))
        state = next((s for s in outside if s.pages), None)
        if state is not None:
            self._reset(state)
        return state is not None

    def drop_kv(self) -> list[RunningRequest]:
        """Preempts and returns all requests, before pages are lost; no device work may run."""
        self.release()
        preempted = [self._preempt() for _ in range(len(self.running))]
        while self._reclaim() or self.prefixes.evict():
            pass
        return preempted

    def _free(self, state: RunningRequest) -> None:
        self.pool.release(state.pages)
        state.pages = []

    def _reset(self, state: RunningRequest) -> None:
        self._free(state)
        state.context_len = state.draft_len = 0

    # ---- results --------------------------------------------------------------------------------

    def burst_ends(self, spare: int) -> int:
        """Finished requests that end a burst, since the host then has something to decide.

        That is the case if a smaller graph can take over, if waiting requests can be admitted, or
        if the batch may speculate from then on.
        """
        count = len(self.running)
        if self.waiting:
            spare = min(spare, max(1, int(count * FREE_SHARE)))
        over = count - self.spec_max_batch
        return min(spare, over) if over > 0 else spare

    def record(
        self,
        states: Sequence[RunningRequest],
        rows: Iterable[Emitted],
        strategy: Strategy,
        version: int,
    ) -> None:
        """Adds what a burst emitted; RuntimeError for an empty pass, which would never end."""
        speculative = strategy != OFF
        for state, row in zip(states, rows, strict=True):
            if not state.finish:  # else in an earlier burst
                state.append(row, speculative, version)

    def set_draft_lens(
        self, states: Sequence[RunningRequest], lengths: Sequence[int], version: int
    ) -> None:
        """Notes how many entries the drafter of a version has written for each request."""
        for state, length in zip(states, lengths, strict=True):
            state.draft_len, state.draft_version = length, version

    def retire(
        self, goes_on: Callable[[RunningRequest], bool] = lambda state: False
    ) -> list[RunningRequest]:
        """Takes finished requests out of the batch and returns them; pauses those that go on."""
        done = [s for s in self.running if s.finish]
        self.running = [s for s in self.running if not s.finish]
        for state in done:
            if goes_on(state):
                self.paused.append(state)
            else:
                self._finish(state)
        return done

    def resume(self, state: RunningRequest, answer: Sequence[int]) -> None:
        """Continues a paused request with the answer of a tool, if there is room for a turn."""
        self.paused.remove(state)
        state.answer(answer)
        if state.finish:
            self._finish(state)
        else:
            self.waiting.appendleft(state)
            self._expect(state)

    def end(self, state: RunningRequest) -> None:
        self.paused.remove(state)
        self._finish(state)

    def remove(self, state: RunningRequest) -> None:
        """Takes an unfinished request out for good; no device work may run."""
        if state in self.running:
            self.running.remove(state)
        elif state in self.paused:
            self.paused.remove(state)
        else:
            self.waiting.remove(state)
            if not state.num_emitted:
                self.prefixes.withdraw(state.request.prompt_ids)
                self.prefixes.release_unused()
        self._reset(state)

    def _finish(self, state: RunningRequest) -> None:
        self.num_finished += 1
        if state.status:
            self.statuses.append(state.status)
        self._finished.append(state)

    def release(self) -> None:
        for state in self._finished:
            self.on_release(state)
            self._free(state)
        self._finished.clear()
