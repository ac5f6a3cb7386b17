"""Attention backends by name (`--attention-backend`). A factory imports its backend only when asked, so an absent package hurts nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from radixpd.attention.base import AttentionBackend
from radixpd.errors import ConfigError

__all__ = ["BACKENDS", "build_attention"]

Factory = Callable[[Sequence[torch.Tensor], int, int], AttentionBackend]


def _torch_native(pools: Sequence[torch.Tensor], heads: int, head_dim: int) -> AttentionBackend:
    from radixpd.attention.torch_native import TorchNative

    return TorchNative(pools, heads, head_dim)


BACKENDS: dict[str, Factory] = {"torch_native": _torch_native}


def build_attention(name: str, pools: Sequence[torch.Tensor], *, heads: int, head_dim: int) -> AttentionBackend:
    """Build backend `name` over one pool tensor per layer; `heads` counts this rank's query heads."""
    if name not in BACKENDS:
        raise ConfigError(f"--attention-backend {name} is not known (known: {', '.join(BACKENDS)})")
    return BACKENDS[name](pools, heads, head_dim)
