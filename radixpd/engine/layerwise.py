"""Tell somebody each layer whose KV a forward has written, so that it can leave while the next layer is computed.

The model calls `attend` once a layer, and `attend` stores the layer's keys and values before it returns; so the place to listen is right
behind it. Used by the runner around the function that its attention backend has planned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixpd.attention.base import Attend

__all__ = ["telling"]


def telling(attend: Attend, layer_done: Callable[[int], None]) -> Attend:
    """The same `attend`; `layer_done(layer)` follows each call. It is called on the forward's thread and must not wait."""

    def told(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = attend(layer, q, k, v)
        layer_done(layer)
        return out

    return told
