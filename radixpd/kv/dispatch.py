"""From what is due to what is under way: pieces take turns on the link, coded where their send is, and go to the transports.

On the mover's thread alone, and it never waits. Invariants: of bytes that are not confirmed one peer has `WINDOW` and a piece at most; a
piece whose job was settled meanwhile is not handed over; each parcel is taken back once, however it ends, and its staging memory with it.
Made by the mover, which alone settles jobs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from radixpd.kv.coding import PIECE, Coding, Encoder, Parcel
from radixpd.kv.link import Link
from radixpd.kv.outbox import Job, Lane, Piece
from radixpd.kv.transport import KVTransport

__all__ = ["Dispatch"]

logger = logging.getLogger(__name__)

WINDOW = 16 << 20  # bytes on the way to one peer: enough to fill the wire, little enough that the first layer still comes first


class Dispatch:
    """`ways`: how each peer is reached now; `fail`: this job goes on no more, and why."""

    def __init__(
        self,
        link: Link,
        coding: Coding,
        ways: Mapping[str, KVTransport],
        *,
        fail: Callable[[Job, str], None],
        clock: Callable[[], float],
    ) -> None:
        self.link = link
        self.lanes: dict[str, Lane] = {}
        self.encoders: dict[str, Encoder] = {}  # one a lane
        self.flying: dict[int, Parcel] = {}  # by the number that its answer will carry
        self._coding, self._ways, self._fail, self._clock = coding, ways, fail, clock
        self._held: tuple[float, Lane, Parcel] | None = None  # on the link until then
        self._more = False  # something could be sent at once
        self._turn = 0

    def know(self, peer: str) -> None:
        """From now on there is work for this peer."""
        if peer not in self.lanes:
            self.lanes[peer], self.encoders[peer] = Lane(peer, self._clock()), Encoder(self._coding)

    def add(self, job: Job) -> None:
        """A job with pages to come; how it goes is decided now."""
        peer = job.send.peer
        job.codec = self.encoders[peer].choose(len(job.send.source))
        self.lanes[peer].jobs.append(job)

    def due(self, piece: Piece) -> None:
        """This can be sent."""
        lane = self.lanes[piece.job.send.peer]
        if not lane.flying and not lane.has_due:
            lane.moved = self._clock()  # the wait for the peer begins now
        lane.add(piece)

    @property
    def wait(self) -> float:
        """Seconds until `work` has something to do, as far as is known here."""
        if self._more:
            return 0.0
        return math.inf if self._held is None else max(0.0, self._held[0] - self._clock())

    def work(self) -> None:
        """Give the transports what the link lets through. Coding takes its time: between two pieces the sockets have their turn."""
        self._more = False
        while True:
            if self._held is not None:
                due, lane, parcel = self._held
                if due > self._clock():
                    return
                self._held = None
                self._hand_over(lane, parcel)
                if parcel.coded is not None:
                    self._more = True
                    return
                continue
            lanes = [lane for lane in self.lanes.values() if lane.has_due]
            if not lanes:
                self.link.rest()
                return
            lanes = [lane for lane in lanes if lane.flying < WINDOW and self.encoders[lane.peer].has_room(lane.codec)]
            if not lanes:
                return
            self._turn += 1
            self._wrap(lanes[self._turn % len(lanes)])

    def answered(self, number: int, *, arrived: bool) -> Parcel | None:
        """What this answer is about, if it was under way."""
        parcel = self.flying.pop(number, None)
        if parcel is None:
            return None
        lane = self.lanes[parcel.piece.job.send.peer]
        self._back(lane, parcel, arrived=arrived)
        if arrived:
            lane.moved = self._clock()
        return parcel

    def _wrap(self, lane: Lane) -> None:
        """Put the lane's next piece on the link."""
        encoder = self.encoders[lane.peer]
        piece = lane.take(*encoder.cut(lane.codec, self.link.piece(PIECE)))
        try:
            parcel = encoder.wrap(piece, self._clock())
        except Exception as error:  # any fault of a codec is this ticket's
            logger.exception("a piece could not be coded")
            self._fail(piece.job, f"an internal fault ({type(error).__name__})")
            return
        lane.flying += parcel.size
        self._held = self.link.carry(parcel.size), lane, parcel

    def _hand_over(self, lane: Lane, parcel: Parcel) -> None:
        piece, send = parcel.piece, parcel.piece.job.send
        if piece.job.settled:
            self._back(lane, parcel, arrived=False)
            return
        coded = () if parcel.coded is None else (parcel.coded,)
        try:
            number = self._ways[lane.peer].send(lane.peer, send.room, piece.layer, piece.source, piece.target, *coded)
        except Exception as error:  # any fault of a transport is this ticket's
            logger.exception("a send failed")
            self._back(lane, parcel, arrived=False)
            self._fail(piece.job, f"an internal fault ({type(error).__name__})")
            return
        self.flying[number] = parcel

    def _back(self, lane: Lane, parcel: Parcel, *, arrived: bool) -> None:
        """It is not under way any more."""
        lane.flying -= parcel.size
        self.encoders[lane.peer].unwrap(parcel, self._clock(), arrived=arrived)
