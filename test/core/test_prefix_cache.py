"""The cache's door: merge, fork, namespaces, refusals, reuse switched off, memory, and hashes that collide."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from radixpd.core import prefix_cache
from radixpd.core.effects import CacheCleared, PagesRemoved, PagesStored
from radixpd.core.page_hash import namespace, token_bytes
from radixpd.core.prefix_cache import PrefixCache

SIZE = 4
STEP = 4 * SIZE


def _tokens(*pages: int) -> bytes:
    return token_bytes(np.repeat(np.array(pages, dtype=np.int32), SIZE))


def _store(cache: PrefixCache, data: bytes, space: bytes = b"") -> np.ndarray:
    """A request comes, computes what is missing, and goes: the pages that hold `data` now."""
    pages = len(data) // (4 * cache.page_size)
    node, found = cache.match(space, data, pages)
    fresh = cache.allocate(pages - len(found))
    done = cache.commit(node, data[len(found) * 4 * cache.page_size :], fresh, 0) if len(fresh) else None
    cache.release(done.node if done else node, fresh[:0])
    return np.concatenate([found, done.page_ids if done else fresh])


def test_a_match_is_whole_pages_up_to_the_limit() -> None:
    cache = PrefixCache(10, SIZE)
    pages = _store(cache, _tokens(1, 2, 3))
    ask = _tokens(1, 2) + token_bytes(np.array([3, 3, 3, 9]))  # the third page differs in its last token
    for limit, found in ((4, 2), (2, 2), (1, 1), (0, 0)):
        node, ids = cache.match(b"", ask, min(limit, 3))
        assert ids.tolist() == pages[:found].tolist()
        cache.release(node, ids[:0])
    assert cache.tree.locked_pages == 0


def test_merge_keeps_one_copy() -> None:
    """Two requests compute the same prefix at once; the later one gets the tree's pages and its own are free again."""
    cache = PrefixCache(10, SIZE)
    first, _ = cache.match(b"", _tokens(1, 2), 2)
    second, _ = cache.match(b"", _tokens(1, 2, 3), 3)
    mine, theirs = cache.allocate(2), cache.allocate(3)
    kept = cache.commit(first, _tokens(1, 2), mine, 0)
    merged = cache.commit(second, _tokens(1, 2, 3), theirs, 0)
    assert not kept.merged
    assert merged.merged
    assert merged.page_ids.tolist() == [*mine.tolist(), int(theirs[2])]
    assert cache.allocator.free_pages == 10 - 3
    assert [type(e) for e in cache.events] == [PagesStored, PagesStored]
    assert len(cache.events[1].hashes) == 1  # type: ignore[union-attr]


def test_a_merge_does_not_grow_a_node_that_another_owner_locks() -> None:
    """A holds pages 1, 2. B computed 2 itself and goes on with 3, A with 5: neither continuation may move the other."""
    cache = PrefixCache(20, SIZE)
    a, _ = cache.match(b"", _tokens(1, 2), 2)
    a = cache.commit(a, _tokens(1, 2), cache.allocate(2), 0).node
    b, found = cache.match(b"", _tokens(1, 2, 3), 1)
    assert len(found) == 1
    cache.commit(b, _tokens(2, 3), cache.allocate(2), 0)
    cache.commit(a, _tokens(5), cache.allocate(1), 0)
    assert cache.peek(b"", _tokens(1, 2, 5), 3)[1] == 3
    assert cache.peek(b"", _tokens(1, 2, 3, 5), 4)[1] == 3


def test_a_long_generation_is_one_node() -> None:
    cache = PrefixCache(200, SIZE)
    node, _ = cache.match(b"", b"", 0)
    for page in range(100):
        node = cache.commit(node, _tokens(page), cache.allocate(1), 0).node
    assert [len(n.page_ids) for n in cache.tree.nodes()] == [100]


def test_namespaces_share_nothing() -> None:
    cache = PrefixCache(10, SIZE)
    one, other = namespace({"cache_salt": "x"}), namespace({"adapter": "x"})
    _store(cache, _tokens(1, 2), one)
    assert cache.peek(one, _tokens(1, 2), 2)[1] == 2
    assert cache.peek(other, _tokens(1, 2), 2)[1] == 0
    assert cache.peek(b"", _tokens(1, 2), 2)[1] == 0
    _store(cache, _tokens(1, 2), other)
    hashes = [h for event in cache.events for h in event.hashes]  # type: ignore[union-attr]
    assert len(set(hashes)) == 4


def test_the_fingerprint_names_the_hashes() -> None:
    first, second = PrefixCache(4, SIZE), PrefixCache(4, SIZE)
    first.fingerprint, second.fingerprint = "a", "b"
    _store(first, _tokens(1))
    _store(second, _tokens(1))
    assert first.events[0].hashes != second.events[0].hashes  # type: ignore[union-attr]


