"""FlashInfer's index arrays for one step, from rows of (slot, start, length) and the page table.

Row i computes positions `starts[i] .. starts[i] + lengths[i] - 1` of its slot; its sequence is everything up to there. The arrays are what
FlashInfer's paged wrappers take (`paged_kv_indptr`, `paged_kv_indices`, `paged_kv_last_page_len`), and every other backend reads the same
ones. Whole-array numpy only: the engine calls this once per step, at any batch size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["PagedIndex", "paged_index"]


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """All int32, R rows. Fields as in `AttentionInputs`."""

    qo_indptr: np.ndarray  # [R + 1]
    indptr: np.ndarray  # [R + 1]
    indices: np.ndarray  # [indptr[-1]]
    last_page_len: np.ndarray  # [R], 1 .. page_size; 0 for an empty sequence


def paged_index(page_table: np.ndarray, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, page_size: int) -> PagedIndex:
    """`page_table` is int32 [slots, pages per slot]; entry j of a slot's row is the page of its positions j * page_size onwards."""
    totals = starts.astype(np.int64) + lengths
    pages = -(-totals // page_size)
    indptr = _offsets(pages)
    rows = np.repeat(slots, pages)
    columns = np.arange(indptr[-1]) - np.repeat(indptr[:-1], pages)
    return PagedIndex(
        qo_indptr=_offsets(lengths),
        indptr=indptr,
        indices=np.ascontiguousarray(page_table[rows, columns], dtype=np.int32),
        last_page_len=(totals - np.maximum(pages - 1, 0) * page_size).astype(np.int32),
    )


def _offsets(counts: np.ndarray) -> np.ndarray:
    """Running totals from 0, int32 [len + 1]."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets
