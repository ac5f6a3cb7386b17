"""Sampling parameters of every slot, laid out as arrays so that a batch is read by one index, plus the few slots that need more.

Invariant: whatever a slot's next token depends on is set by `begin` and `record` alone; randomness is (seed, position), never a generator,
so a token is the same alone, in any batch, and after a retraction. Held by `Sampler`.
"""

from __future__ import annotations

import numpy as np

from radixpd.core.request import LogprobParams, sample_seed
from radixpd.core.step import SlotBegin
from radixpd.engine.adjust import Adjustment, needs_adjustment

__all__ = ["SamplingState"]

GREEDY_BELOW = 1e-6  # a temperature under this cannot be told from 0 in float32


class SamplingState:
    """One entry per slot in every array."""

    def __init__(self, *, slots: int, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.greedy = np.ones(slots, dtype=bool)
        self.plain = np.ones(slots, dtype=bool)  # greedy on untouched logits
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_k = np.full(slots, vocab_size, dtype=np.int64)
        self.top_p = np.ones(slots, dtype=np.float64)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.prompt_length = np.zeros(slots, dtype=np.int64)
        self.adjustments: dict[int, Adjustment] = {}
        self.logprobs: list[LogprobParams | None] = [None] * slots

    def begin(self, begin: SlotBegin) -> None:
        """Forget the slot's last request and take the new one, with whatever output it already has."""
        slot, params = begin.slot, begin.params
        self.greedy[slot] = params.temperature < GREEDY_BELOW or params.top_k == 1
        self.temperature[slot] = max(params.temperature, GREEDY_BELOW)
        self.top_k[slot] = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = sample_seed(params.seed, begin.sample)
        self.prompt_length[slot] = begin.prompt_length
        self.logprobs[slot] = params.logprobs
        self.adjustments.pop(slot, None)
        if needs_adjustment(params):
            self.adjustments[slot] = Adjustment(begin, vocab_size=self.vocab_size, eos_ids=self.eos_ids)
        self.plain[slot] = self.greedy[slot] and slot not in self.adjustments and params.grammar is None

    def record(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """These tokens have been sampled for these slots."""
        if not self.adjustments:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            adjustment = self.adjustments.get(slot)
            if adjustment is not None:
                adjustment.record(token)
