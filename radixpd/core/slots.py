"""The requests that hold a slot, as arrays indexed by slot, so that a decode step costs a handful of numpy calls whatever the batch.

For slot s: `tokens[s, :known[s]]` are the token ids known so far (prompt and applied output); `planned[s]` positions have their KV
computed by the plans sent so far; `page_table[s, :page_count[s]]` are its pages, of which the first `shared[s]` belong to the radix
tree. `epoch[s]` grows each time the slot changes hands, so a result that was in flight for an earlier owner is recognised and
dropped. Owned by the scheduler.
"""

from __future__ import annotations

import numpy as np

from radixpd.core.request import NO_SLOT, Request

__all__ = ["SlotTable"]


class SlotTable:
    """Struct of arrays over `slots` slots."""

    def __init__(self, slots: int, context_length: int, page_size: int, *, jump: bool = False) -> None:
        self._jump = jump  # whether the runner takes forced tokens at once
        width = -(-context_length // page_size) + 1
        self.requests = np.full(slots, None, dtype=object)
        self.rids = np.full(slots, None, dtype=object)
        self.tokens = np.zeros((slots, context_length + 1), dtype=np.int32)
        self.page_table = np.zeros((slots, width), dtype=np.int32)
        self.known = np.zeros(slots, dtype=np.int64)
        self.planned = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.page_count = np.zeros(slots, dtype=np.int64)
        self.shared = np.zeros(slots, dtype=np.int64)
        self.epoch = np.zeros(slots, dtype=np.int64)
        self.ignores_eos = np.zeros(slots, dtype=np.bool_)
        self.sending = np.zeros(slots, dtype=np.bool_)  # its first token goes to the role
        self.jumps = np.zeros(slots, dtype=np.bool_)  # may get more than one token from a step, so it has one step in flight at most
        self.picky = np.zeros(slots, dtype=np.bool_)  # has stop ids or a minimum length: its tokens are looked at one by one
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        """How many slots nobody holds."""
        return len(self._free)

    def take(self, request: Request) -> None:
        """Give a free slot to the request; its tokens are what it brings."""
        slot = self._free.pop()
        params, length = request.params, len(request.tokens)
        request.slot = slot
        self.requests[slot] = request
        self.rids[slot] = request.rid
        self.tokens[slot, :length] = request.tokens
        self.known[slot] = length
        self.planned[slot] = 0
        self.limit[slot] = request.length_limit
        self.page_count[slot] = 0
        self.shared[slot] = 0
        self.sending[slot] = False
        self.ignores_eos[slot] = params.ignore_eos and params.grammar is None
        self.jumps[slot] = self._jump and params.may_jump
        self.picky[slot] = bool(params.stop_token_ids) or params.min_new_tokens > 0

    def give(self, request: Request) -> None:
        """Take the slot back; whatever is still in flight for it is void from now on."""
        slot = request.slot
        self.epoch[slot] += 1
        self.requests[slot] = None
        self.rids[slot] = None
        self.page_count[slot] = 0
        self._free.append(slot)
        request.slot = NO_SLOT

    def known_tokens(self, slot: int) -> np.ndarray:
        """A copy of the token ids known so far, int32 `[known]`."""
        return self.tokens[slot, : self.known[slot]].copy()

    def own_pages(self, slot: int) -> np.ndarray:
        """Pages that the request owns itself, int32; the tree's are not among them."""
        return self.page_table[slot, self.shared[slot] : self.page_count[slot]].copy()

    def add_pages(self, slot: int, page_ids: np.ndarray) -> None:
        """Append pages to the slot's page table."""
        count = self.page_count[slot]
        self.page_table[slot, count : count + len(page_ids)] = page_ids
        self.page_count[slot] = count + len(page_ids)
