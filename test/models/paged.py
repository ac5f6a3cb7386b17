"""A model on a paged pool with shuffled page ids: runs ragged steps through the real torch-native attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixpd.attention.base import AttentionInputs
from radixpd.attention.paged_index import paged_index
from radixpd.attention.torch_native import TorchNative
from radixpd.models.decoder import Decoder

__all__ = ["Alone", "Paged"]


@dataclass(frozen=True)
class Alone:
    """One rank of one."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Paged:
    """`slots` sequences of up to `context` tokens; every sequence's pages are scattered over the pool."""

    def __init__(self, decoder: Decoder, *, page_size: int, slots: int = 4, context: int = 128) -> None:
        self.decoder, self.page_size = decoder, page_size
        width = -(-context // page_size)
        shape = (slots * width + 3, 2, page_size, decoder.kv_heads, decoder.spec.head_dim)
        self.pools = [torch.zeros(shape, dtype=decoder.dtype) for _ in range(decoder.spec.layers)]
        ids = np.random.default_rng(page_size).permutation(len(self.pools[0]))[: slots * width]
        self.table = ids.reshape(slots, width).astype(np.int32)
        self.attention = TorchNative(self.pools, decoder.heads, decoder.spec.head_dim)

    def step(self, rows: Sequence[tuple[int, int, torch.Tensor]]) -> list[torch.Tensor]:
        """Compute rows (slot, start, tokens) in one batch; the logits of each row's tokens."""
        slots = np.array([slot for slot, _, _ in rows], dtype=np.int32)
        starts = np.array([start for _, start, _ in rows], dtype=np.int32)
        lengths = np.array([len(tokens) for _, _, tokens in rows], dtype=np.int32)
        index = paged_index(self.table, slots, starts, lengths, self.page_size)
        inputs = AttentionInputs(
            qo_indptr=torch.from_numpy(index.qo_indptr),
            indptr=torch.from_numpy(index.indptr),
            indices=torch.from_numpy(index.indices),
            last_page_len=torch.from_numpy(index.last_page_len),
            page_size=self.page_size,
        )
        positions = torch.cat([torch.arange(start, start + len(tokens)) for _, start, tokens in rows])
        with torch.inference_mode():
            hidden = self.decoder.forward(torch.cat([tokens for _, _, tokens in rows]), positions, self.attention.plan(inputs))
            return list(self.decoder.logits(hidden).split(lengths.tolist()))
