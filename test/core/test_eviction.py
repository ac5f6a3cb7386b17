"""Who is evicted first under each policy, and that eviction never walks the tree."""

from __future__ import annotations

import math

import numpy as np
import pytest

from radixpd.core import eviction, radix_tree
from radixpd.core.effects import PagesRemoved
from radixpd.core.page_hash import token_bytes
from radixpd.core.prefix_cache import PrefixCache

SIZE = 4
NAMES = "abcd"


def _data(name: str, pages: int = 1) -> bytes:
    return token_bytes(np.full(pages * SIZE, ord(name)))


def _store(cache: PrefixCache, data: bytes, priority: int = 0) -> None:
    """A request comes, computes what is missing, and goes."""
    pages = len(data) // (4 * SIZE)
    node, found = cache.match(b"", data, pages)
    fresh = cache.allocate(pages - len(found))
    node = cache.commit(node, data[len(found) * 4 * SIZE :], fresh, priority).node if len(fresh) else node
    cache.release(node, fresh[:0])


def _evict_one(cache: PrefixCache) -> str:
    """The name of the prompt that gives its page when one is needed."""
    held = [name for name in NAMES if cache.peek(b"", _data(name), 1)[1]]
    cache.allocator.free(cache.allocate(cache.allocator.free_pages + 1))
    gone = [name for name in held if not cache.peek(b"", _data(name), 1)[1]]
    assert len(gone) == 1
    return gone[0]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "bdca"),  # by last use
        ("lfu", "bdac"),  # hits: b 0, d 1, a 1 (used after d), c 2
        ("fifo", "abcd"),  # by age
        ("priority", "cbda"),  # c has 0; b and d have 1, b was used before d; a has 2
    ],
)
def test_policies_evict_in_their_own_order(policy: str, order: str) -> None:
    cache = PrefixCache(8, SIZE, eviction_policy=policy)
    for name, priority in zip(NAMES, (2, 1, 0, 1)):
        _store(cache, _data(name), priority)
    for name in ("c", "d", "c", "a"):
        _store(cache, _data(name))
    assert "".join(_evict_one(cache) for _ in NAMES) == order


@pytest.mark.parametrize("policy", sorted(eviction.RANKS))
def test_tails_go_before_their_prefix_and_locked_pages_stay(policy: str) -> None:
    cache = PrefixCache(8, SIZE, eviction_policy=policy)
    stem = _data("a", 2)
    _store(cache, stem + _data("b", 2))
    _store(cache, stem + _data("c", 2))
    node, locked = cache.match(b"", stem + _data("b"), 3)
    assert cache.available == 8 - 3
    taken = cache.allocate(cache.available)
    assert not set(taken.tolist()) & set(locked.tolist())
    assert cache.peek(b"", stem + _data("b", 2), 4)[1] == 3
    assert cache.available == 0
    cache.release(node, taken)
    cache.allocate(8)
    assert not list(cache.tree.nodes())


def test_a_long_leaf_gives_only_its_tail() -> None:
    cache = PrefixCache(8, SIZE)
    data = token_bytes(np.arange(6 * SIZE))
    _store(cache, data)
    cache.events.clear()
    hashes = next(cache.tree.nodes()).hashes[:]
    cache.allocate(4)
    assert cache.peek(b"", data, 6)[1] == 4
    assert cache.events == [PagesRemoved((hashes[5], hashes[4]))]
    assert cache.evicted_pages == 2


def test_peeking_is_no_use() -> None:
    cache = PrefixCache(8, SIZE)
    for name in NAMES:
        _store(cache, _data(name))
    cache.peek(b"", _data("a"), 1)
    assert _evict_one(cache) == "a"


LEAVES = 5000


@pytest.mark.parametrize("policy", sorted(eviction.RANKS))
def test_eviction_never_walks_the_tree(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicting k of 5,000 leaves looks at O(k) ranks and compares O(k log n) heap entries, and visits no other node."""
    count = {"ranks": 0, "compared": 0}

    class Rank(tuple[int, int]):
        def __lt__(self, other: tuple[int, ...]) -> bool:
            count["compared"] += 1
            return tuple(self) < tuple(other)

    rank = eviction.RANKS[policy]

    def counted(node: radix_tree.TreeNode) -> tuple[int, int]:
        count["ranks"] += 1
        return Rank(rank(node))

    monkeypatch.setitem(eviction.RANKS, policy, counted)
    cache = PrefixCache(2 * LEAVES, 1, eviction_policy=policy)
    for leaf in range(LEAVES):
        data = token_bytes(np.array([leaf % 50, leaf]))
        node, found = cache.match(b"", data, 2)
        fresh = cache.allocate(2 - len(found))
        node = cache.commit(node, data[4 * len(found) :], fresh, leaf % 7).node
        cache.release(node, fresh[:0])
    assert len(cache.tree.evictable) == LEAVES

    def walk(self: object) -> None:
        raise AssertionError("eviction walked the tree")

    monkeypatch.setattr(radix_tree.RadixTree, "nodes", walk)
    monkeypatch.setattr(radix_tree.TreeNode, "path", walk)
    count.update(ranks=0, compared=0)
    evicted = 200
    cache.allocate(cache.allocator.free_pages + evicted)
    assert len(cache.tree.evictable) == LEAVES - evicted
    assert count["ranks"] <= evicted
    assert count["compared"] <= 3 * evicted * math.log2(2 * LEAVES)


def test_locking_again_and_again_does_not_grow_the_queue() -> None:
    """Stale entries are dropped: 10,000 hits on 10 leaves leave a heap of a few hundred entries."""
    cache = PrefixCache(16, SIZE)
    for name in NAMES:
        _store(cache, _data(name))
    for turn in range(10_000):
        _store(cache, _data(NAMES[turn % 4]))
    assert len(cache.tree.evictable) == 4
    assert len(cache.tree.evictable._heap) < 200


def test_a_prefix_is_worth_its_most_important_user() -> None:
    """Under `priority`, a hit by an important request keeps what an unimportant one has computed."""
    cache = PrefixCache(4, SIZE, eviction_policy="priority")
    for letter, priority in (("a", 0), ("b", 1)):
        node, found = cache.match(b"", _data(letter), 1, priority)
        cache.release(cache.commit(node, _data(letter), cache.allocate(1), priority).node, found)
    node, found = cache.match(b"", _data("a"), 1, 5)
    cache.release(node, found[:0])
    cache.allocate(cache.allocator.free_pages + 1)
    assert [cache.peek(b"", _data(letter), 1)[1] for letter in "ab"] == [1, 0]
