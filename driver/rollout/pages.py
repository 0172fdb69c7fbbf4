"""The pool of KV pages: who holds which, and how many are free."""

from __future__ import annotations

from collections.abc import Sequence


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold `tokens` slots."""
    return -(-tokens // page_size)


class PagePool:
    """Hands out page ids and counts their holders; a page shared by a group is freed by the last.

    Args:
        num_pages: pages in the pool, ids 0 to num_pages - 1.

    Example:
        >>> pool = PagePool(4)
        >>> pages = pool.allocate(3)
        >>> pool.num_free
        1
        >>> pool.release(pages); pool.num_free
        4
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages, or none at all where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
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
        """Takes a holder from each page; a page without holders is free again."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
