"""Runs of pages and who holds how much of each: the structure below `prefix_index`.

A run is a stretch of consecutive pages; every holder has the first so many pages of each run that it is in. Runs are split where holders or
continuations part, and merged when they fall together again. Invariants: a page is in at most one run; the longest holding of a run is the
whole run; parents form no cycle; the counters equal the sums over the runs. Holders are small numbers; time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

__all__ = ["PAGE_BYTES", "Run", "RunForest", "common"]

# Bytes of memory, measured on CPython 3.11 (a test compares).
PAGE_BYTES = 130
RUN_BYTES = 700
HOLDING_BYTES = 150


class Run:
    """Consecutive pages; `held[h]` is how many of them, from the first on, holder h has."""

    __slots__ = ("children", "held", "pages", "parent")

    def __init__(self, pages: list[int], parent: Run | None) -> None:
        self.pages = pages
        self.parent = parent
        self.children: set[Run] = set()
        self.held: dict[int, int] = {}

    def path(self) -> Iterator[Run]:
        """This run and those before it."""
        run: Run | None = self
        while run is not None:
            yield run
            run = run.parent


class RunForest:
    """All runs, of all holders."""

    def __init__(self) -> None:
        self.at: dict[int, Run] = {}  # the run of each page
        self.used: list[OrderedDict[Run, float]] = []  # of each holder: when it last used a run, longest ago first
        self.held: list[int] = []  # of each holder: pages
        self._runs = 0
        self._holdings = 0

    @property
    def size(self) -> int:
        """Estimated bytes of memory."""
        return len(self.at) * PAGE_BYTES + self._runs * RUN_BYTES + self._holdings * HOLDING_BYTES

    def add_holders(self, count: int) -> int:
        """Room for so many holders more; the number of the first."""
        self.used += [OrderedDict() for _ in range(count)]
        self.held += [0] * count
        return len(self.held) - count

    def append(self, holder: int, last: Run | None, pages: list[int]) -> Run:
        """Unknown pages behind `last`: a leaf that only this holder has, and whole, grows in place. Returns the run that ends with them."""
        if last is not None and not last.children and last.held == {holder: len(last.pages)}:
            last.pages += pages
            run = last
        else:
            run = Run(pages, None)
            self._runs += 1
            self.adopt(run, last)
        for page in pages:
            self.at[page] = run
        self.keep(run, holder, len(run.pages))
        return run

    def adopt(self, run: Run, parent: Run | None) -> None:
        """A run without a parent turns out to follow `parent`; nothing is done if that would close a circle."""
        if parent is None or run.parent is not None or any(each is run for each in parent.path()):
            return
        run.parent = parent
        parent.children.add(run)

    def keep(self, run: Run, holder: int, count: int) -> None:
        """The holder has the first `count` pages of the run from now on. Whoever lowers a count calls `tidy` after."""
        before = run.held.get(holder, 0)
        self.held[holder] += count - before
        if count == 0:
            del run.held[holder], self.used[holder][run]
            self._holdings -= 1
            return
        run.held[holder] = count
        if before == 0:
            self.used[holder][run] = 0.0
            self._holdings += 1

    def touch(self, holder: int, run: Run, now: float) -> None:
        """The path to `run` is used; deepest first, so that of one path the tail is always the least recently used."""
        used = self.used[holder]
        for each in run.path():
            if holder in each.held:
                used[each] = now
                used.move_to_end(each)

    def split(self, run: Run, at: int) -> Run:
        """Cut before page `at`; the upper part is a new run and is returned, the lower stays the object it was."""
        upper = Run(run.pages[:at], run.parent)
        self._runs += 1
        del run.pages[:at]
        if upper.parent is not None:
            upper.parent.children.remove(run)
            upper.parent.children.add(upper)
        run.parent = upper
        upper.children.add(run)
        for page in upper.pages:
            self.at[page] = upper
        for holder, count in list(run.held.items()):
            upper.held[holder] = min(count, at)
            self._holdings += 1
            self.used[holder][upper] = self.used[holder][run]
            if count > at:
                run.held[holder] = count - at
            else:
                del run.held[holder], self.used[holder][run]
                self._holdings -= 1
        return upper

    def tidy(self, run: Run) -> None:
        """Forget pages that nobody has, and merge what need not be apart any more."""
        longest = max(run.held.values(), default=0)
        if longest < len(run.pages):
            for page in run.pages[longest:]:
                del self.at[page]
            del run.pages[longest:]
            for child in run.children:
                child.parent = None
            run.children.clear()
        parent = run.parent
        if longest:
            self.merge(run)
        else:
            self._runs -= 1
            run.parent = None
            if parent is not None:
                parent.children.remove(run)
        if parent is not None:
            self.merge(parent)

    def merge(self, run: Run) -> None:
        """Join `run` with its only child if all holders of either have the whole of `run` and some of the child."""
        if len(run.children) != 1 or not run.held:
            return
        (child,) = run.children
        if run.held.keys() != child.held.keys() or min(run.held.values()) < len(run.pages):
            return
        # The longer of the two goes on: the other's pages are the ones that must learn a new run.
        into, gone = (run, child) if len(run.pages) >= len(child.pages) else (child, run)
        for page in gone.pages:
            self.at[page] = into
        for holder, count in child.held.items():
            into.held[holder] = count + len(run.pages)
            del self.used[holder][gone]
        self._holdings -= len(child.held)
        self._runs -= 1
        into.pages[:] = run.pages + child.pages
        if into is run:
            run.children = child.children
            for below in run.children:
                below.parent = run
            return
        child.parent = run.parent
        if child.parent is not None:
            child.parent.children.remove(run)
            child.parent.children.add(child)


def common(run: list[int], start: int, pages: list[int], at: int) -> int:
    """How many pages `run` from `start` and `pages` from `at` share. Ids are chained: where one differs, so do all behind it."""
    low, high = 0, min(len(run) - start, len(pages) - at)
    if run[start : start + high] == pages[at : at + high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if run[start + middle - 1] == pages[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
