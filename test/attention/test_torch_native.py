"""torch-native paged attention against dense attention: any ragged batch, any page order, any chunking."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.attention.base import AttentionBackend, AttentionInputs
from radixpd.attention.paged_index import paged_index
from radixpd.attention.registry import BACKENDS, build_attention
from radixpd.errors import ConfigError


@dataclass
class Sequence:
    """All of a sequence's rows; `done` of them lie in the pool."""

    slot: int
    q: torch.Tensor  # [n, heads, head_dim]
    k: torch.Tensor  # [n, kv_heads, head_dim]
    v: torch.Tensor
    done: int = 0


def dense(sequence: Sequence) -> torch.Tensor:
    """Causal attention over the whole sequence in float64."""
    q, k, v = (x.double() for x in (sequence.q, sequence.k, sequence.v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    scores += torch.full(scores.shape[1:], float("-inf"), dtype=torch.float64).triu_(1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@dataclass
class Bench:
    """A pool with scattered pages and a backend over it."""

    page_size: int
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    slots: int = 6
    context: int = 200
    layers: int = 2
    dtype: torch.dtype = torch.float32
    stale: float = 1e4  # what an earlier owner has left in the pages

    def __post_init__(self) -> None:
        width = -(-self.context // self.page_size)
        shape = (self.slots * width + 5, 2, self.page_size, self.kv_heads, self.head_dim)
        self.pools = [torch.full(shape, self.stale, dtype=self.dtype) for _ in range(self.layers)]
        ids = np.random.default_rng(0).permutation(shape[0])[: self.slots * width]
        self.table = ids.reshape(self.slots, width).astype(np.int32)
        self.backend: AttentionBackend = build_attention("torch_native", self.pools, heads=self.heads, head_dim=self.head_dim)

    def sequence(self, slot: int, length: int) -> Sequence:
        generator = torch.Generator().manual_seed(100 * slot + length)
        parts = [
            torch.randn(length, heads, self.head_dim, generator=generator).to(self.dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        ]
        return Sequence(slot, *parts)

    def step(self, rows: list[tuple[Sequence, int]], layer: int = 1) -> list[torch.Tensor]:
        """Attend the next `n` tokens of each sequence in one batch."""
        spans = [slice(sequence.done, sequence.done + n) for sequence, n in rows]
        as_int32 = [np.array(x, dtype=np.int32) for x in zip(*((s.slot, s.done, n) for s, n in rows), strict=True)]
        index = paged_index(self.table, *as_int32, self.page_size)
        fields = (index.qo_indptr, index.indptr, index.indices, index.last_page_len)
        attend = self.backend.plan(AttentionInputs(*(torch.from_numpy(x) for x in fields), page_size=self.page_size))
        q, k, v = (torch.cat([getattr(s, name)[span] for (s, _), span in zip(rows, spans, strict=True)]) for name in "qkv")
        # As the model hands them over: slices of one wide tensor.
        wide = torch.cat((q, k, v), dim=1)
        q, k, v = wide.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        for sequence, n in rows:
            sequence.done += n
        return list(attend(layer, q, k, v).split([n for _, n in rows]))


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 129, 200])
def test_prefill_in_blocks_equals_dense(length: int, page_size: int) -> None:
    bench = Bench(page_size)
    sequence = bench.sequence(0, length)
    close(bench.step([(sequence, length)])[0], dense(sequence))


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (7, 7), (14, 2), (8, 4)])
def test_any_grouping_of_heads(heads: tuple[int, int]) -> None:
    bench = Bench(4, heads=heads[0], kv_heads=heads[1])
    long, short = bench.sequence(0, 70), bench.sequence(1, 9)
    first = bench.step([(long, 66), (short, 7)])
    rest = [bench.step([(long, 1), (short, 1)]) for _ in range(2)]
    close(torch.cat([first[0], *(x[0] for x in rest)]), dense(long)[:68])
    close(torch.cat([first[1], *(x[1] for x in rest)]), dense(short))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mix_of_rows_and_any_chunking_equals_dense(data: st.DataObject) -> None:
    bench = Bench(data.draw(st.sampled_from([1, 3, 16])))
    sequences = [bench.sequence(slot, data.draw(st.integers(1, 150))) for slot in range(data.draw(st.integers(1, 5)))]
    outputs: dict[int, list[torch.Tensor]] = {sequence.slot: [] for sequence in sequences}
    while open_ := [sequence for sequence in sequences if sequence.done < len(sequence.q)]:
        chosen = data.draw(st.permutations(open_))[: data.draw(st.integers(1, len(open_)))]
        rows = []
        for sequence in chosen:
            left = len(sequence.q) - sequence.done
            rows.append((sequence, min(left, data.draw(st.sampled_from([1, 1, 5, 64, 150])))))
        if len(outputs[chosen[0].slot]) > 12:  # bound the number of steps
            rows = [(sequence, len(sequence.q) - sequence.done) for sequence in chosen]
        for (sequence, _), out in zip(rows, bench.step(rows), strict=True):
            outputs[sequence.slot].append(out)
    for sequence in sequences:
        close(torch.cat(outputs[sequence.slot]), dense(sequence))


def test_a_large_decode_batch_of_unlike_lengths_equals_dense() -> None:
    bench = Bench(16, slots=24, context=700, kv_heads=2, head_dim=64)
    lengths = [1 + (slot * 397) % 690 for slot in range(24)]
    sequences = [bench.sequence(slot, length) for slot, length in enumerate(lengths)]
    for sequence in sequences:
        if len(sequence.q) > 1:
            bench.step([(sequence, len(sequence.q) - 1)])
    for sequence, out in zip(sequences, bench.step([(sequence, 1) for sequence in sequences]), strict=True):
        close(out[0], dense(sequence)[-1])


def test_only_the_new_tokens_of_one_layer_are_written() -> None:
    bench = Bench(4)
    sequence = bench.sequence(2, 11)
    bench.step([(sequence, 6)])
    before = [pool.clone() for pool in bench.pools]
    bench.step([(sequence, 5)])
    assert torch.equal(bench.pools[0], before[0])
    changed = (bench.pools[1] != before[1]).any(-1).any(-1)  # [pages, 2, page_size]
    wanted = torch.zeros_like(changed)
    for position in range(6, 11):
        page, offset = int(bench.table[2, position // 4]), position % 4
        wanted[page, :, offset] = True
        assert torch.equal(bench.pools[1][page, 0, offset], sequence.k[position])
        assert torch.equal(bench.pools[1][page, 1, offset], sequence.v[position])
    assert torch.equal(changed, wanted)


def test_bfloat16_is_as_close_as_its_precision_allows() -> None:
    bench = Bench(16, dtype=torch.bfloat16, head_dim=64, stale=0.0)
    sequence = bench.sequence(0, 150)
    out = torch.cat([bench.step([(sequence, 148)])[0], *(bench.step([(sequence, 1)])[0] for _ in range(2))])
    assert out.dtype == torch.bfloat16
    assert (out.double() - dense(sequence)).abs().max() < 0.03


def test_an_unknown_backend_names_the_known_ones() -> None:
    assert "torch_native" in BACKENDS
    with pytest.raises(ConfigError, match=r"--attention-backend flash3 is not known .*torch_native"):
        build_attention("flash3", [torch.zeros(1, 2, 1, 1, 2)], heads=1, head_dim=2)
