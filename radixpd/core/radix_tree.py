"""The radix tree: which page holds the KV of which token prefix. Keys are page-aligned token bytes, values are page ids and page hashes.

Invariants: the edge to a child is its first page's bytes, so siblings differ in their first page; a node's `refs` is the number of
locks on it or below it; a locked node is never evicted; `pages` and `locked_pages` always equal the sums over the nodes; namespaces
have roots of their own and never share a node. `match` may split a node (so that a lock covers exactly what matched); `peek`
changes nothing. Called by `prefix_cache` alone; pure integers and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from radixpd.core.eviction import RANKS, EvictionQueue

__all__ = ["RadixTree", "TreeNode"]


class TreeNode:
    """A run of consecutive pages. `key`: their token bytes; `page_ids`, `hashes`: one entry a page."""

    __slots__ = ("children", "created", "hashes", "hits", "key", "last_used", "page_ids", "parent", "priority", "refs", "space")

    def __init__(self, space: bytes, parent: TreeNode | None, key: bytearray, page_ids: list[int], hashes: list[bytes]) -> None:
        self.space = space
        self.parent = parent
        self.key = key
        self.page_ids = page_ids
        self.hashes = hashes
        self.children: dict[bytes, TreeNode] = {}
        self.refs: int = 0
        self.hits: int = 0
        self.priority: int = 0
        self.last_used: int = 0
        self.created: int = 0

    def path(self) -> Iterator[TreeNode]:
        """This node and its ancestors, root last."""
        node: TreeNode | None = self
        while node is not None:
            yield node
            node = node.parent


class RadixTree:
    """All namespaces of one pool."""

    def __init__(self, page_size: int, eviction_policy: str = "lru") -> None:
        self.page_bytes = 4 * page_size
        self.roots: dict[bytes, TreeNode] = {}
        self.evictable = EvictionQueue(RANKS[eviction_policy])
        self.pages = 0
        self.locked_pages = 0
        self._clock = 0

    def peek(self, space: bytes, data: bytes, limit: int) -> tuple[TreeNode | None, int]:
        """Longest cached prefix of `data` in whole pages, at most `limit`: (deepest node touched, pages). Changes nothing."""
        node, matched = self.roots.get(space), 0
        while node is not None and matched < limit:
            child, count = self._step(node, data, matched, limit)
            if child is None:
                break
            node, matched = child, matched + count
            if count < len(child.page_ids):
                break
        return node, matched

    def match(self, space: bytes, data: bytes, limit: int, priority: int = 0) -> tuple[TreeNode, list[int]]:
        """As `peek`, but the returned node ends exactly at the match (it is split if need be), and the path counts as used.

        The caller locks the node: only then is the new rank of an idle leaf seen by eviction.
        """
        node, found = self.descend(self._root(space), data, limit)
        for each in node.path():
            each.hits += 1
            each.priority = max(each.priority, priority)
        return node, found

    def descend(self, node: TreeNode, data: bytes, limit: int) -> tuple[TreeNode, list[int]]:
        """`match` below `node`, where `data` goes on: (node that ends the match, page ids)."""
        self._clock += 1
        found: list[int] = []
        while len(found) < limit:
            child, count = self._step(node, data, len(found), limit)
            if child is None:
                break
            if count < len(child.page_ids):
                child = self._split(child, count)
            child.last_used = self._clock
            node = child
            found += child.page_ids
        return node, found

    def extend(self, node: TreeNode, data: bytes, page_ids: list[int], hashes: list[bytes], priority: int) -> TreeNode:
        """Hang pages under `node`, where no child begins with their first page; returns the node that ends with them.

        A leaf that only its one owner locks grows in place, so a long generation is one node and not a chain of pages.
        """
        self._clock += 1
        self.pages += len(page_ids)
        if node.parent is not None and not node.children and node.refs == 1:
            node.key += data
            node.page_ids += page_ids
            node.hashes += hashes
            node.last_used = self._clock
            self.locked_pages += len(page_ids)
            return node
        child = TreeNode(node.space, node, bytearray(data), list(page_ids), list(hashes))
        child.created = child.last_used = self._clock
        child.priority = priority
        node.children[bytes(data[: self.page_bytes])] = child
        self.evictable.discard(node)
        self.evictable.push(child)
        return child

    def lock(self, node: TreeNode) -> None:
        """Keep this node and its ancestors from eviction until `unlock`."""
        for each in node.path():
            if each.refs == 0:
                self.locked_pages += len(each.page_ids)
                self.evictable.discard(each)
            each.refs += 1

    def unlock(self, node: TreeNode) -> None:
        """Take back one `lock`."""
        for each in node.path():
            each.refs -= 1
            assert each.refs >= 0, "unlock without lock"
            if each.refs == 0:
                self.locked_pages -= len(each.page_ids)
                if not each.children:
                    self._idle_leaf(each)

    def evict(self, count: int) -> tuple[list[int], list[bytes]]:
        """Drop up to `count` pages, leaf tails first: (page ids, hashes) of what went."""
        page_ids: list[int] = []
        hashes: list[bytes] = []
        while len(page_ids) < count:
            leaf = self.evictable.first()
            if leaf is None:
                break
            self._trim(leaf, min(count - len(page_ids), len(leaf.page_ids)), page_ids, hashes)
        return page_ids, hashes

    def drop(self, node: TreeNode) -> tuple[list[int], list[bytes]]:
        """Drop `node` and those of its ancestors that nobody locks or shares: (page ids, hashes)."""
        page_ids: list[int] = []
        hashes: list[bytes] = []
        parent: TreeNode | None = node
        while parent is not None and parent.parent is not None and parent.refs == 0 and not parent.children:
            node, parent = parent, parent.parent
            self._trim(node, len(node.page_ids), page_ids, hashes)
        return page_ids, hashes

    def age(self, node: TreeNode) -> int:
        """Look-ups and insertions since the node was last used."""
        return self._clock - node.last_used

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the roots, parents first (for tests, dumps and the flush of a whole tree)."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent is not None:
                yield node

    def _root(self, space: bytes) -> TreeNode:
        root = self.roots.get(space)
        if root is None:
            root = self.roots[space] = TreeNode(space, None, bytearray(), [], [])
        return root

    def _step(self, node: TreeNode, data: bytes, at: int, limit: int) -> tuple[TreeNode | None, int]:
        """The child of `node` that continues `data` at page `at`, and how many of its pages do (capped by `limit` in all)."""
        start = at * self.page_bytes
        child = node.children.get(data[start : start + self.page_bytes])
        if child is None:
            return None, 0
        size = min(len(child.key), len(data) - start, (limit - at) * self.page_bytes)
        if child.key[:size] == data[start : start + size]:
            return child, size // self.page_bytes
        same = np.frombuffer(child.key, dtype=np.int32, count=size // 4) == np.frombuffer(data, np.int32, size // 4, start)
        return child, int(same.argmin()) * 4 // self.page_bytes

    def _split(self, node: TreeNode, count: int) -> TreeNode:
        """Cut `node` after `count` pages; the upper part is a new node, the lower part stays the object that locks point to."""
        assert node.parent is not None
        size = count * self.page_bytes
        upper = TreeNode(node.space, node.parent, node.key[:size], node.page_ids[:count], node.hashes[:count])
        upper.refs, upper.hits, upper.priority = node.refs, node.hits, node.priority
        upper.last_used, upper.created = node.last_used, node.created
        node.parent.children[bytes(upper.key[: self.page_bytes])] = upper
        node.key, node.page_ids, node.hashes = node.key[size:], node.page_ids[count:], node.hashes[count:]
        node.parent = upper
        upper.children[bytes(node.key[: self.page_bytes])] = node
        return upper

    def _trim(self, leaf: TreeNode, count: int, page_ids: list[int], hashes: list[bytes]) -> None:
        """Move the last `count` pages of an idle leaf to the lists; a leaf without pages leaves the tree."""
        keep = len(leaf.page_ids) - count
        page_ids += leaf.page_ids[keep:][::-1]
        hashes += leaf.hashes[keep:][::-1]
        self.pages -= count
        first = bytes(leaf.key[: self.page_bytes])
        del leaf.page_ids[keep:], leaf.hashes[keep:], leaf.key[keep * self.page_bytes :]
        if keep:
            return
        self.evictable.discard(leaf)
        parent = leaf.parent
        assert parent is not None
        del parent.children[first]
        if not parent.children and parent.refs == 0:
            self._idle_leaf(parent)

    def _idle_leaf(self, node: TreeNode) -> None:
        """A node has become an unlocked leaf: it may be evicted; an empty root just goes."""
        if node.parent is not None:
            self.evictable.push(node)
        elif self.roots.get(node.space) is node:
            del self.roots[node.space]
