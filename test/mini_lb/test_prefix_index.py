"""The index answers as a plain set of pages per worker would, whatever order pages come and go in; its memory keeps the cap."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.mini_lb.prefix_index import DEVICE, HOST, PrefixIndex, text_keys
from radixpd.mini_lb.run_forest import RunForest

WORKERS = ("w0", "w1", "w2")


def _chain(*tokens: int, space: str = "") -> list[int]:
    """Chained ids: each names its token and all before it."""
    ids: list[int] = []
    for end in range(1, len(tokens) + 1):
        ids.append(random.Random(f"{space}{tokens[:end]}").getrandbits(64))
    return ids


def _check(forest: RunForest) -> None:
    """What must hold of the structure after every operation."""
    runs = {id(run): run for run in forest.at.values()}
    assert sum(len(run.pages) for run in runs.values()) == len(forest.at)
    for run in runs.values():
        assert all(forest.at[page] is run for page in run.pages)
        assert max(run.held.values()) == len(run.pages)
        assert min(run.held.values()) > 0
        assert run.parent is None or run in run.parent.children
        assert all(child.parent is run for child in run.children)
        assert len(list(run.path())) <= len(runs)
    for holder, used in enumerate(forest.used):
        mine = [run for run in runs.values() if holder in run.held]
        assert set(used) == set(mine)
        assert forest.held[holder] == sum(run.held[holder] for run in mine)
    assert forest._runs == len(runs)
    assert forest._holdings == sum(len(run.held) for run in runs.values())


class Plain:
    """The reference: a set of pages per worker and tier."""

    def __init__(self) -> None:
        self.have: dict[tuple[str, int], set[int]] = {(w, tier): set() for w in WORKERS for tier in (DEVICE, HOST)}

    def match(self, pages: list[int]) -> dict[str, tuple[int, int]]:
        found = {}
        for worker in WORKERS:
            device, host = self.have[worker, DEVICE], self.have[worker, HOST]
            total = next((i for i, page in enumerate(pages) if page not in device | host), len(pages))
            own = next((i for i, page in enumerate(pages[:total]) if page not in device), total)
            if total:
                found[worker] = (own, total - own)
        return found


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "tail", "clear", "touch"]),
        st.sampled_from(WORKERS),
        st.sampled_from([DEVICE, HOST]),
        TOKENS,
        st.integers(0, 7),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(OPERATIONS)
def test_matches_equal_those_of_plain_sets(operations: list[tuple[str, str, int, list[int], int]]) -> None:
    index, plain = PrefixIndex(), Plain()
    for now, (kind, worker, tier, tokens, at) in enumerate(operations):
        pages = _chain(*tokens)
        at = min(at, len(pages) - 1)
        have = plain.have[worker, tier]
        if kind == "store":
            index.store(worker, pages[at:], now, parent=pages[at - 1] if at else None, tier=tier)
            have |= set(pages[at:])
        elif kind == "remove":  # any page, also a middle one
            index.remove(worker, [pages[at]], tier=tier)
            have -= {pages[at]}
        elif kind == "tail":
            index.remove(worker, pages[at:][::-1], tier=tier)
            have -= set(pages[at:])
        elif kind == "clear":
            index.clear(worker)
            plain.have[worker, DEVICE], plain.have[worker, HOST] = set(), set()
        else:
            index.touch(worker, pages, now)
        _check(index._forest)
        asked = _chain(*tokens, *(1 - token for token in tokens))
        assert index.match(asked) == plain.match(asked)
        assert index.held(worker, tier) == len(plain.have[worker, tier])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from(WORKERS), st.lists(st.integers(0, 5), max_size=5), st.none() | st.integers(0, 5)),
        max_size=30,
    )
)
def test_a_worker_that_publishes_nonsense_breaks_nothing(operations: list[tuple[bool, str, list[int], int | None]]) -> None:
    """Ids in any order, twice, in circles: answers may be short, the structure stays whole, nothing hangs."""
    index = PrefixIndex()
    for now, (store, worker, pages, parent) in enumerate(operations):
        if store:
            index.store(worker, pages, now, parent=parent)
        else:
            index.remove(worker, pages)
        _check(index._forest)
        index.match(pages)
        index.touch(worker, pages, now)


def test_what_is_behind_a_hole_counts_again_when_the_hole_is_filled() -> None:
    index, pages = PrefixIndex(), _chain(1, 2, 3, 4, 5)
    index.store("w0", pages, 0)
    index.store("w1", pages, 0)
    index.remove("w0", [pages[2]])
    assert index.match(pages) == {"w0": (2, 0), "w1": (5, 0)}
    index.store("w0", [pages[2]], 1, parent=pages[1])
    assert index.match(pages)["w0"] == (5, 0)


def test_a_cache_that_drops_heads_first_is_followed_page_by_page() -> None:
    index, pages = PrefixIndex(), _chain(*range(20))
    index.store("w0", pages, 0)
    for page in pages[:-1]:
        index.remove("w0", [page])
        assert index.match(pages) == {}
    assert index.held("w0") == 1
    index.store("w0", pages[:-1], 1)
    assert index.match(pages) == {"w0": (20, 0)}


def test_pages_that_moved_to_the_host_tier_follow_those_in_the_device_tier() -> None:
    index, pages = PrefixIndex(), _chain(1, 2, 3, 4, 5, 6)
    index.store("w0", pages, 0)
    index.store("w0", pages[3:5], 1, parent=pages[2], tier=HOST)
    index.remove("w0", pages[3:][::-1])
    assert index.match(pages) == {"w0": (3, 2)}


def test_splits_are_merged_when_the_branch_goes() -> None:
    index = PrefixIndex()
    trunk, branch = _chain(1, 2, 3, 4, 5, 6), _chain(1, 2, 3, 9)
    index.store("w0", trunk, 0)
    before = index.size
    index.store("w0", branch, 1)
    assert index.size > before
    index.remove("w0", branch[3:])
    assert index.size == before
    _check(index._forest)


def test_namespaces_never_match_each_other() -> None:
    """IS-04: the salt is in the chain, so the same prompt under another one is another prompt."""
    index = PrefixIndex()
    index.store("w0", _chain(1, 2, 3, space="a"), 0)
    assert index.match(_chain(1, 2, 3, space="b")) == {}
    text = b"x" * 640
    assert not set(text_keys(text, b"a")) & set(text_keys(text, b"b"))
    assert text_keys(text, b"a") == text_keys(text + b"y" * 63, b"a")


def test_of_a_long_text_the_beginning_is_remembered() -> None:
    """One body must not hold up everybody, nor push all others out."""
    text = bytes(range(256)) * (1 << 12)
    assert text_keys(text * 2, b"") == text_keys(text, b"")
    assert len(text_keys(text, b"")) == 8192


def test_the_cap_costs_the_least_recently_used_tails() -> None:
    index = PrefixIndex(cap_bytes=100_000)
    old, hot, new = _chain(*range(300), space="o"), _chain(*range(200), space="h"), _chain(*range(300), space="n")
    index.store("w0", old, 0)
    index.store("w0", hot, 1)
    index.touch("w0", old, 2)
    index.touch("w0", hot, 3)
    index.store("w0", new, 4)
    assert index.size <= 100_000
    assert index.cut > 0
    assert index.match(new) == {"w0": (300, 0)}
    assert index.match(hot) == {"w0": (200, 0)}
    assert 0 < index.match(old)["w0"][0] < 300  # a head without its tail, never the other way round


@pytest.mark.parametrize("count", [5_000, pytest.param(50_000, marks=pytest.mark.full)])
def test_memory_stays_below_the_cap_whatever_is_stored(count: int) -> None:
    """RT-10: unique prompts of 2 kB; 50,000 of them under a cap of 10 MB. The estimate is one of real memory."""
    cap = 200 * count
    words = random.Random(0)
    prompts = (words.randbytes(2048) for _ in range(count))
    tracemalloc.start()
    try:
        index = PrefixIndex(cap_bytes=cap)
        readings = []
        for number, prompt in enumerate(prompts):
            index.store(f"w{number % 4}", text_keys(prompt, b""), number)
            if number % (count // 5) == count // 5 - 1:
                readings.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert index.size <= cap
    assert max(readings) <= 1.2 * cap
    assert all(later <= 1.1 * earlier for earlier, later in pairwise(readings))


def test_memory_of_shared_prefixes_is_estimated_too() -> None:
    tracemalloc.start()
    try:
        index = PrefixIndex()
        for worker in range(32):
            for number in range(40):
                index.store(f"w{worker}", _chain(1, 2, 3, number), worker)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used <= 1.3 * index.size


def test_a_snapshot_builds_the_same_index_again() -> None:
    index = PrefixIndex()
    for tokens in ((1, 2, 3, 4), (1, 2, 5), (7, 8)):
        index.store("w0", _chain(*tokens), 0)
        index.store("w1", _chain(*tokens[:2]), 0)
    index.store("w0", _chain(1, 2, 3), 0, tier=HOST)
    copy = PrefixIndex()
    for tier, parent, pages in index.dump("w0"):
        copy.store("w0", pages, 1, parent=parent, tier=tier)
    for tokens in ((1, 2, 3, 4), (1, 2, 5), (7, 8)):
        assert copy.match(_chain(*tokens)) == {"w0": index.match(_chain(*tokens))["w0"]}
    assert (copy.held("w0"), copy.held("w0", HOST)) == (index.held("w0"), index.held("w0", HOST))


def test_expiry_drops_what_was_not_used_since() -> None:
    index = PrefixIndex()
    index.store("w0", _chain(1, 2, 3), 0)
    index.store("w0", _chain(1, 2, 4), 5)
    index.expire("w0", 5)
    assert index.match(_chain(1, 2, 3)) == {"w0": (2, 0)}
    assert index.match(_chain(1, 2, 4)) == {"w0": (3, 0)}
    assert index.oldest("w0") == 5


def test_a_worker_that_left_leaves_nothing_and_its_place_is_used_again() -> None:
    index = PrefixIndex()
    for number in range(50):
        index.store(f"w{number}", _chain(1, 2, 3), 0)
        index.forget(f"w{number}")
    assert (index.pages, index.size, len(index._forest.held)) == (0, 0, 2)
    assert index.match(_chain(1)) == {}


def test_an_unknown_worker_has_nothing() -> None:
    index = PrefixIndex()
    index.remove("w9", _chain(1))
    index.touch("w9", _chain(1), 0)
    index.clear("w9")
    index.forget("w9")
    assert (index.held("w9"), index.oldest("w9"), index.dump("w9")) == (0, None, [])


@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_a_divergence_is_found_at_every_length(length: int) -> None:
    index = PrefixIndex()
    pages = _chain(*range(length), space="d")
    index.store("w0", pages, 0)
    for same in {0, 1, length // 2, length - 1}:
        asked = pages[:same] + _chain(*range(length - same), space="other")
        assert index.match(asked) == ({"w0": (same, 0)} if same else {})
