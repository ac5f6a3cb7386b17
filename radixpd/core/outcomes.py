"""What the result of a step does to the requests that took part in it.

Whatever happened to a request between plan and result (abort, stop string, retraction) is seen by its attempt or its slot's epoch, and its
part of the result is dropped. Called by `Scheduler.apply`.
"""

from __future__ import annotations

import numpy as np

from radixpd.core.accounts import Accounts
from radixpd.core.decode import Decode
from radixpd.core.effects import PromptScored, TokensOut
from radixpd.core.handoff import Arrived
from radixpd.core.holdings import Holdings
from radixpd.core.plan_builder import InFlight, Piece, PlanBuilder
from radixpd.core.prefill import Prefill
from radixpd.core.request import Finish, Phase, Request
from radixpd.core.roles import Role
from radixpd.core.roster import Roster
from radixpd.core.step import StepResult, TokenLogprobs
from radixpd.core.stop import ended, finish_of

__all__ = ["Outcomes"]


class Outcomes:
    """Applies results."""

    def __init__(
        self, roster: Roster, holdings: Holdings, prefill: Prefill, decode: Decode, accounts: Accounts, *, role: Role, eos_ids: np.ndarray
    ) -> None:
        self._roster = roster
        self._holdings = holdings
        self._prefill = prefill
        self._decode = decode
        self._accounts = accounts
        self.role = role
        self._eos_ids = eos_ids
        self.landing: list[tuple[Request, Arrived]] = []  # their prompts are whole when the next plan is made

    def apply(self, record: InFlight, result: StepResult, now: float) -> None:
        """Scores, then pieces of prompts, then tokens."""
        self._accounts.applied(result.seconds)
        for piece, scores in zip(record.scored, result.scores, strict=True):
            if piece.alive:
                piece.request.scored = piece.scored_end
                if piece.request.read_by_peer:
                    piece.request.handed_scores.append(scores)
                self._roster.effects.append(PromptScored(piece.request.rid, scores))
        for piece in record.pieces:
            if piece.alive:
                self._apply_piece(piece, now)
            for sibling in piece.forked:
                if sibling.phase is Phase.RUNNING and not self._prefill.holds(sibling):
                    sibling.trail.follow(piece.request.trail, sibling.prompt_length)
                    self._roster.prompt_done(sibling, now)
        if len(record.sample_slots):
            self._apply_tokens(record, result, now)

    def _apply_piece(self, piece: Piece, now: float) -> None:
        """The KV of one piece of a prompt exists: share its full pages; after the last piece, the prompt is done."""
        request = piece.request
        request.trail.ran(piece.start, piece.end, request.prompt_length)
        if self._holdings.cache.reuse:
            self._holdings.commit(request.slot, piece.end)
        if piece.final:
            self._prefill.settling.remove(request)
            if not request.prefilled:
                request.trail.filled = now - request.arrived - request.trail.queued
            self._roster.prompt_done(request, now)

    def _apply_tokens(self, record: InFlight, result: StepResult, now: float) -> None:
        """The sampled tokens of everyone who is still there; first tokens of what is sent away go to the role."""
        table = self._holdings.table
        alive = table.epoch[record.sample_slots] == record.epochs
        slots, ids, logprobs = record.sample_slots, result.tokens, result.logprobs
        for fault in result.faults:
            if alive[fault.sample]:
                request: Request = table.requests[slots[fault.sample]]
                self._roster.finish(request, Finish("abort", message=fault.message, status=500), self._accounts.completion(request))
                alive[fault.sample] = False
        if not alive.all():
            slots, ids = slots[alive], ids[alive]
            logprobs = tuple(each for each, there in zip(logprobs, alive) if there)
        if len(away := np.flatnonzero(table.sending[slots])):
            for at in away.tolist():
                self.role.on_sampled(table.requests[slots[at]], int(ids[at]), logprobs[at] if logprobs else None, now)
            here = np.setdiff1d(np.arange(len(slots)), away)
            slots, ids, logprobs = slots[here], ids[here], tuple(logprobs[at] for at in here) if logprobs else ()
        if len(slots):
            self._append(slots, ids, logprobs)
        for forced in result.forced:
            self._append_forced(record.sample_slots[forced.sample], record.epochs[forced.sample], forced.tokens)

    def _append_forced(self, slot: np.int32, epoch: np.int64, ids: np.ndarray) -> None:
        """Tokens behind a sampled one, one at a time: each may be the last."""
        table = self._holdings.table
        for at in range(len(ids)):
            if table.epoch[slot] != epoch or table.sending[slot]:
                return
            self._append(np.array([slot]), ids[at : at + 1], (), computed=False)

    def _append(self, slots: np.ndarray, ids: np.ndarray, logprobs: tuple[TokenLogprobs | None, ...], *, computed: bool = True) -> None:
        """One more token for each of these slots: share pages that became full, end who has ended. `computed`: the KV of all tokens before
        it exists."""
        table = self._holdings.table
        known = table.known[slots]
        table.tokens[slots, known] = ids
        table.known[slots] = known + 1
        self._accounts.totals.generated_tokens_total += len(slots)
        self._roster.effects.append(TokensOut(tuple(table.rids[slots].tolist()), ids, logprobs))
        if self._holdings.cache.reuse and computed:
            for slot in slots[known // self._holdings.cache.page_size > table.shared[slots]].tolist():
                self._holdings.commit(slot, int(table.known[slot]) - 1)
        for at in np.flatnonzero(ended(table, slots, ids, self._eos_ids)).tolist():
            request: Request = table.requests[slots[at]]
            finish = finish_of(request, int(table.known[slots[at]]), int(ids[at]), self._eos_ids)
            if finish:
                self._roster.finish(request, finish, self._accounts.completion(request))

    def land(self, builder: PlanBuilder, now: float) -> None:
        """Whose KV has come from a peer: into the tree, first tokens out, copies for siblings into this plan, rows from the next one on.

        Last in a plan: pages that an end frees here are handed out by later plans only, which run after this one's copies.
        """
        landing, self.landing = self.landing, []
        for request, arrived in landing:
            if request.phase is Phase.PARKED:  # it may have ended since
                self._land(builder, request, arrived, now)

    def _land(self, builder: PlanBuilder, request: Request, arrived: Arrived, now: float) -> None:
        holdings, samples, length = self._holdings, request.samples, request.prompt_length
        request.move(Phase.RUNNING)
        holdings.table.planned[request.slot] = length
        request.scored = length
        if holdings.cache.reuse:
            holdings.commit(request.slot, length)
        if len(samples) > 1:
            builder.copies += holdings.fork(request)
        for each in samples[1:]:
            each.move(Phase.RUNNING)
            each.trail.found(int(holdings.table.shared[each.slot]) * holdings.cache.page_size)
            each.trail.follow(request.trail, length)
        for each in samples:
            self._accounts.totals.prompt_tokens_total += length
            self._accounts.totals.cached_tokens_total += each.trail.hit
        for scores in arrived.scores:
            self._roster.effects.append(PromptScored(request.rid, scores))
        for each in samples:
            self._roster.prompt_done(each, now)
        self._append(np.array([each.slot for each in samples], dtype=np.int32), arrived.tokens, arrived.logprobs)
        for each in samples:
            if each.phase is Phase.RUNNING:
                builder.begins.append(self._prefill.begin(each))
                self._decode.add(each.slot)
