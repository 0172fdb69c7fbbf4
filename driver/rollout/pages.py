"""Pages of the KV cache: which are free, and which a prompt shares."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

Prompt = tuple[int, ...]


class Job(NamedTuple):
    """Tokens to commit from a position on; the pages begin at position 0."""

    tokens: list[int]
    pages: list[int]
    begin: int = 0


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


class PagePool:
    """Allocates page ids from 0 on; a shared page is freed by its last holder."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._untouched = iter(range(num_pages))
        self._freed: list[int] = []
        self.num_free = num_pages
        self._holders = [0] * num_pages

    def allocate(self, count: int) -> list[int] | None:
        """Allocates `count` pages, or none if fewer are free."""
        if count > self.num_free:
            return None
        self.num_free -= count
        kept = max(0, len(self._freed) - count)
        pages = self._freed[kept:][::-1]
        del self._freed[kept:]
        pages += islice(self._untouched, count - len(pages))
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to each page."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free: it cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from each page; a page without holders is free."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._freed.append(page)
                self.num_free += 1


@dataclass
class Admission:
    """What to compute for admitted requests, in this order."""

    prefixes: list[Job] = field(default_factory=list)
    recompute: list[Job] = field(default_factory=list)  # requests that had emitted tokens
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from page, to page)

    def __bool__(self) -> bool:
        return bool(self.prefixes or self.recompute or self.copies)


@dataclass(eq=False)
class _Prefix:
    pages: list[int] = field(default_factory=list)
    waiting: int = 0  # requests with this prompt that have no pages yet
    ready: bool = False


class PrefixCache:
    """The committed part of each prompt, computed once for all requests that start with it.

    Whole pages are shared; the partial last page is copied for each request.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool, self.page_size = pool, page_size
        self._prefixes: defaultdict[Prompt, _Prefix] = defaultdict(_Prefix)
        self._unused: list[_Prefix] = []

    def expect(self, prompt: Prompt) -> None:
        """Counts a waiting request with this prompt."""
        self._prefixes[prompt].waiting += 1

    def withdraw(self, prompt: Prompt) -> None:
        """Counts one waiting request less with this prompt."""
        prefix = self._prefixes[prompt]
        prefix.waiting -= 1
        if prefix.waiting == 0:
            self._unused.append(self._prefixes.pop(prompt))

    def take(self, prompt: Prompt, spare: int, admission: Admission) -> list[int] | None:
        """Pages for a prompt, which `admission` fills; None unless `spare` pages stay free."""
        prefix, length = self._prefixes[prompt], len(prompt) - 1
        count = 0 if prefix.ready else pages_for(length, self.page_size)
        if self.pool.num_free < count + 1 + spare:
            return None
        if not prefix.ready:
            prefix.pages, prefix.ready = self.pool.allocate(count) or [], True
            admission.prefixes.append(Job(list(prompt[:-1]), prefix.pages))
        whole, rest = divmod(length, self.page_size)
        own = self.pool.allocate(1) or []
        self.pool.share(prefix.pages[:whole])
        if rest:
            admission.copies.append((prefix.pages[whole], own[0]))
        self.withdraw(prompt)
        return prefix.pages[:whole] + own

    def release_unused(self) -> None:
        """Frees prefixes that no request waits for; call once their pages have been copied."""
        for prefix in self._unused:
            self.pool.release(prefix.pages)
        self._unused = []

    def evict(self) -> bool:
        """Frees computed prefixes that only waiting requests use; False if there were none."""
        ready = [prefix for prefix in self._prefixes.values() if prefix.ready]
        for prefix in ready:
            self.pool.release(prefix.pages)
            prefix.pages, prefix.ready = [], False
        return bool(ready)
