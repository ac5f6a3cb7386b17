"""The attention seam: a backend plans once per step on the host, and the model calls the returned `attend` once per layer.

`attend(layer, q, k, v)` first stores the new tokens' k and v in the KV pool, then lets every query row see the positions of its own
sequence up to and including its own (causal, aligned to the end). Prefill, chunked prefill, prefix hits and decode are one call. The index
tensors are FlashInfer's (all int32): see `AttentionInputs`. The model never imports this package; it is handed `attend` as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Attend", "AttentionBackend", "AttentionInputs"]

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> [tokens, heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One step's ragged batch of B sequences, T new tokens in all. Host tensors, int32.

    Sequence i owns query rows `qo_indptr[i] : qo_indptr[i + 1]` and pages `indices[indptr[i] : indptr[i + 1]]` in logical order;
    its last page holds `last_page_len[i]` (1 .. page_size) valid tokens, the new ones included.
    """

    qo_indptr: torch.Tensor  # [B + 1]
    indptr: torch.Tensor  # [B + 1]
    indices: torch.Tensor  # [indptr[-1]]
    last_page_len: torch.Tensor  # [B]
    page_size: int


class AttentionBackend(Protocol):
    """Holds the per-layer pool tensors `[pages, 2, page_size, kv_heads, head_dim]` it was built over."""

    def plan(self, inputs: AttentionInputs) -> Attend:
        """Prepare one step; the returned function is valid until the next `plan`."""
        ...
