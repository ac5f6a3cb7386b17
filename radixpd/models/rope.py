"""Rotary position embedding in the half-split form (the two halves of a head are the two coordinates).

`Rope` turns positions into cos and sin once per step; `rotate` applies them to all query and key heads of a layer in one go. No table over
the context is kept: a step's angles cost less than the memory.
"""

from __future__ import annotations

import math

import torch

from radixpd.models.spec import RopeSpec

__all__ = ["Rope", "Rotation", "inverse_frequencies", "rotate"]

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sign-folded sin, both [tokens, 1, head_dim] in the model's dtype."""


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Angle per position of every coordinate pair, float32 [head_dim / 2]."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed down by `factor`, short ones kept, those between blended by how often they turn in the old context."""
    turns = rope.original_context * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """A linear ramp over the coordinate pairs, from kept (fast turning) to slowed down by `factor`."""
    head_dim = 2 * len(plain)

    def pair(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    slowed = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return slowed * plain / rope.factor + (1 - slowed) * plain


class Rope:
    """Positions -> rotation."""

    def __init__(self, rope: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._scale = rope.attention_factor
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """`positions` [tokens], any integer type."""
        angles = positions[:, None].float() * self._frequencies  # [tokens, head_dim / 2]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        folded = torch.cat((-sin, sin), dim=-1)
        return torch.cat((cos, cos), dim=-1).to(self._dtype)[:, None], folded.to(self._dtype)[:, None]


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate [tokens, heads, head_dim]. Rolling by half a head swaps its halves; the sign sits in the folded sin."""
    cos, sin = rotation
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)
