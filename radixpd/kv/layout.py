"""The shape of KV memory as plain data, so that brain, pool and (later) peers agree on it without sharing tensors.

One tensor per layer, `[pages, 2, page_size, kv_heads, head_dim]` (K at index 0, V at 1; FlashInfer's NHD order): a layer's page is one
contiguous run of bytes, and adjacent pages are one copy.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["DTYPE_BYTES", "KVLayout"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Everything two processes must agree on before a page of one may be read by the other."""

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    order: str = "NHD"

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer, K and V together."""
        return 2 * self.page_size * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.layers * self.page_bytes // self.page_size

    @property
    def fingerprint(self) -> str:
        """A short name of this layout; equal layouts have equal names."""
        text = f"{self.layers}/{self.kv_heads}/{self.head_dim}/{self.page_size}/{self.dtype}/{self.order}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
