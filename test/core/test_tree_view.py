"""What a look at the cache shows, against a walk of the whole tree and an owner for every page, through random histories of the brain."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core.test_handoff_sim import Pair
from core.test_scheduler_sim import World

from radixpd.config.settings import CacheSettings, SchedulerSettings
from radixpd.core import tree_view
from radixpd.core.page_hash import token_bytes
from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.radix_tree import TreeNode
from radixpd.core.scheduler import Scheduler
from radixpd.core.slots import SlotTable
from radixpd.core.tree_view import HEAD, OWNERS, CacheView, NodeView, cache_view

SIZE = 4
PACKAGE = str(Path(tree_view.__file__).parents[1])


def _tokens(*pages: int) -> bytes:
    return token_bytes(np.repeat(np.array(pages, dtype=np.int32), SIZE))


def _store(cache: PrefixCache, data: bytes, space: bytes = b"") -> None:
    """A request comes, computes what is missing, and goes."""
    pages = len(data) // (4 * SIZE)
    node, found = cache.match(space, data, pages)
    fresh = cache.allocate(pages - len(found))
    done = cache.commit(node, data[len(found) * 4 * SIZE :], fresh, 0) if len(fresh) else None
    cache.release(done.node if done else node, fresh[:0])


def _table() -> SlotTable:
    return SlotTable(4, 64, SIZE)


def _cells(view: CacheView) -> list[str]:
    return list(chain.from_iterable([OWNERS[owner]] * count for owner, count in view.runs))


def _first(node: NodeView) -> int:
    """The first token of a node; tests write pages of one token."""
    return int(np.frombuffer(node.head, dtype="<i4")[0])


def _shape(view: CacheView) -> dict[int, int | None]:
    """First token of each node -> that of its parent."""
    names = {node.id: _first(node) for node in view.nodes}
    return {_first(node): None if node.parent is None else names[node.parent] for node in view.nodes}


def test_an_empty_cache() -> None:
    view = cache_view(PrefixCache(10, SIZE), _table())
    assert (view.nodes, view.hidden_pages, view.runs) == ([], 0, [(OWNERS.index("free"), 10)])


def test_nodes_say_what_they_are() -> None:
    cache = PrefixCache(20, SIZE)
    _store(cache, _tokens(1, 2, 3))
    _store(cache, _tokens(1, 2, 4))
    _store(cache, _tokens(7), b"x" * 32)
    locked, found = cache.match(b"", _tokens(1, 2, 3), 3)
    table = _table()
    table.requests[2] = SimpleNamespace(lock=locked)
    table.add_pages(2, found)
    table.shared[2] = len(found)
    view = cache_view(cache, table)
    assert _shape(view) == {1: None, 3: 1, 4: 1, 7: None}
    stem = next(node for node in view.nodes if _first(node) == 1)
    assert (stem.pages, stem.children, stem.locks, stem.space) == (2, 2, 1, b"")
    assert stem.head == _tokens(1, 2)
    assert {_first(node): node.locks for node in view.nodes} == {1: 1, 3: 1, 4: 0, 7: 0}
    assert next(node for node in view.nodes if _first(node) == 7).space == b"x" * 32
    assert (view.tree_pages, view.locked_pages, view.free_pages, view.request_pages) == (5, 3, 15, 0)
    cache.release(locked, np.empty(0, np.int32))


def test_a_long_node_tells_only_its_head() -> None:
    cache = PrefixCache(50, SIZE)
    _store(cache, _tokens(*range(40)))
    (node,) = cache_view(cache, _table()).nodes
    assert node.pages == 40
    assert node.head == _tokens(*range(40))[: 4 * HEAD]


def test_the_latest_come_first_and_the_rest_is_counted() -> None:
    cache = PrefixCache(100, SIZE)
    for page in range(20):
        _store(cache, _tokens(page))
    _store(cache, _tokens(3))
    view = cache_view(cache, _table(), limit=4)
    assert [_first(node) for node in view.nodes] == [3, 19, 18, 17]
    assert [node.age for node in view.nodes] == sorted(node.age for node in view.nodes)
    assert view.hidden_pages == 16
    assert view.tree_pages == 20


def test_a_path_longer_than_the_limit_is_cut_at_its_end() -> None:
    cache = PrefixCache(100, SIZE)
    for end in range(1, 11):  # a node a page: each prefix also goes on in another way
        _store(cache, _tokens(*range(end), 50 + end))
    _store(cache, _tokens(99))
    view = cache_view(cache, _table(), limit=5)
    assert [_first(node) for node in view.nodes] == [99, 0, 1, 2, 3]
    assert view.hidden_pages == cache.tree.pages - 5


def test_a_node_keeps_its_id_when_it_is_split() -> None:
    cache = PrefixCache(100, SIZE)
    _store(cache, _tokens(1, 2, 3))
    before = cache_view(cache, _table()).nodes[0].id
    _store(cache, _tokens(1, 2, 4))
    assert next(node.id for node in cache_view(cache, _table()).nodes if _first(node) == 1) == before


@pytest.mark.parametrize(
    ("cells", "width", "shown"),
    [
        (16, 1, ["tree"] * 3 + ["free"] * 7),
        (5, 2, ["tree", "tree", "free", "free", "free"]),  # pages 2 and 3 are shared equally
        (4, 3, ["tree", "free", "free", "free"]),
        (1, 10, ["free"]),
    ],
)
def test_cells_of_several_pages_show_the_larger_owner(cells: int, width: int, shown: list[str]) -> None:
    cache = PrefixCache(10, SIZE)
    _store(cache, _tokens(1, 2, 3))
    view = cache_view(cache, _table(), cells=cells)
    assert view.pages_per_cell == width
    assert _cells(view) == shown


@dataclass
class Watched(World):
    """Looks at the cache after every move."""

    owners: set[str] = field(default_factory=set)

    def __init__(self, scheduler: SchedulerSettings, cache: CacheSettings, pages: int, seed: int) -> None:
        super().__init__(scheduler, cache, pages, seed)
        self.owners = set()

    def check(self) -> None:
        super().check()
        self.owners |= _check_view(self.scheduler)


def _check_view(brain: Scheduler) -> set[str]:
    """Every page shows its owner, and their numbers are right; the owners that there are."""
    cache, pages = brain.cache, brain.cache.allocator.pages
    spares = [each for kept in brain.holdings.spares.values() for each in kept]
    view = cache_view(cache, brain.table, spares)
    nodes = list(cache.tree.nodes())
    _check_nodes(view, nodes)
    owners = dict.fromkeys(np.flatnonzero(cache.allocator.free_map()).tolist(), "free")
    owners |= dict.fromkeys((page for node in nodes for page in node.page_ids), "tree")
    owners |= dict.fromkeys((page for kept in cache._quarantine.values() for page in kept.tolist()), "quarantine")
    expected = [owners.get(page, "request") for page in range(pages)]
    assert _cells(view) == expected
    sums = {"free": view.free_pages, "tree": view.tree_pages, "request": view.request_pages, "quarantine": view.quarantine_pages}
    assert {owner: expected.count(owner) for owner in OWNERS} == sums
    coarse = cache_view(cache, brain.table, spares, cells=7)
    parts = [expected[at : at + coarse.pages_per_cell] for at in range(0, pages, coarse.pages_per_cell)]
    assert _cells(coarse) == [max(OWNERS, key=part.count) for part in parts]
    few = cache_view(cache, brain.table, limit=2)
    assert [node.id for node in few.nodes] == [node.id for node in view.nodes[:2]]
    return set(expected)


def _check_nodes(view: CacheView, nodes: list[TreeNode]) -> None:
    """Every node once, parents first, nothing hidden."""
    by_id = {node.page_ids[0]: node for node in nodes}
    assert len(by_id) == len(nodes) == len(view.nodes)
    seen: set[int | None] = {None}
    for shown in view.nodes:
        node = by_id[shown.id]
        assert node.parent is not None
        assert shown.parent in seen
        assert shown.parent == (node.parent.page_ids[0] if node.parent.page_ids else None)
        assert (shown.pages, shown.locks, shown.space) == (len(node.page_ids), node.refs, node.space)
        seen.add(shown.id)
    assert view.hidden_pages == 0


@pytest.mark.parametrize("reuse", [True, False])
def test_every_page_has_the_owner_that_is_shown(reuse: bool) -> None:
    owners: set[str] = set()
    for seed in range(3):
        world = Watched(
            SchedulerSettings(max_running_requests=5, chunked_prefill_size=16),
            CacheSettings(page_size=SIZE, disable_radix_cache=not reuse),
            pages=40,
            seed=seed,
        )
        for _ in range(80):
            world.move(arrivals=True)
        world.finish()
        owners |= world.owners
    assert owners == {"free", "tree", "request"}


def test_pages_that_a_peer_may_write_or_still_reads_have_their_owners() -> None:
    case = {
        "page": 4, "p_tokens": 128, "d_tokens": 128, "slots": 4, "chunk": 16, "overlap": True, "reuse": True, "faults": True,
        "fallback": False,
    }  # fmt: skip
    owners: set[str] = set()
    spared = 0
    for seed in range(4):
        world = Pair(case, random.Random(seed))
        for _ in range(300):
            world.move(arrivals=True)
            spared += bool(world.p.scheduler.holdings.spares)
            for side in (world.p, world.d):
                owners |= _check_view(side.scheduler)
    assert owners == set(OWNERS)
    assert spared, "a page that was merged while a mover read it"


def _lines(call: Callable[[], object]) -> int:
    """How many of our own lines a call runs (the garbage collector may run others' meanwhile)."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace if PACKAGE in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("length", [1, 3])
def test_the_work_does_not_grow_with_the_tree(length: int) -> None:
    work = []
    for leaves in (60, 300):
        cache = PrefixCache(leaves * length, SIZE)
        for leaf in range(leaves):
            _store(cache, _tokens(*[leaf] * length))
        table = _table()
        work.append(_lines(lambda cache=cache, table=table: cache_view(cache, table, limit=25, cells=10)))
    assert work[0] == work[1]
    assert work[0] < 25 * 80
