"""The prefix cache: radix tree and page allocator behind one door, with the ownership rule of pages.

Every page is free, in the tree, owned by one request, or in quarantine (a peer may still write into it). A request's first `shared`
pages belong to the tree and are pinned by its lock; the rest are its own. `commit` hands full pages over (keeping one copy when the tree
has them already: merge), `release` gives everything back. With reuse switched off the same code runs in a private namespace per request
that vanishes with its last lock. Pages of lossy namespaces have no hash and make no events. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from radixpd.core.effects import CacheCleared, CacheEvent, PagesRemoved, PagesStored
from radixpd.core.handoff import Room
from radixpd.core.page_allocator import PageAllocator
from radixpd.core.page_hash import is_lossy, page_hashes, root_hash
from radixpd.core.radix_tree import RadixTree, TreeNode

__all__ = ["Commit", "PrefixCache"]


@dataclass(frozen=True, slots=True)
class Commit:
    """Pages of a request are now the tree's `page_ids`; `merged` says that some are not the ones it had computed."""

    node: TreeNode
    page_ids: np.ndarray  # int32
    merged: bool
    spare: np.ndarray  # int32: the caller's own copies of merged pages, freed unless it keeps them


class PrefixCache:
    """All pages of one pool and what they hold."""

    def __init__(self, pages: int, page_size: int, *, eviction_policy: str = "lru", reuse: bool = True) -> None:
        self.page_size = page_size
        self.page_bytes = 4 * page_size
        self.reuse = reuse
        self.tree = RadixTree(page_size, eviction_policy)
        self.allocator = PageAllocator(pages)
        self.events: list[CacheEvent] = []
        self.evicted_pages = 0
        self._quarantine: dict[Room, np.ndarray] = {}
        self.fingerprint = ""  # of weights and precision: what the KV depends on beside the tokens

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out: free, or idle in the tree."""
        return self.allocator.free_pages + self.tree.pages - self.tree.locked_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def root(self, space: bytes) -> bytes:
        """The hash on which a namespace's chains start."""
        return root_hash(self.fingerprint, space)

    def peek(self, space: bytes, data: bytes, limit: int) -> tuple[TreeNode | None, int]:
        """Longest cached prefix in pages, without touching anything."""
        return self.tree.peek(space, data, limit)

    def match(self, space: bytes, data: bytes, limit: int, priority: int = 0) -> tuple[TreeNode, np.ndarray]:
        """Longest cached prefix of at most `limit` pages: (node, its page ids), locked for the caller, worth its `priority`."""
        node, found = self.tree.match(space, data, limit, priority)
        self.tree.lock(node)
        return node, np.asarray(found, dtype=np.int32)

    def allocate(self, count: int) -> np.ndarray:
        """`count` pages (at most `available`), evicting idle ones as needed."""
        short = count - self.allocator.free_pages
        if short > 0:
            self._give_back(*self.tree.evict(short))
        return self.allocator.allocate(count)

    def commit(self, node: TreeNode, data: bytes, page_ids: np.ndarray, priority: int, *, keep: bool = False) -> Commit:
        """Hand full pages to the tree: `data` are their token bytes, and what comes before them the caller locks by `node`.

        The caller's lock moves to the returned node. Pages that the tree has already are freed here (or left to the caller, who `keep`s
        them because somebody still reads them); the caller uses the tree's.
        """
        end, known = self.tree.descend(node, data, len(page_ids))
        merged = len(known)
        if merged:
            if not keep:
                self.allocator.free(page_ids[:merged])
            self._move_lock(node, end)
        if merged < len(page_ids):
            last = self._insert(end, data[merged * self.page_bytes :], page_ids[merged:], priority)
            self._move_lock(end, last)
            end = last
        ids = np.concatenate([np.asarray(known, dtype=np.int32), page_ids[merged:]]) if merged else page_ids
        return Commit(end, ids, merged > 0, page_ids[:merged] if keep else page_ids[:0])

    def lock(self, node: TreeNode) -> None:
        """One more owner for a locked prefix (a fork's sibling)."""
        self.tree.lock(node)

    def release(self, node: TreeNode, own: np.ndarray) -> None:
        """A request is done with its pages: `own` are freed, the lock on `node` drops."""
        if len(own):
            self.allocator.free(own)
        self.tree.unlock(node)
        if not self.reuse:
            self._give_back(*self.tree.drop(node))

    @property
    def quarantined_pages(self) -> int:
        """Pages that nobody may use yet."""
        return sum(len(pages) for pages in self._quarantine.values())

    def quarantined_for(self, peer: str) -> int:
        """Of those, the pages that this peer may write into."""
        return sum(len(pages) for room, pages in self._quarantine.items() if room.peer == peer)

    def quarantined_in(self, room: Room) -> int:
        """Of those, the pages of one room."""
        return len(self._quarantine[room])

    def quarantine_map(self) -> np.ndarray:
        """Ids of the pages in quarantine, int32."""
        return np.concatenate([*self._quarantine.values(), np.empty(0, dtype=np.int32)])

    def quarantine(self, room: Room, pages: np.ndarray) -> None:
        """Keep pages from everybody until `readmit`: the peer of this room may still write into them."""
        assert room not in self._quarantine
        self._quarantine[room] = pages

    def readmit(self, room: Room) -> None:
        """The peer is quiet: the room's pages are free."""
        self.allocator.free(self._quarantine.pop(room))

    def flush(self) -> None:
        """Forget everything that is cached; nothing may be locked."""
        assert self.tree.locked_pages == 0
        self._give_back(*self.tree.evict(self.tree.pages), silent=True)
        self.events.append(CacheCleared())

    def stored(self) -> Iterator[PagesStored]:
        """What has been told of and is still here, parents first."""
        for node in self.tree.nodes():
            if node.parent is not None and self.reuse and not is_lossy(node.space):
                parent = node.parent.hashes[-1] if node.parent.hashes else None
                yield PagesStored(tuple(node.hashes), parent, np.frombuffer(bytes(node.key), dtype=np.int32))

    def _move_lock(self, old: TreeNode, new: TreeNode) -> None:
        if new is not old:
            self.tree.lock(new)
            self.tree.unlock(old)

    def _insert(self, node: TreeNode, fresh: bytes, page_ids: np.ndarray, priority: int) -> TreeNode:
        parent = node.hashes[-1] if node.hashes else None
        if not self.reuse or is_lossy(node.space):
            return self.tree.extend(node, fresh, page_ids.tolist(), [b""] * len(page_ids), priority)
        hashes = page_hashes(parent or self.root(node.space), fresh, self.page_bytes)
        self.events.append(PagesStored(tuple(hashes), parent, np.frombuffer(fresh, dtype=np.int32)))
        return self.tree.extend(node, fresh, page_ids.tolist(), hashes, priority)

    def _give_back(self, page_ids: list[int], hashes: list[bytes], *, silent: bool = False) -> None:
        if not page_ids:
            return
        self.allocator.free(np.asarray(page_ids, dtype=np.int32))
        if self.reuse and not silent:
            self.evicted_pages += len(page_ids)
            if known := tuple(each for each in hashes if each):
                self.events.append(PagesRemoved(known))
