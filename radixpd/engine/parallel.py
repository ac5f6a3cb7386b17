"""How ranks of one model talk to each other. Layers see only the `Parallel` protocol of `models.layers`.

`Solo` is rank 0 of 1: every collective is the identity.
"""

from __future__ import annotations

import torch

__all__ = ["Solo"]


class Solo:
    """One rank that holds the whole model."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        return tensor
