"""Paged attention in plain torch: the reference for every faster kernel, and the default on CPUs.

Two paths. *Decode* rows (one query) are batched: sequences of similar length are gathered side by side and attended with two batched
GEMMs. *Prefill* rows go one sequence at a time in blocks of queries, so nothing above the diagonal's blocks is computed and memory stays
bounded. Softmax and all sums are float32. torch's own SDPA is avoided: in bfloat16 it is several times slower here.

Invariant: padding is masked, so a sequence's result does not depend on its neighbours beyond float rounding. The pool must hold finite
numbers (it starts as zeros), because masked positions are still multiplied, by zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixpd.attention.base import Attend, AttentionInputs

__all__ = ["TorchNative"]

_QUERY_BLOCK = 64
_GATHER_BYTES = 4 << 20  # of one group's keys and values; larger ones fall out of the caches
_LENGTH_SPREAD = 1.25  # the longest sequence of a group over its shortest


@dataclass(frozen=True, slots=True)
class _Batch:
    """`AttentionInputs` in numpy: per sequence its first query row, new tokens, length, and pages `pages[offsets[i] : offsets[i + 1]]`."""

    first: np.ndarray  # [B]
    queries: np.ndarray  # [B]
    lengths: np.ndarray  # [B]
    offsets: np.ndarray  # [B + 1]
    pages: np.ndarray  # int64

    @property
    def counts(self) -> np.ndarray:
        """Pages per sequence."""
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class _Group:
    """Decode rows attended together. B rows, all padded to `pages` pages."""

    rows: torch.Tensor | None  # int64 [B], which query rows; None: all rows in order
    gather: torch.Tensor  # int64 [2 * B * pages], pool half-pages: all K, then all V
    mask: torch.Tensor  # [B, 1, pages * page_size], 0 where visible, -inf elsewhere
    spread: torch.Tensor  # zeros [B, kv_heads, group, kv_heads, head_dim], the queries go on its diagonal


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several new tokens: query rows `first .. end`, attending `length` positions."""

    first: int
    end: int
    length: int
    gather: torch.Tensor  # int64 [2 * pages]


@dataclass(frozen=True, slots=True)
class _Step:
    keys: torch.Tensor  # int64 [T], pool rows (one token of one layer) that take the new keys
    values: torch.Tensor
    groups: list[_Group]
    prefills: list[_Prefill]


