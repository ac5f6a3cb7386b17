"""Choose tokens: a true argmax for greedy rows, a reproducible draw for the others.

Greedy means the largest adjusted logit; no filter has a say. Broken logits (NaN, infinities) still give a token id, never an exception:
one bad row must not end the server. Called by `Runner.step` on one rank, after the forward.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from radixpd.core.step import SlotBegin
from radixpd.engine.draw import draw, uniforms
from radixpd.engine.sampling_state import SamplingState

__all__ = ["Sampler"]

HUGE = 1e30  # stands in for infinity: large beyond doubt, yet safe to scale
NO_MASKS: Mapping[int, np.ndarray] = {}
DRAW_ROWS = 4  # rows drawn at a time: larger temporaries leave the cache and fault in fresh memory on every call


class Sampler:
    """Sampling for all slots of one runner."""

    def __init__(self, *, slots: int, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.state = SamplingState(slots=slots, vocab_size=vocab_size, eos_ids=eos_ids)

    def begin(self, begin: SlotBegin) -> None:
        """A slot starts, or starts again."""
        self.state.begin(begin)

    def sample(
        self,
        logits: torch.Tensor,
        *,
        which: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        masks: Mapping[int, np.ndarray] = NO_MASKS,
    ) -> np.ndarray:
        """Token of sample i, int32 `[S]`: from row `which[i]` of float32 `logits [U, vocab]` (left as it is), for slot `slots[i]`.

        `positions[i]` is where the token goes in its sequence; output tokens before it decide `min_new_tokens`, it and the seed the draw.
        `masks`: by slot, which tokens its grammar allows, a bit for each.
        """
        best = first_max(logits)
        peaks: np.ndarray = logits.numpy()[np.arange(len(best)), best]
        # A NaN counts as the maximum, so a finite maximum proves that its row has neither NaN nor infinity.
        if not np.isfinite(peaks).all():
            logits = logits.nan_to_num(nan=-HUGE, posinf=HUGE, neginf=-HUGE)
            best = first_max(logits)
        tokens: np.ndarray = best[which].astype(np.int32)
        shaped = np.flatnonzero(~self.state.plain[slots])
        for rows in (shaped[start : start + DRAW_ROWS] for start in range(0, len(shaped), DRAW_ROWS)):
            tokens[rows] = self._shape_and_choose(logits[torch.from_numpy(which[rows])], slots[rows], positions[rows], masks)
        self.state.record(slots, tokens)
        return tokens

    def _shape_and_choose(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, masks: Mapping[int, np.ndarray]
    ) -> np.ndarray:
        state = self.state
        made = positions - state.prompt_length[slots]
        for row, slot in enumerate(slots.tolist()):
            adjustment = state.adjustments.get(slot)
            if adjustment is not None:
                adjustment.apply(logits[row], int(made[row]))
            if slot in masks:
                restrict(logits[row].numpy(), masks[slot])
        greedy = state.greedy[slots]
        tokens = np.empty(len(slots), dtype=np.int32)
        tokens[greedy] = first_max(logits[torch.from_numpy(greedy)])
        if not greedy.all():
            drawn = slots[~greedy]
            tokens[~greedy] = draw(
                logits[torch.from_numpy(~greedy)],
                temperature=state.temperature[drawn],
                top_k=state.top_k[drawn],
                top_p=state.top_p[drawn],
                min_p=state.min_p[drawn],
                uniform=uniforms(state.seed[drawn], positions[~greedy]),
            )
        return tokens


def restrict(logits: np.ndarray, mask: np.ndarray) -> None:
    """Take away from one row of logits `[vocab]` what the bits of `mask` do not allow. Where everything that they allow was barred already
    (an end of sequence before `min_new_tokens`), the grammar has the last word."""
    allowed = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little").view(bool)
    np.putmask(logits, ~allowed, -np.inf)
    if np.isneginf(logits.max()):
        logits[allowed] = 0.0


def first_max(logits: torch.Tensor) -> np.ndarray:
    """Index of each row's first maximum. NumPy's argmax is several times faster than torch's on a CPU."""
    best: np.ndarray = logits.numpy().argmax(axis=-1)
    return best
