"""The decode side of handoffs: reserve pages, have a peer fill them, then generate.

A request with a room is PARKED. In order of arrival each gets all its pages at once (its match is locked, slots are taken) and the peer
is told (`Reserve`); a prompt that is wholly cached, or nearly, is computed here instead (`NotNeeded`). It lands when the peer's first
tokens and the own mover's word are both here. Invariants: a page that a peer may write into is the request's or in quarantine, never
free, and no step of our own that is still under way writes into it; every wait has a deadline; a failed handoff ends in a local
computation (`fallback`) or in one clear error. A request without a room is served here alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from radixpd.core.handoff import (
    Arrived,
    CancelRoom,
    Drained,
    ExpectRoom,
    Failure,
    HandoffLimits,
    Landed,
    MoverReport,
    NotNeeded,
    PeerAbort,
    PeerLost,
    PeerMessage,
    PeerSilent,
    Quiet,
    Renew,
    Reserve,
    Room,
)  # fmt: skip
from radixpd.core.legs import Incoming
from radixpd.core.load import Queues
from radixpd.core.page_hash import is_lossy, lossy, prompt_digest
from radixpd.core.plan_builder import PlanBuilder
from radixpd.core.quarantine import Quarantine
from radixpd.core.request import Finish, Phase, Request
from radixpd.core.roles import Desk, Next
from radixpd.core.step import TokenLogprobs
from radixpd.core.whereabouts import OWN_POOL, OWN_QUEUE, Stage

__all__ = ["DecodeRole"]


class DecodeRole:
    """All rooms of one decode server."""

    def __init__(self, desk: Desk, limits: HandoffLimits) -> None:
        self.desk = desk
        self.limits = limits
        self.rooms: dict[Room, Incoming] = {}  # in order of arrival
        self._numbers: dict[int, Room] = {}  # a mover knows rooms by number alone
        self._quarantine = Quarantine(desk, limits)  # rooms that are over
        self._fallen: list[tuple[Request, float]] = []  # waiting to be computed here, since when

    def arrive(self, request: Request, now: float) -> Phase:
        """A request with a room waits for pages; one that wants no token has nothing to be handed over. If KV may go through a lossy codec
        on its way, all requests with rooms share pages with each other only."""
        room = request.room
        if room is None:
            return Phase.WAITING
        for each in request.samples:
            each.trail.leg = "decode"
        if room.number in self._numbers or room in self._quarantine:
            message = f"bootstrap_room {room.number} is in use, or was until a moment ago"
            self.desk.finish(request, Finish("abort", message=message, status=400), 0)
            return Phase.FINISHED
        if request.params.max_new_tokens == 0:
            self.desk.tell(room.peer, NotNeeded(room.number))
            return Phase.WAITING
        if self.limits.codec != "none":
            for each in request.samples:
                each.space = lossy(each.space, self.limits.codec)
        self.rooms[room] = Incoming(room, request, now, renewed=now)
        self._numbers[room.number] = room
        return Phase.PARKED

    def on_refused(self, room: Room, reason: str, status: int) -> None:
        """The peer need not wait for a request that will not come."""
        if room not in self.rooms and room not in self._quarantine:
            self.desk.tell(room.peer, PeerAbort(room.number, reason, status))

    def on_message(self, message: PeerMessage | MoverReport, peer: str, now: float) -> None:
        """See `Role`."""
        match message:
            case Arrived(number):
                if (found := self.rooms.get(Room(number, peer))) is not None and found.reserved:
                    self._arrived(found, message, now)
            case Landed(number, raw, wire, exact):
                if (found := self._by_number(number)) is None:
                    return
                if not (exact or is_lossy(found.request.space)):
                    self._fail(found, "compressed KV came, which this server does not take (--disaggregation-transfer-dtype)", 502)
                else:
                    self._landed(found, raw, wire, now)
            case PeerAbort(number, reason, status):
                if (found := self.rooms.get(Room(number, peer))) is not None:
                    self._fail(found, f"the handoff was given up: {reason}", status, tell=found.reserved)
            case Failure(number, reason):
                if (found := self._by_number(number)) is not None:
                    self._fail(found, f"the transfer failed: {reason}", 502)
            case Drained(number):
                self._quarantine.drained(Room(number, peer))
            case Quiet(number):
                self._quarantine.quiet(number)
            case PeerLost(lost, reason):
                self._lost(lost, reason)
            case PeerSilent(silent, reason):
                for found in [each for each in self.rooms.values() if each.room.peer == silent and each.reserved]:
                    self._fail(found, f"the prefill server is silent: {reason}", 504)

    def on_piece(self, builder: PlanBuilder, request: Request, start: int, end: int) -> Next:
        """What is computed here stays here."""
        return Next.DECODE

    def on_sampled(self, request: Request, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Nothing is sent away."""

    def on_end(self, request: Request, finish: Finish) -> None:
        """The client has gone, or the server ends the request, while a peer works on it."""
        if request.room is not None and (found := self.rooms.get(request.room)) is not None and found.request is request:
            self._let_go(found, finish.message or "the request has ended on the decode server", finish.status)

    def tick(self, now: float) -> None:
        """Deadlines, renewals, reservations."""
        for found in list(self.rooms.values()):
            self._check(found, now)
        self._quarantine.tick(now)
        self._check_fallen(now)
        self._reserve_in_order(now)

    def stages(self) -> Iterator[Stage]:
        """See `Role`."""
        owed = self._owed()
        for found in self.rooms.values():
            peer = found.room.peer
            yield found.stage(peer if self._too_much(found, owed) else OWN_QUEUE if self.desk.retracted_wait else OWN_POOL)
        yield from self._quarantine.stages()

    def queues(self) -> Queues:
        """See `Role`."""
        reserved = sum(found.reserved for found in self.rooms.values())
        return Queues(decode_prealloc=len(self.rooms) - reserved, decode_transfer=reserved)

    # ---- inner ----------------------------------------------------------------------------------------------------------------

    def _by_number(self, number: int) -> Incoming | None:
        room = self._numbers.get(number)
        return None if room is None else self.rooms[room]

    def _check(self, found: Incoming, now: float) -> None:
        limits, waited = self.limits, now - found.since
        if now - found.renewed >= limits.renew and (found.asked or not found.reserved):
            found.renewed = now
            self.desk.tell(found.room.peer, Renew(found.room.number, limits.lease))
        if not found.reserved:
            if waited > limits.reserve:
                flag = limits.deadlines["reserve"]
                self._fail(found, f"no pages could be reserved for the prompt within {limits.reserve:g} s ({flag})", 503)
        elif waited > limits.transfer:
            what = "first token and KV" if found.message is None else "KV"
            flag = limits.deadlines["transfer"]
            self._fail(
                found, f"{what} of room {found.room.number} did not come from {found.room.peer} within {limits.transfer:g} s ({flag})", 504
            )
        elif not found.asked:
            self._ask(found)

    def _check_fallen(self, now: float) -> None:
        """Nobody waits for pages in quarantine for ever."""
        self._fallen = [(each, since) for each, since in self._fallen if each.phase is Phase.WAITING and not each.attempt]
        holdings = self.desk.holdings
        if not holdings.cache.quarantined_pages or any(each is not None for each in holdings.table.requests):
            return  # others will give their pages back
        limit, flag = self.limits.reserve, self.limits.deadlines["reserve"]
        for request, _ in [each for each in self._fallen if now - each[1] > limit]:
            message = f"no pages within {limit:g} s ({flag}): a prefill server that does not answer may still write into some"
            self.desk.finish(request, Finish("abort", message=message, status=503), 0)

    def _reserve_in_order(self, now: float) -> None:
        """Whoever came first gets pages first; only a peer that owes too much is passed over."""
        waiting = [found for found in self.rooms.values() if not found.reserved]
        if not waiting or self.desk.retracted_wait:
            return
        owed = self._owed()
        for found in waiting:
            if self._too_much(found, owed) and not self._quarantine.distrusts(found.room.peer):
                continue
            if not self._reserve(found, now):
                break
            owed[found.room.peer] += found.owed

    def _owed(self) -> dict[str, int]:
        """Prompt tokens that each peer is to deliver."""
        owed: dict[str, int] = {}
        for found in self.rooms.values():
            owed[found.room.peer] = owed.get(found.room.peer, 0) + found.owed
        return owed

    def _too_much(self, found: Incoming, owed: dict[str, int]) -> bool:
        """Whether the peer has enough to do without this room."""
        before, length, peer = owed[found.room.peer], found.request.prompt_length, found.room.peer
        cache = self.desk.holdings.cache
        pages = cache.pages_for(before) + cache.quarantined_for(peer)
        share = pages > 0 and pages + cache.pages_for(length) > self.limits.peer_share * cache.allocator.pages
        return share or (before > 0 and before + length > self.limits.peer_tokens)

    def _reserve(self, found: Incoming, now: float) -> bool:
        """All or nothing. False when there is no room for it yet."""
        request, cache, holdings = found.request, self.desk.holdings.cache, self.desk.holdings
        limit = request.matchable // cache.page_size
        _, pages = cache.peek(request.space, request.data, limit)
        rest = len(request.tokens) - pages * cache.page_size
        distrusted = rest > self.limits.local_tokens and self._quarantine.distrusts(found.room.peer)
        if distrusted:
            reason = f"the prefill server {found.room.peer} may still write into too many pages of requests that have ended"
            if not self.limits.fallback:
                self._fail(found, reason, 503)
                return True
            self._fall_back(request, reason)
        if distrusted or rest <= self.limits.local_tokens:
            self.desk.tell(found.room.peer, NotNeeded(found.room.number))
            self._forget(found)
            self.desk.enqueue(request)
            return True
        if holdings.table.free_slots < len(request.samples):
            return False
        node, matched = cache.match(request.space, request.data, limit, request.priority)
        if not self.desk.fits(request, len(matched)):
            cache.release(node, matched[:0])
            return False
        holdings.seat(request, node, matched)
        found.skip, found.since, found.renewed = len(matched) * cache.page_size, now, now
        for each in request.samples:
            each.trail.reserved = now - request.arrived
        found.after = self.desk.planned_step
        self._ask(found)
        return True

    def _ask(self, found: Incoming) -> None:
        """Tell the peer where to write, once no step of our own can write there: a peer is outside the order of steps."""
        if found.asked or self.desk.applied_step < found.after:
            return
        found.asked = True
        room, request = found.room, found.request
        own = self.desk.holdings.table.own_pages(request.slot)
        self.desk.order(ExpectRoom(room.number, room.peer, own))
        digest, seed = prompt_digest(request.tokens), request.params.seed
        self.desk.tell(room.peer, Reserve(room.number, request.prompt_length, found.skip, own, self.limits.lease, digest, seed))

    def _arrived(self, found: Incoming, message: Arrived, now: float) -> None:
        if len(message.tokens) != len(found.request.samples):
            self._fail(found, f"{len(message.tokens)} first tokens came for {len(found.request.samples)} samples", 502)
            return
        found.message, found.told = message, now
        self._maybe_land(found)

    def _landed(self, found: Incoming, raw: int, wire: int, now: float) -> None:
        trail, totals = found.request.trail, self.desk.totals
        found.landed, trail.raw, trail.wire = now, raw, wire
        totals.received_bytes_total += raw
        totals.wire_bytes_total += wire
        self._maybe_land(found)

    def _maybe_land(self, found: Incoming) -> None:
        if found.message is None or found.landed is None:
            return
        request, share = found.request, found.message.share
        trail = request.trail
        trail.landed(request.prompt_length, found.skip, share)
        trail.visible = max(found.landed - found.told, 0.0)
        trail.transfer = share.sending + trail.visible
        self._forget(found)
        self.desk.land(request, found.message)

    def _fail(self, found: Incoming, reason: str, status: int, *, tell: bool = True, gone: bool = False) -> None:
        """The handoff is over; the request is not, if it may be computed here."""
        request, totals = found.request, self.desk.totals
        totals.transfer_failed_total += found.asked
        totals.bootstrap_failed_total += not found.asked
        self._let_go(found, reason, status, tell=tell, gone=gone)
        if self.limits.fallback:
            self._fall_back(request, reason)
            self.desk.enqueue(request)
        else:
            self.desk.finish(request, Finish("abort", message=reason, status=status), 0)

    def _fall_back(self, request: Request, reason: str) -> None:
        """The request is computed here, though that was another's work. It may have to wait for pages that nobody gives back."""
        self._fallen.append((request, self.desk.now))
        self.desk.totals.fallbacks_total += 1
        for each in request.samples:
            each.trail.fallback = reason

    def _let_go(self, found: Incoming, reason: str, status: int, *, tell: bool = True, gone: bool = False) -> None:
        """Take the seat back. Pages that may still be written go into quarantine; the peer is asked to say when that is over."""
        self._forget(found)
        room = found.room
        if found.reserved:
            pages = self.desk.holdings.surrender(found.request)
            if found.asked:
                self.desk.order(CancelRoom(room.number))
            if gone or not found.asked:
                self.desk.holdings.cache.allocator.free(pages)
            else:
                self._quarantine.hold(room, pages)
        if tell and not gone:
            self.desk.tell(room.peer, PeerAbort(room.number, reason, status))

    def _forget(self, found: Incoming) -> None:
        del self.rooms[found.room]
        del self._numbers[found.room.number]

    def _lost(self, peer: str, reason: str) -> None:
        for found in [each for each in self.rooms.values() if each.room.peer == peer]:
            self._fail(found, f"the prefill server {peer} is gone: {reason}", 502, gone=True)
        self._quarantine.lost(peer)
