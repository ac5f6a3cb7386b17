"""The free pages of the pool. Every page not in here is owned by the radix tree or by one request.

A stack of page ids: pages freed last are handed out first (they are warm). Freeing a page twice, or one that was never handed out,
is a bug and trips an assertion at once, at the place that did it.
"""

from __future__ import annotations

import numpy as np

__all__ = ["PageAllocator"]


class PageAllocator:
    """Hands out page ids 0 .. pages - 1."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._stack = np.arange(pages - 1, -1, -1, dtype=np.int32)
        self._top = pages
        self._is_free = np.ones(pages, dtype=np.bool_)

    @property
    def free_pages(self) -> int:
        """How many pages are free."""
        return self._top

    def free_map(self) -> np.ndarray:
        """Whether each page is free, bool `[pages]`; a view, to be read at once."""
        return self._is_free

    def allocate(self, count: int) -> np.ndarray:
        """`count` page ids, int32 `[count]`; the caller has checked that they are there."""
        assert count <= self._top, f"{count} pages asked, {self._top} free"
        self._top -= count
        pages = self._stack[self._top : self._top + count][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Give pages back."""
        assert not self._is_free[pages].any(), "a page was freed twice"
        assert len(set(pages.tolist())) == len(pages), "a page was freed twice at once"
        self._is_free[pages] = True
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)