def test_a_refused_match_gives_its_lock_back() -> None:
    """PC-11: whoever is refused after matching leaves everything evictable, and an unknown namespace leaves no root."""
    cache = PrefixCache(10, SIZE)
    _store(cache, _tokens(1, 2, 3))
    for _ in range(50):
        node, found = cache.match(b"", _tokens(1, 2, 9), 2)
        assert cache.available == 8
        cache.release(node, found[:0])
        node, found = cache.match(b"z" * 32, _tokens(1), 1)
        cache.release(node, found)
    assert cache.available == 10
    assert list(cache.tree.roots) == [b""]
    assert len(cache.allocate(10)) == 10


def test_reuse_off_keeps_nothing_and_says_nothing() -> None:
    cache = PrefixCache(10, SIZE, reuse=False)
    node, _ = cache.match(b"private1", _tokens(1, 2, 3), 0)
    pages = cache.allocate(3)
    node = cache.commit(node, _tokens(1, 2), pages[:2], 0).node
    cache.lock(node)  # a fork
    cache.release(node, pages[2:])
    assert cache.allocator.free_pages == 8, "the sibling still reads the shared pages"
    assert cache.peek(b"private2", _tokens(1, 2), 2)[1] == 0
    cache.release(node, pages[:0])
    assert cache.allocator.free_pages == 10
    assert not cache.tree.roots
    assert cache.events == []
    assert cache.evicted_pages == 0


def test_flush_forgets_everything_with_one_event() -> None:
    cache = PrefixCache(10, SIZE)
    _store(cache, _tokens(1, 2))
    _store(cache, _tokens(1, 3), b"x" * 32)
    cache.events.clear()
    cache.flush()
    assert cache.events == [CacheCleared()]
    assert cache.allocator.free_pages == 10
    assert cache.peek(b"", _tokens(1), 1)[1] == 0


def test_flush_with_a_lock_held_trips() -> None:
    cache = PrefixCache(10, SIZE)
    _store(cache, _tokens(1))
    cache.match(b"", _tokens(1), 1)
    with pytest.raises(AssertionError):
        cache.flush()


def test_stored_and_removed_name_their_pages() -> None:
    cache = PrefixCache(3, SIZE)
    _store(cache, _tokens(1, 2))
    _store(cache, _tokens(1, 3))
    first, second = cache.events
    assert isinstance(first, PagesStored)
    assert isinstance(second, PagesStored)
    assert first.parent is None
    assert second.parent == first.hashes[0], "the split itself is silent"
    assert second.tokens.tolist() == [3] * SIZE
    cache.events.clear()
    cache.allocate(1)
    assert cache.events == [PagesRemoved((first.hashes[1],))]


def test_pc_12_colliding_hashes_never_cause_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree compares token ids; with a hash that says the same of every page, nothing wrong is found."""

    def weak(parent: bytes, data: bytes, page_bytes: int) -> list[bytes]:
        return [bytes(32)] * (len(data) // page_bytes)

    monkeypatch.setattr(prefix_cache, "page_hashes", weak)
    cache = PrefixCache(50, SIZE)
    rng = np.random.default_rng(0)
    held: dict[bytes, int] = {}
    for _ in range(10):
        data = token_bytes(np.repeat(rng.integers(0, 3, 4), SIZE))
        for at, page in enumerate(_store(cache, data).tolist()):
            assert held.setdefault(data[: (at + 1) * STEP], page) == page
    assert len(set(held.values())) == len(held) > 10


def test_pc_05_split_copies_and_evicted_parts_are_given_back() -> None:
    """2,000 prompts leave a long prompt early and all are evicted. What stays costs its own index, not that of what has gone."""
    size, stem_pages, tail_pages, kept_pages = 16, 20_000, 2, 64
    page_cost = 4 * size + 8 + 32 + 8 + 65  # token bytes, page id in a list and as an int, hash in a list and as bytes
    rng = np.random.default_rng(0)
    stem = token_bytes(rng.integers(0, 50_000, stem_pages * size))
    tracemalloc.start()
    try:
        cache = PrefixCache(2 * stem_pages + 2000 * tail_pages, size)
        before = tracemalloc.get_traced_memory()[0]
        _store(cache, stem)
        for turn in range(2000):  # each cuts the stem at one of 32 places
            tail = token_bytes(rng.integers(0, 50_000, tail_pages * size))
            _store(cache, stem[: (1 + turn % 32) * 4 * size] + tail)
            cache.events.clear()
        full, pages = tracemalloc.get_traced_memory()[0] - before, cache.tree.pages
        assert pages == stem_pages + 2000 * tail_pages
        assert full < 2 * pages * page_cost
        node, found = cache.match(b"", stem, kept_pages)
        cache.allocator.free(cache.allocate(cache.available))
        cache.release(node, found[:0])
        cache.events.clear()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - before
        assert cache.tree.pages == kept_pages
        slack = 150 * 2000  # tables that 2,000 leaves have once filled
        assert left < 2 * kept_pages * page_cost + slack < full / 10
    finally:
        tracemalloc.stop()
