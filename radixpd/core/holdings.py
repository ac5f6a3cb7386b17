"""What running requests hold: slots, pages and locks. The only code that takes them, and the one path that gives them back.

Invariants: a request that holds a slot holds pages for every position planned; its first `shared` pages are the tree's and locked
by it; after `release` it holds nothing, in whatever state it was. Page-table entries that changed are remembered for the next plan
(`changed`). Called by `prefill`, `decode` and `scheduler`.
"""

from __future__ import annotations

import numpy as np

from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.radix_tree import TreeNode
from radixpd.core.request import Request
from radixpd.core.slots import SlotTable

__all__ = ["Holdings"]


class Holdings:
    """Slots and pages of all running requests."""

    def __init__(self, table: SlotTable, cache: PrefixCache) -> None:
        self.table = table
        self.cache = cache
        self.spares: dict[str, list[np.ndarray]] = {}  # by rid: merged pages that a transfer may still read
        self.changed: list[tuple[np.ndarray, np.ndarray]] = []  # (slots, positions) of page-table entries the runner has not seen

    def seat(self, request: Request, node: TreeNode, matched: np.ndarray) -> None:
        """Give slots and all pages of the prompt to a request (and its siblings) whose match `matched` is locked by `node`."""
        table, cache = self.table, self.cache
        table.take(request)
        slot = request.slot
        request.lock = node
        table.add_pages(slot, matched)
        table.shared[slot] = len(matched)
        table.planned[slot] = len(matched) * cache.page_size
        table.add_pages(slot, cache.allocate(cache.pages_for(len(request.tokens)) - len(matched)))
        self._mark(slot, 0)
        for sibling in request.siblings:
            table.take(sibling)
            table.add_pages(sibling.slot, cache.allocate(1))

    def unseat_siblings(self, request: Request) -> tuple[Request, ...]:
        """Take slots and pages of the siblings back: they go on as requests of their own."""
        siblings, request.siblings = request.siblings, ()
        for sibling in siblings:
            sibling.leader = None
            own = self.table.own_pages(sibling.slot)
            self.table.give(sibling)
            self.cache.allocator.free(own)
        return siblings

    def can_fork(self, request: Request) -> bool:
        """Whether nobody else has put pages into the tree that this request is still going to write."""
        planned, size = int(self.table.planned[request.slot]), self.cache.page_size
        _, found = self.cache.peek(request.space, request.data, (len(request.tokens) - 1) // size)
        return found * size <= planned

    def fork(self, request: Request) -> list[tuple[int, int]]:
        """Let each sibling share the prompt's pages but the last: (source, target) copies of that one, for after it is computed.

        The tree gets the shared pages now, before they are computed: whoever matches them is planned later, and steps run in order.
        """
        table, slot = self.table, request.slot
        self.commit(slot, len(request.tokens) - 1)
        assert request.lock is not None
        full = int(table.shared[slot])
        copies = []
        for sibling in request.siblings:
            own = table.own_pages(sibling.slot)
            self.cache.lock(request.lock)
            sibling.lock = request.lock
            sibling.leader = None
            table.page_count[sibling.slot] = 0
            table.add_pages(sibling.slot, table.page_table[slot, :full])
            table.add_pages(sibling.slot, own)
            table.shared[sibling.slot] = full
            table.planned[sibling.slot] = len(request.tokens)
            self._mark(sibling.slot, 0)
            copies += [(int(table.page_table[slot, full]), int(page)) for page in own]
        request.siblings = ()
        return copies

    def commit(self, slot: int, end: int) -> None:
        """Hand the full pages of positions below `end` to the tree; their tokens are known."""
        table, size = self.table, self.cache.page_size
        first, full = int(table.shared[slot]), end // size
        if full <= first:
            return
        request: Request = table.requests[slot]
        assert request.lock is not None
        data = table.tokens[slot, first * size : full * size].tobytes()
        keep = request.read_by_peer
        done = self.cache.commit(request.lock, data, table.page_table[slot, first:full].copy(), request.priority, keep=keep)
        if keep and done.merged:
            self.spares.setdefault(request.rid, []).append(done.spare)
        request.lock = done.node
        table.shared[slot] = full
        if done.merged:
            table.page_table[slot, first:full] = done.page_ids
            self._mark(slot, first, full)

    def grow(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """Append one page to each of the slots."""
        table = self.table
        positions = table.page_count[slots]
        table.page_table[slots, positions] = pages
        table.page_count[slots] = positions + 1
        self.changed.append((slots, positions))

    def release(self, request: Request) -> None:
        """Take back everything that the request and the siblings it carries hold."""
        for each in request.samples:
            own = np.concatenate([self.table.own_pages(each.slot), *self.spares.pop(each.rid, ())])
            self.table.give(each)
            if each.lock is not None:
                self.cache.release(each.lock, own)
                each.lock = None
            elif len(own):
                self.cache.allocator.free(own)

    def surrender(self, request: Request) -> np.ndarray:
        """Take back everything but the pages of the prompt that the request owns itself: the caller answers for those."""
        own = self.table.own_pages(request.slot)
        self.table.page_count[request.slot] = self.table.shared[request.slot]
        self.release(request)
        return own

    def take_changed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Page-table entries for the next plan: (slots, positions, page ids), int32; the latest value of each."""
        if not self.changed:
            empty = np.empty(0, dtype=np.int32)
            return empty, empty, empty
        slots = np.concatenate([each[0] for each in self.changed]).astype(np.int32)
        positions = np.concatenate([each[1] for each in self.changed]).astype(np.int32)
        self.changed.clear()
        return slots, positions, self.table.page_table[slots, positions]

    def _mark(self, slot: int, first: int, end: int | None = None) -> None:
        positions = np.arange(first, self.table.page_count[slot] if end is None else end)
        self.changed.append((np.full(len(positions), slot), positions))
