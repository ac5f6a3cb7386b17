"""The generating side of planning: one row per running request, and retraction when the pool runs dry.

A row is one token long, or, behind tokens that a grammar has forced, as long as those. Vectorised over slots: a step without page
boundaries costs a few numpy calls whatever the batch. A request whose allowed length is planned gets no further row; whether it ended
earlier (end of sequence) is known one step late, and `Scheduler.apply` drops the extra token. When pages run out, requests of the lowest
priority, the latest arrivals first, give theirs up; so the oldest always goes on and all finish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from radixpd.core.budget import CLIP_NEW_TOKENS, NewTokenRatio
from radixpd.core.holdings import Holdings
from radixpd.core.plan_builder import PlanBuilder
from radixpd.core.request import Request

__all__ = ["Decode"]


class Decode:
    """Requests that generate: their slots, in order of joining."""

    def __init__(self, holdings: Holdings, ratio: NewTokenRatio) -> None:
        self.holdings = holdings
        self.ratio = ratio
        self.slots = np.empty(0, dtype=np.int32)

    @property
    def slots_held(self) -> int:
        """How many requests generate."""
        return len(self.slots)

    def add(self, slot: int) -> None:
        """The request in this slot generates from now on."""
        self.slots = np.append(self.slots, np.int32(slot))

    def remove(self, slot: int) -> None:
        """The request in this slot is gone (a no-op if it never got here)."""
        self.slots = self.slots[self.slots != slot]

    def expected_tokens(self, ratio: NewTokenRatio) -> int:
        """Tokens that the requests here are expected to write yet."""
        table = self.holdings.table
        remaining = np.minimum(table.limit[self.slots] - table.planned[self.slots] - 1, CLIP_NEW_TOKENS)
        return int(remaining.clip(min=0).sum() * ratio.value) + len(self.slots)

    def plan(self, builder: PlanBuilder, retract: Callable[[Request], None], others: Sequence[Request]) -> None:
        """Add a row for every request that may generate. `others` hold pages too and may be retracted: prompts under way."""
        table, cache = self.holdings.table, self.holdings.cache
        while True:
            starts = table.planned[self.slots]
            # Whoever may jump has tokens to compute only once its last step is applied: one, or those that were forced too.
            ends = np.where(table.jumps[self.slots], table.known[self.slots], starts + 1)
            live = (starts < ends) & (ends < table.limit[self.slots])
            slots, starts, ends = self.slots[live], starts[live], ends[live]
            missing = (-(-ends // cache.page_size) - table.page_count[slots]).clip(min=0)
            if missing.sum() <= cache.available:
                break
            victim = self._victim(others)
            if victim is None:
                return  # pages come back when the steps in flight are applied
            retract(victim)
            builder.retracted += 1
            self.ratio.reset()
        if not len(slots):
            return
        while len(growing := slots[missing > 0]):
            self.holdings.grow(growing, cache.allocate(len(growing)))
            missing -= 1
        table.planned[slots] = ends
        builder.decode, builder.decode_starts, builder.decode_lengths = slots, starts.astype(np.int32), (ends - starts).astype(np.int32)
        self.ratio.decay()

    def _victim(self, others: Sequence[Request]) -> Request | None:
        """Who gives way: lowest priority, then latest arrival; never the last one, nor one whose pages a mover reads."""
        running: list[Request] = [*self.holdings.table.requests[self.slots], *(each for each in others if not each.pinned)]
        if len(running) < 2:
            return None
        return min(running, key=lambda r: (r.priority, -r.order, -r.sample))
