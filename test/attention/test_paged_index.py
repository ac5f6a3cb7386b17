"""The index builder: against a row-by-row loop on any batch, and FlashInfer's own conventions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.attention.paged_index import paged_index

SLOTS, CONTEXT = 12, 40


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, np.ndarray, list[int], list[int], list[int]]:
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    width = -(-CONTEXT // page_size)
    table = np.random.default_rng(draw(st.integers(0, 9))).permutation(SLOTS * width).reshape(SLOTS, width).astype(np.int32)
    slots = draw(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=SLOTS))
    ends = [draw(st.integers(0, CONTEXT)) for _ in slots]
    starts = [draw(st.integers(0, end)) for end in ends]
    return page_size, table, slots, starts, [end - start for end, start in zip(ends, starts, strict=True)]


@settings(max_examples=200, deadline=None)
@given(batches())
def test_equals_a_loop_over_rows(batch: tuple[int, np.ndarray, list[int], list[int], list[int]]) -> None:
    page_size, table, slots, starts, lengths = batch
    index = paged_index(table, *(np.array(x, dtype=np.int32) for x in (slots, starts, lengths)), page_size)
    for field in (index.qo_indptr, index.indptr, index.indices, index.last_page_len):
        assert field.dtype == np.int32
        assert field.flags.c_contiguous
    assert len(index.qo_indptr) == len(index.indptr) == len(slots) + 1
    assert index.qo_indptr[0] == index.indptr[0] == 0
    assert index.indptr[-1] == len(index.indices)
    for row, (slot, start, length) in enumerate(zip(slots, starts, lengths, strict=True)):
        pages = index.indices[index.indptr[row] : index.indptr[row + 1]]
        total = start + length
        assert index.qo_indptr[row + 1] - index.qo_indptr[row] == length
        assert pages.tolist() == [table[slot, page] for page in range(-(-total // page_size))]
        # FlashInfer: kv_len = max(pages - 1, 0) * page_size + last_page_len
        assert max(len(pages) - 1, 0) * page_size + index.last_page_len[row] == total
        assert (1 if total else 0) <= index.last_page_len[row] <= page_size


@pytest.mark.parametrize(("total", "last"), [(1, 1), (15, 15), (16, 16), (17, 1), (32, 16)])
def test_a_full_last_page_counts_page_size_not_zero(total: int, last: int) -> None:
    table = np.arange(8, dtype=np.int32).reshape(1, 8)
    one = np.array([0], dtype=np.int32)
    index = paged_index(table, one, np.array([total - 1], dtype=np.int32), np.array([1], dtype=np.int32), 16)
    assert index.last_page_len.tolist() == [last]
    assert len(index.indices) == -(-total // 16)
