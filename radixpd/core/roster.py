"""The live requests: who is here, the one way out, the way back to the queue, and what their clients are to hear.

Invariants: every request leaves by exactly one `Finished`, with nothing left behind; a retracted one keeps its tokens, its seed and its
place in the order of arrival. Owned by the scheduler; `outcomes` ends requests through it.
"""

from __future__ import annotations

from radixpd.core.accounts import Accounts
from radixpd.core.decode import Decode
from radixpd.core.effects import ClientEffect, Finished, Prefilled
from radixpd.core.grammars import Grammars
from radixpd.core.holdings import Holdings
from radixpd.core.prefill import Prefill
from radixpd.core.request import NO_SLOT, Finish, Phase, Request
from radixpd.core.roles import Role

__all__ = ["Roster"]


class Roster:
    """All live requests of one server, by rid."""

    def __init__(self, holdings: Holdings, decode: Decode, prefill: Prefill, accounts: Accounts, role: Role, grammars: Grammars) -> None:
        self.live: dict[str, Request] = {}
        self.effects: list[ClientEffect] = []
        self._holdings = holdings
        self._decode = decode
        self._prefill = prefill
        self._accounts = accounts
        self.role = role
        self._grammars = grammars

    def enter(self, samples: list[Request]) -> None:
        """The samples of one prompt are here; sample 0 carries the others until their fork."""
        leader = samples[0]
        leader.siblings = tuple(samples[1:])
        for request in samples:
            assert request.rid not in self.live, "two live requests with one rid"
            self.live[request.rid] = request
            request.leader = leader if request is not leader else None

    def prompt_done(self, request: Request, now: float) -> None:
        """Say so, once; a request that wants no token ends here."""
        request.since = now
        if not request.prefilled:
            request.prefilled = True
            trail = request.trail
            self.effects.append(Prefilled(request.rid, trail.cached, trail.queued, trail.journey(request.prompt_length)))
        if request.length_limit == len(request.tokens):
            self.finish(request, Finish("length"), 0)

    def finish(self, request: Request, finish: Finish, completion: int) -> None:
        """The one way out: give everything back, then say so once for the request and each sibling it carries."""
        samples = request.samples
        self.role.on_end(request, finish)
        if request.slot != NO_SLOT:
            self._leave(request)
        self._prefill.forget(request)
        for each in samples:
            each.move(Phase.FINISHED)
            del self.live[each.rid]
            self._grammars.leave(each)
            journey = each.trail.journey(each.prompt_length)
            self.effects.append(Finished(each.rid, finish, each.prompt_length, completion, each.trail.cached, each.attempt, journey))
        self._accounts.ended(len(samples), finish)

    def retract(self, request: Request, now: float) -> None:
        """Back to the queue: its pages are needed. Full pages stay in the tree as long as nobody needs those too."""
        assert not request.pinned, f"{request.rid}: a peer reads its pages"
        request.since = now
        tokens = self._holdings.table.known_tokens(request.slot)
        self._accounts.retracted(request, len(tokens))
        self._leave(request)
        self._prefill.forget(request)
        request.requeue(tokens)
        self._prefill.enqueue(request)

    def _leave(self, request: Request) -> None:
        """Out of the running ones, with nothing left behind."""
        self._decode.remove(request.slot)
        self._holdings.release(request)
