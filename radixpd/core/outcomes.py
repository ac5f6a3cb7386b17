"""What the result of a step does to the requests that took part in it.

Whatever happened to a request between plan and result (abort, stop string, retraction) is seen by its attempt or its slot's epoch, and its
part of the result is dropped. Called by `Scheduler.apply`.
"""

from __future__ import annotations

import numpy as np

from radixpd.core.accounts import Accounts
from radixpd.core.effects import PromptScored, TokensOut
from radixpd.core.holdings import Holdings
from radixpd.core.plan_builder import InFlight, Piece
from radixpd.core.prefill import Prefill
from radixpd.core.request import Phase, Request
from radixpd.core.roles import Role
from radixpd.core.roster import Roster
from radixpd.core.step import StepResult
from radixpd.core.stop import ended, finish_of

__all__ = ["Outcomes"]


class Outcomes:
    """Applies results."""

    def __init__(
        self, roster: Roster, holdings: Holdings, prefill: Prefill, accounts: Accounts, *, role: Role, eos_ids: np.ndarray
    ) -> None:
        self._roster = roster
        self._holdings = holdings
        self._prefill = prefill
        self._accounts = accounts
        self._role = role
        self._eos_ids = eos_ids

    def apply(self, record: InFlight, result: StepResult) -> None:
        """Scores, then pieces of prompts, then tokens."""
        self._accounts.applied(result.seconds)
        for piece, scores in zip(record.scored, result.scores, strict=True):
            if piece.alive:
                piece.request.scored = piece.scored_end
                self._roster.effects.append(PromptScored(piece.request.rid, scores))
        for piece in record.pieces:
            if piece.alive:
                self._apply_piece(piece)
            for sibling in piece.forked:
                if sibling.phase is Phase.RUNNING and not self._prefill.holds(sibling):
                    self._roster.prompt_done(sibling)
        if len(record.sample_slots):
            self._apply_tokens(record, result)

    def _apply_piece(self, piece: Piece) -> None:
        """The KV of one piece of a prompt exists: share its full pages; after the last piece, the prompt is done."""
        request = piece.request
        if self._holdings.cache.reuse:
            self._holdings.commit(request.slot, piece.end)
        self._role.on_computed(request, piece.start, piece.end)
        if piece.final:
            self._prefill.settling.remove(request)
            self._roster.prompt_done(request)

    def _apply_tokens(self, record: InFlight, result: StepResult) -> None:
        """Append the sampled tokens of everyone who is still there, share pages that became full, end who has ended."""
        table = self._holdings.table
        alive = table.epoch[record.sample_slots] == record.epochs
        slots, ids, logprobs = record.sample_slots, result.tokens, result.logprobs
        if not alive.all():
            slots, ids = slots[alive], ids[alive]
            logprobs = tuple(each for each, there in zip(logprobs, alive) if there)
        if not len(slots):
            return
        known = table.known[slots]
        table.tokens[slots, known] = ids
        table.known[slots] = known + 1
        self._accounts.totals.generated_tokens_total += len(slots)
        self._roster.effects.append(TokensOut(tuple(table.rids[slots].tolist()), ids, logprobs))
        if self._holdings.cache.reuse:
            for slot in slots[known // self._holdings.cache.page_size > table.shared[slots]].tolist():
                self._holdings.commit(slot, int(table.known[slot]) - 1)
        for at in np.flatnonzero(ended(table, slots, ids, self._eos_ids)).tolist():
            request: Request = table.requests[slots[at]]
            finish = finish_of(request, int(table.known[slots[at]]), int(ids[at]), self._eos_ids)
            if finish:
                self._roster.finish(request, finish, self._accounts.completion(request))
