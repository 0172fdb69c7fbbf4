"""Which requests run, what they hold, and who gives way when pages run out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from ..common.errors import UserError
from .pages import PagePool, pages_for
from .request import Request


@dataclass(eq=False)
class Sequence:
    """State of one request between passes.

    The last token's KV is never committed: it is the root of the next pass. So a fresh request
    commits all of its prompt but the last token, and its first pass samples its first token.
    """

    request: Request
    tokens: list[int]  # prompt and emitted
    logprobs: list[float] = field(default_factory=list)
    drafter_versions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    context_len: int = 0  # committed KV entries of the target
    draft_len: int = 0  # committed KV entries of the drafter
    draft_version: int = 0  # of the drafter that wrote them
    slot: int = -1  # row of the token store while it runs
    finish: str | None = None
    status: int = 0  # what the ops reported of it
    missed: list[int] = field(default_factory=list)  # positions of tokens that no draft held

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        return self.request.params.max_new_tokens - self.num_emitted

    @property
    def num_new(self) -> int:
        """Committed entries that the drafter has yet to write; the last one is always written."""
        return self.context_len - max(0, min(self.draft_len, self.context_len - 1))

    def note_passes(self, counts: list[int], depth: int) -> None:
        """Notes, before its tokens are added, what passes emitted that were drafted `depth` deep.

        A pass ends with the target's own token, which the draft did not hold unless all of it was
        accepted.
        """
        ends = accumulate(counts, initial=len(self.tokens) - 1)
        next(ends)
        self.missed += [end for end, n in zip(ends, counts, strict=True) if n <= depth]

    def served_by(self, version: int) -> None:
        """Notes the version of the drafter that drafted for it; 0 = not a learned one."""
        if version and self.drafter_versions[-1:] != [version]:
            self.drafter_versions.append(version)


@dataclass(eq=False)
class Prefix:
    """The committed part of a prompt, computed once for all requests that start with it."""

    pages: list[int]
    length: int
    waiting: int  # requests not admitted yet that will want it
    ready: bool = False


@dataclass
class Admission:
    """What to compute for the requests just admitted, in this order."""

    recompute: list[Sequence] = field(default_factory=list)  # have emitted before: own tokens again
    prefixes: list[tuple[tuple[int, ...], Prefix]] = field(default_factory=list)  # (prompt, pages)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from page, to page)

    def __bool__(self) -> bool:
        return bool(self.recompute or self.prefixes or self.copies)

    def __add__(self, later: Admission) -> Admission:
        return Admission(
            self.recompute + later.recompute,
            self.prefixes + later.prefixes,
            self.copies + later.copies,
        )


class Scheduler:
    """Continuous batching over a fixed set of requests.

    Args:
        pool: pages of the KV cache.
        page_size: slots of a page.
        max_batch: most requests running at once.
        max_position: most tokens of a request, prompt included.

    Raises:
        UserError: from `add`, a request that can never run.
    """

    def __init__(self, pool: PagePool, page_size: int, max_batch: int, max_position: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_batch = max_batch
        self.max_position = max_position
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.prefixes: dict[tuple[int, ...], Prefix] = {}
        self.adopted: list[Sequence] = []  # begun by another engine, finished here
        self.preemptions = 0
        self._spent: list[Prefix] = []

    def add(self, requests: Iterable[Request]) -> list[Sequence]:
        """Queues requests in order; returns their sequences."""
        added = []
        for request in requests:
            self._check(request)
            sequence = Sequence(request, list(request.prompt_ids))
            if request.params.max_new_tokens == 0:
                sequence.finish = "length"
            else:
                self.waiting.append(sequence)
                self._prefix_of(sequence).waiting += 1
            added.append(sequence)
        return added

    def _check(self, request: Request) -> None:
        length = len(request.prompt_ids)
        total = length + request.params.max_new_tokens
        if length == 0:
            raise UserError(f"request {request.id}: the prompt is empty; it needs one token")
        if length >= self.max_position:
            raise UserError(
                f"prompt of {length} tokens does not fit the context of {self.max_position};"
                " shorten it or use a model with a longer one"
            )
        if total > self.max_position:
            raise UserError(
                f"prompt of {length} tokens and sampling.max_new_tokens="
                f"{request.params.max_new_tokens} exceed the context of {self.max_position};"
                f" at most {self.max_position - length} new tokens fit"
            )
        needed = pages_for(total, self.page_size) + 1  # its copy of a shared partial page
        if needed > self.pool.num_pages:
            raise UserError(
                f"engine.num_pages={self.pool.num_pages}: one request of {total} tokens needs"
                f" {needed} pages of {self.page_size}"
            )

    def _prefix_of(self, sequence: Sequence) -> Prefix:
        prompt = sequence.request.prompt_ids
        if prompt not in self.prefixes:
            self.prefixes[prompt] = Prefix([], len(prompt) - 1, waiting=0)
        return self.prefixes[prompt]

    @property
    def unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def lacks_pages(self) -> bool:
        """Whether it is pages, not places, that requests wait for."""
        return bool(self.waiting) and len(self.running) < self.max_batch

    def admit(self) -> Admission:
        """Moves waiting requests into the batch while slots and pages last.

        Beyond what a request needs at once, a page for each running request must stay free, so
        that nobody is admitted only to be preempted in the same pass.
        """
        admission = Admission()
        while self.waiting and len(self.running) < self.max_batch:
            admitted = self._admit_first(admission)
            if not admitted and not self.running and self.evict_prefixes():
                admitted = self._admit_first(admission)
            if not admitted:
                break
            self.running.append(self.waiting.popleft())
        return admission

    def _admit_first(self, admission: Admission) -> bool:
        sequence = self.waiting[0]
        spare = len(self.running) + 1 if self.running else 0
        if sequence.num_emitted:
            count = pages_for(len(sequence.tokens), self.page_size)
            if self.pool.num_free < count + spare:
                return False
            sequence.pages = self.pool.allocate(count) or []
            admission.recompute.append(sequence)
            return True
        prefix = self._prefix_of(sequence)
        count = 0 if prefix.ready else pages_for(prefix.length, self.page_size)
        if self.pool.num_free < count + 1 + spare:
            return False
        if not prefix.ready:
            prefix.pages = self.pool.allocate(count) or []
            prefix.ready = True
            admission.prefixes.append((sequence.request.prompt_ids, prefix))
        whole, rest = divmod(prefix.length, self.page_size)
        own = self.pool.allocate(1) or []
        self.pool.share(prefix.pages[:whole])
        sequence.pages = prefix.pages[:whole] + own
        sequence.context_len = prefix.length
        if rest:
            admission.copies.append((prefix.pages[whole], own[0]))
        prefix.waiting -= 1
        if prefix.waiting == 0:
            del self.prefixes[sequence.request.prompt_ids]
            self._spent.append(prefix)
        return True

    def release_spent(self) -> None:
        """Frees the pages of prefixes that nobody waits for; call once the copies are made."""
        for prefix in self._spent:
            self.pool.release(prefix.pages)
        self._spent = []

    def evict_prefixes(self) -> bool:
        """Drops computed prefixes that only waiting requests want; False if there were none."""
        ready = [prefix for prefix in self.prefixes.values() if prefix.ready]
        for prefix in ready:
            self.pool.release(prefix.pages)
            prefix.pages, prefix.ready = [], False
        return bool(ready)

    def grow(self, lookahead: int, ahead: int = 0) -> bool:
        """Gives every running request pages for `lookahead` slots past its committed ones.

        All or nothing; what was there stays.

        Args:
            lookahead: slots that the next pass may write.
            ahead: tokens that later passes may commit before the host looks again.
        """
        short = []  # of hundreds of requests few lack a page
        for sequence in self.running:
            free = len(sequence.pages) * self.page_size - sequence.context_len
            if free >= lookahead + ahead:
                continue
            lacking = lookahead + min(ahead, sequence.remaining) - free
            if lacking > 0:
                short.append((sequence, pages_for(lacking, self.page_size)))
        pages = self.pool.allocate(sum(count for _, count in short))
        if pages is None:
            return False
        for sequence, count in short:
            sequence.pages += [pages.pop() for _ in range(count)]
        return True

    def has_room(self, lookahead: int) -> bool:
        """Whether all may have so many slots, pages that were granted ahead taken back."""
        needed = sum(pages_for(s.context_len + lookahead, self.page_size) for s in self.running)
        return needed - sum(len(s.pages) for s in self.running) <= self.pool.num_free

    def take_back(self, lookahead: int) -> None:
        """Frees the pages of running requests past `lookahead` slots; not while passes run."""
        for sequence in self.running:
            kept = pages_for(sequence.context_len + lookahead, self.page_size)
            self.pool.release(sequence.pages[kept:])
            del sequence.pages[kept:]

    def preempt_youngest(self) -> Sequence:
        """Takes the youngest request out of the batch; it is recomputed later, same tokens."""
        sequence = self.running.pop()
        self._vacate(sequence)
        if sequence.num_emitted == 0:
            self._prefix_of(sequence).waiting += 1
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        return sequence

    def _vacate(self, sequence: Sequence) -> None:
        self.release([sequence])
        sequence.context_len = sequence.draft_len = 0

    def hand_over(self) -> list[Sequence]:
        """Takes the running requests out for good: another engine finishes them, same tokens."""
        taken, self.running = self.running, []
        for sequence in taken:
            self._vacate(sequence)
        return taken

    def adopt(self, sequences: Iterable[Sequence]) -> None:
        """Queues requests that another engine handed over, with what they emitted there."""
        for sequence in sequences:
            assert sequence.num_emitted and not sequence.pages
            self.adopted.append(sequence)
            self.waiting.append(sequence)

    def retire(self) -> list[Sequence]:
        """Removes finished requests from the batch; they keep their pages until `release`."""
        done = [s for s in self.running if s.finish]
        if done:
            self.running = [s for s in self.running if not s.finish]
        return done

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Frees the pages of requests that run no more."""
        for sequence in sequences:
            self.pool.release(sequence.pages)
            sequence.pages = []