class TorchNative:
    """`AttentionBackend` over one pool tensor `[pages, 2, page_size, kv_heads, head_dim]` per layer; `heads` query heads."""

    def __init__(self, pools: Sequence[torch.Tensor], heads: int, head_dim: int) -> None:
        pages, _, self._page_size, self._kv_heads, width = pools[0].shape
        assert width == head_dim, f"the pool's heads are {width} wide, the model's {head_dim}"
        assert heads % self._kv_heads == 0, f"{heads} query heads on {self._kv_heads} KV heads"
        self._heads, self._head_dim, self._group = heads, head_dim, heads // self._kv_heads
        self._scale = head_dim**-0.5
        self._dtype, self._device = pools[0].dtype, pools[0].device
        self._by_token = [pool.view(pages * 2 * self._page_size, -1) for pool in pools]
        self._by_half_page = [pool.view(pages * 2, -1) for pool in pools]
        self._triangle = torch.full((_QUERY_BLOCK, _QUERY_BLOCK), float("-inf"), dtype=self._dtype, device=self._device).triu_(1)
        self._gathered = torch.empty(0, dtype=self._dtype, device=self._device)

    def plan(self, inputs: AttentionInputs) -> Attend:
        """Sort the step's rows into decode groups and prefills; numpy on the host."""
        assert inputs.page_size == self._page_size, f"planned for pages of {inputs.page_size}, the pool has {self._page_size}"
        qo, offsets = inputs.qo_indptr.numpy(), inputs.indptr.numpy()
        lengths = (np.diff(offsets) - 1) * self._page_size + inputs.last_page_len.numpy()
        batch = _Batch(qo[:-1], np.diff(qo), lengths, offsets, inputs.indices.numpy().astype(np.int64))
        keys = self._token_rows(batch)
        groups = self._groups(batch)
        prefills = [self._one_prefill(batch, int(i)) for i in np.flatnonzero(batch.queries > 1)]
        self._reserve([x.gather for x in groups] + [x.gather for x in prefills])
        step = _Step(self._tensor(keys), self._tensor(keys + self._page_size), groups, prefills)
        return lambda layer, q, k, v: self._attend(step, layer, q, k, v)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _reserve(self, gathers: list[torch.Tensor]) -> None:
        """Grow the buffer that `_read` fills to this step's largest read."""
        largest = max((len(gather) for gather in gathers), default=0) * self._by_half_page[0].shape[1]
        if largest > len(self._gathered):
            self._gathered = torch.empty(largest, dtype=self._dtype, device=self._device)

    def _token_rows(self, batch: _Batch) -> np.ndarray:
        """Pool row of every new token's key, int64 [T]."""
        before = batch.lengths - batch.queries
        positions = np.arange(batch.queries.sum()) - np.repeat(batch.first - before, batch.queries)
        page = batch.pages[np.repeat(batch.offsets[:-1], batch.queries) + positions // self._page_size]
        rows: np.ndarray = page * (2 * self._page_size) + positions % self._page_size
        return rows

    def _gather(self, pages: np.ndarray) -> torch.Tensor:
        """Half-pages to read for these pages: the K halves, then the V halves."""
        halves = pages.reshape(-1) * 2
        return self._tensor(np.concatenate((halves, halves + 1)))

    def _one_prefill(self, batch: _Batch, i: int) -> _Prefill:
        first = int(batch.first[i])
        gather = self._gather(batch.pages[batch.offsets[i] : batch.offsets[i + 1]])
        return _Prefill(first, first + int(batch.queries[i]), int(batch.lengths[i]), gather)

    def _groups(self, batch: _Batch) -> list[_Group]:
        """Longest first; a group ends where padding or its gather buffer would grow too large."""
        counts = batch.counts
        rows = np.flatnonzero(batch.queries == 1)
        order = rows[np.argsort(-counts[rows], kind="stable")]
        page_bytes = 2 * self._by_half_page[0].shape[1] * self._by_half_page[0].element_size()
        groups = []
        while len(order):
            longest = int(counts[order[0]])
            similar = int(np.count_nonzero(counts[order] * _LENGTH_SPREAD >= longest))
            size = min(similar, max(1, _GATHER_BYTES // (longest * page_bytes)))
            groups.append(self._one_group(batch, np.sort(order[:size]), longest))
            order = order[size:]
        return groups

    def _one_group(self, batch: _Batch, members: np.ndarray, longest: int) -> _Group:
        columns = np.arange(longest)
        inside = columns < batch.counts[members, None]
        # A shorter row repeats its own first page: mapped, finite, and masked below.
        padded = batch.pages[batch.offsets[members, None] + np.where(inside, columns, 0)]
        hidden = np.arange(longest * self._page_size) >= batch.lengths[members, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        everyone = len(members) == batch.queries.sum()
        return _Group(
            rows=None if everyone else self._tensor(batch.first[members].astype(np.int64)),
            gather=self._gather(padded),
            mask=mask[:, None].to(self._device),
            spread=torch.zeros(
                (len(members), self._kv_heads, self._group, self._kv_heads, self._head_dim), dtype=self._dtype, device=self._device
            ),
        )

    def _attend(self, step: _Step, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pool = self._by_token[layer]
        pool.index_copy_(0, step.keys, k.reshape(len(k), -1))
        pool.index_copy_(0, step.values, v.reshape(len(v), -1))
        if len(step.groups) == 1 and step.groups[0].rows is None:
            return self._decode(step.groups[0], layer, q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in step.groups:
            assert group.rows is not None, "a group of all rows is the only one"
            out.index_copy_(0, group.rows, self._decode(group, layer, q.index_select(0, group.rows)))
        for prefill in step.prefills:
            self._prefill(prefill, layer, q[prefill.first : prefill.end], out[prefill.first : prefill.end])
        return out

    def _read(self, layer: int, gather: torch.Tensor) -> torch.Tensor:
        """Copy half-pages into the reused buffer: a fresh one of this size would cost more in page faults than in copying."""
        width = self._by_half_page[layer].shape[1]
        buffer = self._gathered[: len(gather) * width].view(len(gather), width)
        return torch.index_select(self._by_half_page[layer], 0, gather, out=buffer)

    def _decode(self, group: _Group, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [B, heads, head_dim] -> the same shape.

        K and V stay as gathered, all KV heads side by side; each query is set in its own KV head's columns of an otherwise zero row. The
        products with zeros are cheaper than rearranging K and V.
        """
        batch, width = len(q), self._kv_heads * self._head_dim
        keys, values = self._read(layer, group.gather).view(2, batch, -1, width).unbind()
        grouped = q.reshape(batch, self._kv_heads, self._group, self._head_dim)
        group.spread.diagonal(dim1=1, dim2=3).copy_(grouped.permute(0, 2, 3, 1))
        spread = group.spread.view(batch, self._heads, width)
        scores = torch.baddbmm(group.mask, spread, keys.transpose(1, 2), alpha=self._scale)  # [B, heads, positions]
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        wide = torch.bmm(weights, values).view(group.spread.shape)
        return wide.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(q.shape)

    def _prefill(self, prefill: _Prefill, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """q and out [n, heads, head_dim], the last n of `length` positions."""
        read = self._read(layer, prefill.gather).view(2, -1, self._kv_heads, self._head_dim)
        keys, values = read[:, : prefill.length].transpose(1, 2).contiguous()  # [kv_heads, length, head_dim]
        shape = (len(q), self._kv_heads, self._group, self._head_dim)
        queries = (q * self._scale).view(shape).permute(1, 2, 0, 3)  # [kv_heads, group, n, head_dim]
        result = out.view(shape).permute(1, 2, 0, 3)
        start = prefill.length - len(q)
        for first in range(0, len(q), _QUERY_BLOCK):
            block = queries[:, :, first : first + _QUERY_BLOCK]
            n = block.shape[2]
            seen = start + first + n
            scores = torch.bmm(block.reshape(self._kv_heads, -1, self._head_dim), keys[:, :seen].transpose(1, 2))
            scores.view(self._kv_heads, self._group, n, seen)[..., seen - n :].add_(self._triangle[:n, :n])
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            result[:, :, first : first + n] = torch.bmm(weights, values[:, :seen]).view(block.shape)
