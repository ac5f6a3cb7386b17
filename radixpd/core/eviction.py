"""Which cached leaf goes first: a heap of evictable leaves, kept incrementally.

A leaf is pushed whenever it becomes evictable (unlocked and childless) or its rank changes; older entries of the same leaf go stale and are
skipped when they surface. So one eviction costs O(log leaves) and the tree is never walked.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixpd.core.radix_tree import TreeNode

__all__ = ["RANKS", "EvictionQueue", "Rank"]

Rank = Callable[["TreeNode"], tuple[int, int]]

RANKS: dict[str, Rank] = {
    "lru": lambda node: (0, node.last_used),
    "lfu": lambda node: (node.hits, node.last_used),
    "fifo": lambda node: (0, node.created),
    "priority": lambda node: (node.priority, node.last_used),
}
"""Smallest rank goes first."""

SLACK = 64  # stale entries tolerated before the heap is rebuilt, beside one per live leaf


class EvictionQueue:
    """Evictable leaves in the order in which they go."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._heap: list[tuple[tuple[int, int], int, TreeNode]] = []
        self._count = 0
        self._entry: dict[TreeNode, int] = {}  # leaf -> the number of its live entry

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._entry

    def push(self, node: TreeNode) -> None:
        """The leaf is evictable now, at its present rank."""
        self._count += 1
        self._entry[node] = self._count
        heapq.heappush(self._heap, (self._rank(node), self._count, node))
        if len(self._heap) > 2 * len(self._entry) + SLACK:
            self._heap = [item for item in self._heap if self._entry.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def discard(self, node: TreeNode) -> None:
        """The node is not evictable any more (locked, or it has a child)."""
        self._entry.pop(node, None)

    def latest(self) -> Iterator[TreeNode]:
        """Every evictable leaf, the one that became so last first. The queue must not change meanwhile."""
        return reversed(self._entry)

    def first(self) -> TreeNode | None:
        """The leaf that goes first, left in place; None when nothing is evictable."""
        while self._heap:
            _, number, node = self._heap[0]
            if self._entry.get(node) == number:
                return node
            heapq.heappop(self._heap)
        return None
