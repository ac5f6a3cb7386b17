"""A look at the cache for people: who owns each page, and the most recently used nodes of the radix tree. Reads only.

Invariant: the work of one look is bounded whatever the cache holds: at most `NODES` nodes are described, each node's path is walked
once (only the last path may be cut), every slot in use is visited once, and the page map is one numpy pass over a byte a page. A
node is shown only with all its ancestors, parents first. Called by the scheduler process for `GET /cache_tree`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.radix_tree import TreeNode
from radixpd.core.slots import SlotTable

__all__ = ["CELLS", "HEAD", "NODES", "OWNERS", "CacheView", "NodeView", "cache_view"]

NODES = 500  # nodes of one look
HEAD = 32  # first tokens of a node that are told
CELLS = 4096  # cells of a page map: a larger pool has several pages in each
OWNERS = ("request", "quarantine", "tree", "free")  # of a cell whose pages are shared equally, the first one shows


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node. Its `id` is its first page's: no other node has it, and a node keeps it when its tail is split off."""

    id: int
    parent: int | None  # None: right below the root of its namespace
    pages: int
    locks: int
    hits: int
    age: int  # look-ups and insertions of the tree since this node was last used
    children: int  # also those that are not shown
    space: bytes
    head: bytes  # its first tokens, little-endian int32


@dataclass(frozen=True, slots=True)
class CacheView:
    """The pool and the tree at one moment. `runs`: (index into `OWNERS`, how many cells), in the order of page ids."""

    page_size: int
    pages: int
    free_pages: int
    tree_pages: int
    locked_pages: int
    request_pages: int
    quarantine_pages: int
    pages_per_cell: int
    runs: list[tuple[int, int]]
    nodes: list[NodeView]
    hidden_pages: int  # of the tree, in nodes that are not shown


def cache_view(
    cache: PrefixCache, table: SlotTable, spares: Iterable[np.ndarray] = (), *, limit: int = NODES, cells: int = CELLS
) -> CacheView:
    """What there is to see now. `spares`: pages that requests own beside those of their slots."""
    used = np.flatnonzero(table.page_count).tolist()
    nodes = _recent(cache, table, used, limit)
    width = -(-cache.allocator.pages // cells)
    free, tree, quarantine = cache.allocator.free_pages, cache.tree.pages, cache.quarantined_pages
    own = [*spares, *(table.own_pages(slot) for slot in used)]
    return CacheView(
        page_size=cache.page_size,
        pages=cache.allocator.pages,
        free_pages=free,
        tree_pages=tree,
        locked_pages=cache.tree.locked_pages,
        request_pages=cache.allocator.pages - free - tree - quarantine,
        quarantine_pages=quarantine,
        pages_per_cell=width,
        runs=_runs(_cells(cache, own, width)),
        nodes=[_describe(cache, node) for node in nodes],
        hidden_pages=tree - sum(len(node.page_ids) for node in nodes),
    )


def _recent(cache: PrefixCache, table: SlotTable, used: list[int], limit: int) -> list[TreeNode]:
    """Nodes that running requests lock, then idle leaves, latest first, each below its ancestors."""
    locks = (table.requests[slot].lock for slot in used)
    shown: dict[TreeNode, None] = {}
    for leaf in chain(locks, cache.tree.evictable.latest()):
        if len(shown) >= limit:
            break
        path: list[TreeNode] = []
        for node in leaf.path() if leaf is not None else ():
            if node.parent is None or node in shown:
                break
            path.append(node)
        shown.update(dict.fromkeys(path[::-1][: limit - len(shown)]))
    return list(shown)


def _describe(cache: PrefixCache, node: TreeNode) -> NodeView:
    parent = node.parent
    return NodeView(
        id=node.page_ids[0],
        parent=parent.page_ids[0] if parent is not None and parent.page_ids else None,
        pages=len(node.page_ids),
        locks=node.refs,
        hits=node.hits,
        age=cache.tree.age(node),
        children=len(node.children),
        space=node.space,
        head=bytes(node.key[: 4 * HEAD]),
    )


def _cells(cache: PrefixCache, own: list[np.ndarray], width: int) -> np.ndarray:
    """The owner of most pages of each cell (of `width` pages), as an index into `OWNERS`, int64 `[cells]`."""
    pages = cache.allocator.pages
    starts = np.arange(0, pages, width)
    free = np.add.reduceat(cache.allocator.free_map(), starts, dtype=np.int64)
    request = np.bincount(np.concatenate(own) // width, minlength=len(starts)) if own else np.zeros_like(free)
    quarantine = np.bincount(cache.quarantine_map() // width, minlength=len(starts))
    # What is neither free nor in quarantine nor a request's own is the tree's: there is no fifth owner.
    tree = np.minimum(width, pages - starts) - free - request - quarantine
    cells: np.ndarray = np.stack((request, quarantine, tree, free)).argmax(axis=0)
    return cells


def _runs(cells: np.ndarray) -> list[tuple[int, int]]:
    starts = np.concatenate(([0], np.flatnonzero(np.diff(cells)) + 1))
    lengths = np.diff(starts, append=len(cells))
    return list(zip(cells[starts].tolist(), lengths.tolist()))
