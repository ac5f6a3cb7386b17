"""The runner's two tables, indexed by slot: which tokens a slot holds, and on which pages its KV lies.

The token pool is what lets the brain plan a step before it has seen the previous one's tokens: a sampled token is written here and the next
step reads its input from here. Written only by `Runner.step`, in the order that `core.step` prescribes.
"""

from __future__ import annotations

import numpy as np

from radixpd.core.step import SlotBegin, StepPlan

__all__ = ["Tables"]


class Tables:
    """`tokens` is the token pool, int32 `[slots, context + 1]`; `pages` the page table, int32 `[slots, pages per slot]`."""

    def __init__(self, *, slots: int, context_length: int, page_size: int) -> None:
        # One place more than the context: the token sampled at its last position is never computed but is still written.
        self.tokens = np.zeros((slots, context_length + 1), dtype=np.int32)
        self.pages = np.zeros((slots, -(-context_length // page_size)), dtype=np.int32)

    def begin(self, begin: SlotBegin) -> None:
        """A slot starts with the tokens known so far."""
        self.tokens[begin.slot, : len(begin.tokens)] = begin.tokens

    def place(self, plan: StepPlan) -> None:
        """Enter the plan's new pages."""
        self.pages[plan.page_slots, plan.page_positions] = plan.page_ids
