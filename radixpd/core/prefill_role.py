"""The prefill side of handoffs: compute a prompt for a decode server, send what it lacks, give it the first tokens, forget.

A body and its `Reserve` may come in either order; a request is PARKED until both are here. From then on each step that computes a piece of
the prompt carries a `Send` of the pages it completes. Prefill never ends a request by its tokens: decode alone does. Invariants: a page is
read by the mover only while the request holds it; whoever learns that a room is over hears `Drained` once no write can follow; a dead room
stays dead for a while (tombstone). A request without a room is served here from prompt to last token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from radixpd.core.handoff import (
    Arrived,
    CancelRoom,
    Drained,
    HandoffLimits,
    MoverReport,
    NotNeeded,
    PeerAbort,
    PeerLost,
    PeerMessage,
    PeerSilent,
    PrefillShare,
    Quiet,
    Renew,
    Reserve,
    Room,
    TicketDone,
)  # fmt: skip
from radixpd.core.legs import Outgoing
from radixpd.core.load import Queues
from radixpd.core.plan_builder import PlanBuilder
from radixpd.core.request import Finish, Phase, Request
from radixpd.core.roles import Desk, Next
from radixpd.core.step import Send, TokenLogprobs
from radixpd.core.tombstones import Tombstones
from radixpd.core.whereabouts import OWN_MOVER, Stage

__all__ = ["PrefillRole"]

LOOK = 0.1  # seconds between two looks at the deadlines
CLIENT_GONE = 499  # status of a room that nobody wants any more: no failure


class PrefillRole:
    """All rooms of one prefill server."""

    def __init__(self, desk: Desk, limits: HandoffLimits) -> None:
        self.desk = desk
        self.limits = limits
        self.rooms: dict[int, Outgoing] = {}
        self.draining: dict[int, tuple[str, float]] = {}  # over, but the mover may still write: the peer to tell, since when
        self.dead = Tombstones(limits)
        self.strangers = 0  # messages about rooms of somebody else
        self._tickets: dict[int, Outgoing] = {}
        self._numbers = itertools.count(1)
        self._looked = 0.0

    def arrive(self, request: Request, now: float) -> Phase:
        """A body with a room waits for its `Reserve`."""
        if request.room is None:
            return Phase.WAITING
        for each in request.samples:
            each.trail.leg = "prefill"
        number = request.room.number
        found = self.rooms.get(number)
        if number in self.draining or number in self.dead or (found is not None and found.request is not None):
            reason, status = f"bootstrap_room {number} is in use, or was until a moment ago", 400
            if (stone := self.dead.failure(number)) is not None:
                reason, status = f"bootstrap_room {number} is over: {stone.reason}", stone.status
            self.desk.finish(request, Finish("abort", message=reason, status=status), 0)
            return Phase.FINISHED
        if found is None:
            self.rooms[number] = Outgoing(number, now, now + self.limits.body, request)
            return Phase.PARKED
        found.request = request
        if found.unneeded:
            self._over(found, now)
            self.desk.finish(request, Finish("length"), 0)
            return Phase.FINISHED
        if problem := found.mismatch(self.desk.holdings.cache.page_size):
            self.desk.finish(request, Finish("abort", message=problem, status=400), 0)
            return Phase.FINISHED
        found.promise()
        return Phase.WAITING

    def on_refused(self, room: Room, reason: str, status: int) -> None:
        """Decode hears of it at once if it has spoken of the room, else when it does."""
        found, now = self.rooms.get(room.number), self.desk.now
        if found is None:
            if room.number not in self.draining and room.number not in self.dead:
                self.dead.bury(room.number, now, reason, status)
        elif found.request is None:
            self._fail(found, reason, status, now, told=False)

    def on_message(self, message: PeerMessage | MoverReport, peer: str, now: float) -> None:
        """See `Role`."""
        match message:
            case Reserve():
                self._reserve(message, peer, now)
            case Renew(number, seconds):
                if (found := self._of(number, peer)) is not None and found.request is not None and not found.trouble:
                    found.peer, found.deadline = peer, now + seconds
            case NotNeeded(number):
                if (found := self._claim(number, peer, now)) is not None:
                    self._not_needed(found, now)
            case PeerAbort(number, reason, status):
                self._peer_gave_up(number, peer, reason, status, now)
            case TicketDone(ticket, error):
                self._ticket_done(ticket, error, now)
            case Quiet(number):
                if (waiting := self.draining.pop(number, None)) is not None:
                    self.desk.tell(waiting[0], Drained(number))
            case PeerLost(lost, reason):
                for found in [each for each in self.rooms.values() if each.peer == lost]:
                    self._fail(found, f"the decode server is gone: {reason}", 502, now, told=True)
                self.draining = {room: each for room, each in self.draining.items() if each[0] != lost}
            case PeerSilent():
                pass  # leases and the mover's patience see to it
            case _:
                self.strangers += 1

    def on_piece(self, builder: PlanBuilder, request: Request, start: int, end: int) -> Next:
        """Send the pages that the prompt has up to `end`, those found in the cache included."""
        found = self._outgoing(request)
        if found is None:
            return Next.DECODE
        cache, table = self.desk.holdings.cache, self.desk.holdings.table
        reserve, final = found.reserve, end == len(request.tokens)
        assert reserve is not None
        upto = cache.pages_for(end) if final else end // cache.page_size
        if not final and not self.limits.overlap:
            return Next.DECODE
        if upto > found.sent and not found.trouble:
            if not found.sending:
                found.first_sent = self.desk.now
            request.trail.pages += upto - found.sent
            self.desk.totals.sent_pages_total += upto - found.sent
            ticket = next(self._numbers)
            builder.sends.append(
                Send(
                    ticket=ticket,
                    room=found.room,
                    peer=found.peer,
                    source=table.page_table[request.slot, found.sent : upto].copy(),
                    target=reserve.pages[found.sent - found.had : upto - found.had],
                    ready=max(0, start // cache.page_size - found.sent) if self.limits.overlap else 0,
                )
            )
            found.tickets.add(ticket)
            self._tickets[ticket] = found
            found.sent = upto
        return Next.SEND if final else Next.DECODE

    def on_sampled(self, request: Request, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """With the last sample's first token the prompt is done here."""
        leader = request.leader or request
        found = self._outgoing(leader)
        assert found is not None
        found.tokens[request.sample] = token, logprobs
        if len(found.tokens) < len(leader.samples):
            return
        firsts = [found.tokens[index] for index in range(len(found.tokens))]
        wanted = tuple(each for _, each in firsts) if leader.params.logprobs else ()
        trail = leader.trail
        share = PrefillShare(trail.hit, trail.computed, trail.pages, trail.queued, trail.filled, now - found.first_sent)
        for each in leader.samples:
            each.move(Phase.SENDING)
        found.arrived, found.sampled = True, now
        tokens = np.array([each for each, _ in firsts], dtype=np.int32)
        self.desk.tell(found.peer, Arrived(found.room, tokens, wanted, tuple(leader.handed_scores), share))
        self._maybe_done(found, now)

    def on_end(self, request: Request, finish: Finish) -> None:
        """A request that ends before it was delivered takes its room with it."""
        found = self._outgoing(request)
        if found is not None and found.request is request:
            self._drop(found, finish.message or "the request has ended on the prefill server", finish.status, told=False)

    def tick(self, now: float) -> None:
        """Rooms that only one side has spoken of, rooms whose decode side has fallen silent, old tombstones."""
        if now - self._looked < LOOK:
            return
        self._looked = now
        for found in [each for each in self.rooms.values() if each.deadline < now and (each.trouble or not each.sending)]:
            if found.trouble:
                self._fail(found, found.trouble, 502, now, told=True)
            else:
                self._fail(found, self._silence(found), 504, now, told=False)
        # Who was to hear of their end has not been heard of for long: nothing is kept for it but this note.
        self.draining = {room: each for room, each in self.draining.items() if now - each[1] < self.limits.tombstone}
        self.dead.tick(now)

    def stages(self) -> Iterator[Stage]:
        """See `Role`."""
        for found in self.rooms.values():
            yield from found.stages()
        for room, (peer, since) in self.draining.items():
            yield Stage(part="draining", since=since, waits_for=OWN_MOVER, room=room, peer=peer)

    def queues(self) -> Queues:
        """See `Role`."""
        waiting = sum(found.request is not None and found.reserve is None for found in self.rooms.values())
        return Queues(prefill_prealloc=waiting, prefill_inflight=sum(found.arrived for found in self.rooms.values()))

    # ---- inner ----------------------------------------------------------------------------------------------------------------

    def _outgoing(self, request: Request) -> Outgoing | None:
        return self.rooms.get(request.room.number) if request.room is not None else None

    def _of(self, number: int, peer: str) -> Outgoing | None:
        """The room, if it is this peer's, or nobody's yet."""
        found = self.rooms.get(number)
        if found is None or found.peer not in ("", peer):
            self.strangers += found is not None
            return None
        return found

    def _claim(self, number: int, peer: str, now: float) -> Outgoing | None:
        """The room for a peer that speaks of it, maybe for the first time."""
        found = self.rooms.get(number)
        if found is None:
            if number in self.dead:
                return None
            found = self.rooms[number] = Outgoing(number, now, now + self.limits.body)
        if found.peer in ("", peer):
            found.peer = peer
            return found
        self.strangers += 1
        return None

    def _reserve(self, message: Reserve, peer: str, now: float) -> None:
        number = message.room
        if (stone := self.dead.failure(number)) is not None:
            self.desk.tell(peer, PeerAbort(number, stone.reason, stone.status))
            return
        found = self._claim(number, peer, now)
        if found is None or found.reserve is not None:
            self.desk.tell(peer, PeerAbort(number, f"room {number} is in use"))
            return
        found.reserve, found.deadline = message, now + message.seconds
        found.had = found.sent = message.skip // self.desk.holdings.cache.page_size
        request = found.request
        if request is None:
            found.deadline = now + self.limits.body
            return
        if problem := found.mismatch(self.desk.holdings.cache.page_size):
            self._fail(found, problem, 400, now, told=False)
            return
        found.promise()
        request.trail.reserved = now - request.arrived
        self.desk.enqueue(request)

    def _not_needed(self, found: Outgoing, now: float) -> None:
        if found.request is None:
            found.unneeded = True  # its body may still come, and gets its answer then
            return
        self._over(found, now)
        self.desk.finish(found.request, Finish("length"), 0)

    def _ticket_done(self, ticket: int, error: str, now: float) -> None:
        found = self._tickets.pop(ticket, None)
        if found is None:
            return
        found.tickets.discard(ticket)
        if not error:
            self._maybe_done(found, now)
        elif not found.trouble:
            # Decode may have ended the room itself, and its mover been faster than its word: then that says what became of it.
            found.trouble, found.deadline = f"the transfer failed: {error}", now + self.limits.last_word
            self.desk.tell(found.peer, PeerAbort(found.room, found.trouble))

    def _maybe_done(self, found: Outgoing, now: float) -> None:
        if found.arrived and not found.tickets and not found.trouble:
            self._over(found, now)
            assert found.request is not None
            trail = found.request.trail
            trail.transfer, trail.visible = now - found.first_sent, now - found.sampled
            for sibling in found.request.siblings:
                sibling.trail.follow(trail, sibling.prompt_length)
            self.desk.finish(found.request, Finish("length"), 0)

    def _peer_gave_up(self, number: int, peer: str, reason: str, status: int, now: float) -> None:
        found = self._claim(number, peer, now)
        if found is not None:
            echo = found.trouble and found.trouble in reason
            self._fail(found, found.trouble if echo else f"decode gave the handoff up: {reason}", status, now, told=True)
        elif number not in self.draining and number not in self.rooms:
            # Asked again, because the first answer was lost.
            self.desk.tell(peer, Drained(number))

    def _fail(self, found: Outgoing, reason: str, status: int, now: float, *, told: bool) -> None:
        """The room is over without delivery. `told`: the peer knows."""
        if status != CLIENT_GONE:
            totals = self.desk.totals
            totals.transfer_failed_total += found.sending
            totals.bootstrap_failed_total += not found.sending
        self._drop(found, reason, status, told=told)
        if found.request is not None:
            self.desk.finish(found.request, Finish("abort", message=reason, status=status), 0)

    def _drop(self, found: Outgoing, reason: str, status: int, *, told: bool) -> None:
        del self.rooms[found.room]
        for ticket in found.tickets:
            del self._tickets[ticket]
        if found.sending:
            self.draining[found.room] = found.peer, self.desk.now
            self.desk.order(CancelRoom(found.room))
        if found.peer and not told:
            self.desk.tell(found.peer, PeerAbort(found.room, reason, status))
        if found.peer and not found.sending:
            self.desk.tell(found.peer, Drained(found.room))
        self.dead.bury(found.room, self.desk.now, reason, status)

    def _over(self, found: Outgoing, now: float) -> None:
        del self.rooms[found.room]
        self.dead.bury(found.room, now)

    def _silence(self, found: Outgoing) -> str:
        flag = self.limits.deadlines["body"]
        if found.request is None:
            return f"no request came for room {found.room} within {self.limits.body:g} s ({flag} of the prefill server)"
        if found.reserve is None and not found.peer:
            return f"no decode server reserved room {found.room} within {self.limits.body:g} s ({flag} of the prefill server)"
        return f"the decode server has not renewed room {found.room} in time"
