"""The free list: every page once, warm pages first, and a loud end for a page freed twice."""

from __future__ import annotations

import numpy as np
import pytest

from radixpd.core.page_allocator import PageAllocator


def test_hands_out_every_page_once() -> None:
    allocator = PageAllocator(10)
    pages = np.concatenate([allocator.allocate(3), allocator.allocate(0), allocator.allocate(7)])
    assert sorted(pages.tolist()) == list(range(10))
    assert pages.dtype == np.int32
    assert allocator.free_pages == 0


def test_pages_freed_last_come_first() -> None:
    allocator = PageAllocator(10)
    pages = allocator.allocate(6)
    allocator.free(pages[1:3])
    assert set(allocator.allocate(2).tolist()) == set(pages[1:3].tolist())


def test_more_than_there_is_trips() -> None:
    allocator = PageAllocator(2)
    with pytest.raises(AssertionError, match="3 pages asked, 2 free"):
        allocator.allocate(3)
    assert allocator.free_pages == 2


def test_double_free_trips_at_once_and_changes_nothing() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.free(pages[:1])
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages)
    assert allocator.free_pages == 3


def test_freeing_a_page_never_handed_out_trips() -> None:
    with pytest.raises(AssertionError, match="freed twice"):
        PageAllocator(4).free(np.array([2], dtype=np.int32))


def test_one_page_twice_in_one_call_trips() -> None:
    allocator = PageAllocator(4)
    page = allocator.allocate(2)[:1]
    with pytest.raises(AssertionError, match="twice at once"):
        allocator.free(np.concatenate([page, page]))


def test_what_was_handed_out_is_a_copy() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    kept = pages.copy()
    allocator.free(pages)
    allocator.allocate(1)
    allocator.free(allocator.allocate(2))
    assert pages.tolist() == kept.tolist()
