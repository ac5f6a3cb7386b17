"""Which worker has which pages of a prompt, for all workers and tiers at once.

Page ids are chained hashes: an id names a page and its whole prefix, so equal ids mean equal prefixes, and namespaces never meet. Exact
under any order of removal: a worker may drop a middle page (radixpd's workers drop tails first, others do not); what is behind the hole
counts no more until the hole is filled. What a worker has not said is not assumed. Invariant: `size` never exceeds the cap; the least
recently used holdings go first, tails before heads. Used by `dispatch` twice: for what workers say they have, for what was sent to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from radixpd.mini_lb.run_forest import PAGE_BYTES, Run, RunForest, common

__all__ = ["DEVICE", "HOST", "PIECE", "Held", "PrefixIndex", "text_keys"]

DEVICE, HOST = 0, 1
TIERS = 2
CAP_BYTES = 1 << 28
PIECE = 64  # bytes of a text that one key stands for
MOST_PIECES = 8192  # of one text: half a megabyte, some 130,000 tokens; more would hold up the loop and push everybody else out

Held = tuple[int, int]  # leading pages in the device tier, then further ones for which the host tier is needed


def text_keys(prompt: bytes, namespace: bytes, size: int = PIECE) -> list[int]:
    """Chained keys of the first full pieces of a text, in place of page ids where nobody tokenizes. They hold within this process only."""
    key, keys = hash(namespace), []
    for at in range(0, min(len(prompt), MOST_PIECES * size) - size + 1, size):
        key = hash((key, prompt[at : at + size]))
        keys.append(key)
    return keys


class PrefixIndex:
    """Pages of many workers; `store`, `remove` and `clear` mirror the events of their caches. A worker's holders are its number + tier."""

    def __init__(self, cap_bytes: int = CAP_BYTES) -> None:
        self._cap = cap_bytes
        self._forest = RunForest()
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._spare: list[int] = []  # numbers of workers that are gone
        self.cut = 0  # pages that the cap has cost

    @property
    def size(self) -> int:
        """Estimated bytes of memory."""
        return self._forest.size

    @property
    def pages(self) -> int:
        """Distinct pages."""
        return len(self._forest.at)

    def held(self, worker: str, tier: int = DEVICE) -> int:
        """Pages of a worker's tier."""
        number = self._numbers.get(worker)
        return 0 if number is None else self._forest.held[number + tier]

    def oldest(self, worker: str) -> float | None:
        """When the worker's least recently used device pages were last used; None without any."""
        number = self._numbers.get(worker)
        used = self._forest.used[number + DEVICE] if number is not None else None
        return next(iter(used.values())) if used else None

    def match(self, pages: Sequence[int]) -> dict[str, Held]:
        """The longest prefix of `pages` at each worker that has any of it."""
        pages = list(pages)
        whole: dict[int, int] = {}  # workers that have all so far: of it, the leading pages in the device tier
        ended: dict[int, Held] = {}
        at = 0
        while at < len(pages) and (at == 0 or whole):
            run = self._forest.at.get(pages[at])
            # Within a run nobody has a page without those before it: to enter in the middle is to enter behind a hole.
            if run is None or run.pages[0] != pages[at]:
                break
            length = common(run.pages, 0, pages, at)
            cover: dict[int, Held] = {}
            for holder, count in run.held.items():
                worker, tier = holder - holder % TIERS, holder % TIERS
                own, best = cover.get(worker, (0, 0))
                count = min(count, length)
                cover[worker] = (count if tier == DEVICE else own, max(best, count))
            for worker in list(whole) if at else cover:
                own, best = cover.get(worker, (0, 0))
                device = whole.get(worker, 0)
                device += own if device == at else 0
                if best == length:
                    whole[worker] = device
                else:
                    whole.pop(worker, None)
                    ended[worker] = (device, at + best - device)
            at += length
        ended |= {worker: (device, at - device) for worker, device in whole.items()}
        return {self._names[worker]: held for worker, held in ended.items()}

    def store(self, worker: str, pages: Sequence[int], now: float, *, parent: int | None = None, tier: int = DEVICE) -> None:
        """`pages`, consecutive and behind `parent` (None or unknown: behind nothing that is known), are now in the worker's tier."""
        holder = self._number(worker) + tier
        pages = list(dict.fromkeys(pages))  # no page follows itself; a worker that says so must not break the rest
        last = self._behind(parent, pages)
        at = 0
        while at < len(pages):
            run = self._forest.at.get(pages[at])
            if run is None:
                end = next((i for i in range(at + 1, len(pages)) if pages[i] in self._forest.at), len(pages))
                last, at = self._forest.append(holder, last, pages[at:end]), end
            else:
                last, at = self._join(holder, run, last, pages, at)
        if last is not None:
            self._forest.touch(holder, last, now)
            for run in list(last.path())[1:]:
                self._forest.merge(run)
        self._shrink()

    def remove(self, worker: str, pages: Iterable[int], *, tier: int = DEVICE, before: float = math.inf) -> None:
        """Pages, in any order, are no longer in the worker's tier; those that it has used since `before` stay."""
        number = self._numbers.get(worker)
        if number is None:
            return
        holder = number + tier
        for page in self._tail_first(list(pages)):
            run = self._forest.at.get(page)
            count = run.held.get(holder, 0) if run is not None else 0
            if run is None or count == 0 or self._forest.used[holder][run] >= before:
                continue
            at = count - 1 if run.pages[count - 1] == page else run.pages.index(page)
            if at >= count:
                continue
            if at < count - 1:
                run = self._forest.split(run, at + 1)
            self._forest.keep(run, holder, at)
            self._forest.tidy(run)

    def clear(self, worker: str) -> None:
        """The worker has nothing any more: it flushed its cache, or restarted."""
        for tier in range(TIERS):
            self.expire(worker, float("inf"), tier=tier)

    def forget(self, worker: str) -> None:
        """`clear`, and the worker itself is gone."""
        self.clear(worker)
        number = self._numbers.pop(worker, None)
        if number is not None:
            del self._names[number]
            self._spare.append(number)

    def touch(self, worker: str, pages: Sequence[int], now: float) -> None:
        """The worker is about to use what it has of this prefix."""
        number = self._numbers.get(worker)
        if number is None:
            return
        pages, at, last = list(pages), 0, None
        while at < len(pages) and (run := self._forest.at.get(pages[at])) is not None:
            last = run
            at += common(run.pages, 0, pages, at) or 1
        if last is not None:
            for tier in range(TIERS):
                self._forest.touch(number + tier, last, now)

    def expire(self, worker: str, before: float, *, tier: int = DEVICE) -> int:
        """Drop what the worker has not used since `before`; how many pages that were."""
        number = self._numbers.get(worker)
        if number is None:
            return 0
        holder, dropped = number + tier, 0
        while used := self._forest.used[holder]:
            run, when = next(iter(used.items()))
            if when >= before:
                break
            dropped += run.held[holder]
            self._forest.keep(run, holder, 0)
            self._forest.tidy(run)
        return dropped

    def trim(self, worker: str, pages: int, *, tier: int = DEVICE) -> int:
        """Drop the least recently used until the worker has no more than so many pages; how many were dropped."""
        number = self._numbers.get(worker)
        dropped = 0
        while number is not None and (excess := self._forest.held[number + tier] - pages) > 0:
            run = next(iter(self._forest.used[number + tier]))
            kept = max(0, run.held[number + tier] - excess)
            dropped += run.held[number + tier] - kept
            self._forest.keep(run, number + tier, kept)
            self._forest.tidy(run)
        return dropped

    def dump(self, worker: str) -> list[tuple[int, int | None, list[int]]]:
        """All that the worker has, as (tier, parent page, pages), parents first: `store` of each builds it again, for a late joiner."""
        number = self._numbers.get(worker)
        if number is None:
            return []
        out: list[tuple[int, int | None, list[int]]] = []
        for tier in range(TIERS):
            runs = sorted(self._forest.used[number + tier], key=lambda run: sum(1 for _ in run.path()))
            out += [(tier, run.parent.pages[-1] if run.parent else None, run.pages[: run.held[number + tier]]) for run in runs]
        return out

    def _number(self, worker: str) -> int:
        number = self._numbers.get(worker)
        if number is None:
            number = self._spare.pop() if self._spare else self._forest.add_holders(TIERS)
            self._numbers[worker], self._names[number] = number, worker
        return number

    def _tail_first(self, pages: list[int]) -> list[int]:
        """Pages that go, in the order that is quick where they are a stretch of one run: a page with others behind it splits its run."""
        run = self._forest.at.get(pages[0]) if len(pages) > 1 else None
        if run is None or self._forest.at.get(pages[-1]) is not run or run.pages.index(pages[0]) > run.pages.index(pages[-1]):
            return pages
        return pages[::-1]

    def _behind(self, parent: int | None, pages: list[int]) -> Run | None:
        """The run that ends with `parent`, split if it does not; None if `pages` goes on inside it, or nothing is known."""
        run = self._forest.at.get(parent) if parent is not None else None
        if run is None or parent is None or not pages:
            return None
        if run.pages[-1] == parent:
            return run
        at = run.pages.index(parent) + 1
        return None if run.pages[at] == pages[0] else self._forest.split(run, at)

    def _join(self, holder: int, run: Run, last: Run | None, pages: list[int], at: int) -> tuple[Run, int]:
        """The holder gets the part of `run` that `pages` goes along: (the run that ends with it, pages covered)."""
        start = 0 if run.pages[0] == pages[at] else run.pages.index(pages[at])
        if start == 0:
            self._forest.adopt(run, last)
        length = common(run.pages, start, pages, at)
        if start > run.held.get(holder, 0):  # the holder lacks pages before these
            self._forest.split(run, start)
            start = 0
        at += length
        end = start + length
        if end > run.held.get(holder, 0):
            self._forest.keep(run, holder, end)
        if at < len(pages) and end < len(run.pages):
            run = self._forest.split(run, end)
        return run, at

    def _shrink(self) -> None:
        """Forget what was used longest ago, until the size keeps the cap."""
        forest = self._forest
        while forest.size > self._cap and forest.at:
            _, holder = min((next(iter(used.values())), holder) for holder, used in enumerate(forest.used) if used)
            run = next(iter(forest.used[holder]))
            excess = -(-(forest.size - self._cap) // PAGE_BYTES)
            keep = max(0, run.held[holder] - excess) if len(run.held) == 1 else 0
            self.cut += run.held[holder] - keep
            forest.keep(run, holder, keep)
            forest.tidy(run)
