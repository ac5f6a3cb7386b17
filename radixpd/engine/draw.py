"""Draw one token per row from filtered logits: temperature, then top-k, then top-p, then min-p, then one uniform number.

The number comes from (seed, position) and picks a token by inverse CDF *in vocabulary order*: tiny differences of the logits between batch
shapes move the borders by as little, while a CDF over sorted tokens would jump where two neighbours swap. A filter keeps every token that
ties with its last one. Every operation works row by row with a fixed order of summation, so a row's token does not depend on its batch.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["cut_min_p", "cut_top_k", "cut_top_p", "draw", "uniforms"]

HEADS = (128, 2048)  # a nucleus is nearly always this small, and sorting a whole vocabulary costs 30 times as much


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in the open interval (0, 1) per (seed, position): float64, 48 random bits (splitmix64's output function)."""
    state = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    return ((state >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


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
    for rows, cut, limits in (
        (top_k < probs.shape[-1], cut_top_k, top_k),
        (top_p < 1.0, cut_top_p, top_p),
        (min_p > 0.0, cut_min_p, min_p),
    ):
        if rows.any():
            some = torch.from_numpy(np.flatnonzero(rows))
            probs[some] = cut(probs[some], torch.from_numpy(limits[rows]))
    mass = probs.cumsum(-1, dtype=torch.float64)
    aim = mass[:, -1:] * torch.from_numpy(uniform)[:, None]
    tokens = torch.searchsorted(mass, aim, right=True)[:, 0]
    # Past the end only where a row has no mass at all.
    return tokens.clamp_(max=probs.shape[-1] - 1).numpy()


def cut_top_k(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero all but the `top_k` likeliest of each row."""
    values = probs.topk(int(top_k.max()), dim=-1).values
    return probs.where(probs >= values.gather(-1, top_k[:, None] - 1), 0.0)


def cut_top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the fewest likeliest tokens that hold `top_p` of the row's mass (at least one)."""
    need = probs.cumsum(-1, dtype=torch.float64)[:, -1] * top_p
    least = torch.zeros(len(probs), 1)
    open_rows = torch.arange(len(probs))
    vocab = probs.shape[-1]
    for size in (*(head for head in HEADS if head < vocab), vocab):
        values = probs[open_rows].topk(size, dim=-1).values
        mass = values.cumsum(-1, dtype=torch.float64)
        last = (mass < need[open_rows, None]).sum(-1, keepdim=True)
        least[open_rows] = values.gather(-1, last.clamp(max=size - 1))
        open_rows = open_rows[last[:, 0] == size]
        if not len(open_rows):
            break
    return probs.where(probs >= least, 0.0)


def cut_min_p(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Zero what is less likely than `min_p` times the likeliest."""
    return probs.where(probs >= probs.amax(-1, keepdim=True) * min_p[:, None], 0.0)
