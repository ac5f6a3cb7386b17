"""Draw one token per row from filtered logits: temperature, then top-k, then top-p, then min-p, then one uniform number.

The number comes from (seed, position) and picks a token by inverse CDF *in vocabulary order*: tiny differences of the logits between batch
shapes move the borders by as little, while a CDF over sorted tokens would jump where two neighbours swap. A filter keeps every token that
ties with its last one. Every operation works row by row with a fixed order of summation, so a row's token does not depend on its batch.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["draw", "least_of_min_p", "least_of_top_k", "least_of_top_p", "uniforms"]

HEADS = (128, 2048)  # a nucleus is nearly always this small, and sorting a whole vocabulary costs 30 times as much


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in the open interval (0, 1) per (seed, position): float64, 48 random bits (splitmix64's output function)."""
    state = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    bits: np.ndarray = state >> np.uint64(16)
    return (bits.astype(np.float64) + 0.5) * 2.0**-48


def draw(
    logits: torch.Tensor,
    *,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    uniform: np.ndarray,
) -> np.ndarray:
    """One token per row of float32 `logits [n, vocab]`; parameters are `[n]`. A filter skips the rows where it is neutral."""
    peak = logits.amax(-1, keepdim=True).nan_to_num_(neginf=0.0)
    probs = torch.softmax((logits - peak) / torch.from_numpy(temperature)[:, None], dim=-1)
    for active, least_kept, limits in (
        (top_k < probs.shape[-1], least_of_top_k, top_k),
        (top_p < 1.0, least_of_top_p, top_p),
        (min_p > 0.0, least_of_min_p, min_p),
    ):
        if active.any():
            rows = torch.from_numpy(np.flatnonzero(active))
            least = torch.zeros(len(probs), 1)
            least[rows] = least_kept(probs if active.all() else probs[rows], torch.from_numpy(limits[active]))
            probs.masked_fill_(probs < least, 0.0)
    mass = probs.cumsum(-1, dtype=torch.float64)
    aim = mass[:, -1:] * torch.from_numpy(uniform)[:, None]
    tokens = torch.searchsorted(mass, aim, right=True)[:, 0]
    # Past the end only where a row has no mass at all.
    return tokens.clamp_(max=probs.shape[-1] - 1).numpy()


def least_of_top_k(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The `top_k`-th probability of each row, `[n, 1]`."""
    return probs.topk(int(top_k.max()), dim=-1).values.gather(-1, top_k[:, None] - 1)


def least_of_top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest probability among the fewest likeliest tokens (at least one) that hold `top_p` of the row's mass, `[n, 1]`."""
    need = probs.cumsum(-1, dtype=torch.float64)[:, -1] * top_p
    least = torch.zeros(len(probs), 1)
    left = torch.arange(len(probs))
    vocab = probs.shape[-1]
    for size in (*(head for head in HEADS if head < vocab), vocab):
        values = probs[left].topk(size, dim=-1).values
        mass = values.cumsum(-1, dtype=torch.float64)
        last = (mass < need[left, None]).sum(-1, keepdim=True)
        least[left] = values.gather(-1, last.clamp(max=size - 1))
        left = left[last[:, 0] == size]
        if not len(left):
            break
    return least


def least_of_min_p(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """`min_p` times the likeliest, `[n, 1]`."""
    return probs.amax(-1, keepdim=True) * min_p[:, None]
