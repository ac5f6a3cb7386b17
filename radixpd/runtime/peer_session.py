"""One paired session, without its socket: messages in order, once, unaltered, or not at all.

Every frame carries (incarnation, counter, ack, number, body) under a MAC. A frame counts only if its MAC is right and its counter higher
than all before, a message only if it is the next by number; what is not acknowledged is sent again once the peer is heard. So whatever a
network does to the frames, what comes out is a beginning of what the peer has posted; when frames flow again, the rest follows. Pure: time
and the way out are arguments. Called by `peer_line`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from radixpd.core.handoff import PeerMessage
from radixpd.runtime.peer_messages import Offer, Sealed, write
from radixpd.runtime.peer_trust import SessionKeys, same, seal

__all__ = ["PeerLimits", "Rejected", "Session"]

BURST = 64  # messages that are acknowledged at once, not with the next heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """Seconds and bounds of the control link."""

    beat: float = 1.0  # a heartbeat when nothing else was sent for so long; also between two knocks
    silence: float = 5.0  # without a word, a peer is unreachable
    keep: float = 5.0  # a message for a peer that does not answer at all
    retry: float = 5.0  # a refused or silent peer is not tried by requests for so long
    forget: float = 600.0  # a silent session
    idle: float = 60.0  # a connection that never led to a session and that nobody uses
    standstill: float = 3.0  # between two ticks: time in which this process did not run
    messages: int = 4096  # kept per peer, until acknowledged
    kept_bytes: int = 64 << 20
    frame: int = 16 << 20  # bytes; a longer one ends its connection
    frames: int = 1000  # read from one socket per turn; also the bound of ZMQ's own queues
    calls: int = 256  # peers that decode calls at a time
    handshakes: int = 256  # begun and not finished, at the door


class Rejected(Exception):
    """A frame that changes nothing; the message is the reason it is counted under."""


@dataclass(slots=True, eq=False)
class Posted:
    """A message that the peer has not acknowledged."""

    number: int
    body: bytes
    message: PeerMessage | Offer


class Session:
    """Both directions of one session."""

    def __init__(self, keys: SessionKeys, *, own: bytes, theirs: bytes, now: float, limits: PeerLimits) -> None:
        self.id = keys.session
        self.heard = now
        self._keys = keys
        self._own, self._theirs = own, theirs  # incarnations
        self._limits = limits
        self._posted: deque[Posted] = deque()
        self._kept = 0  # bytes of those
        self._last = 0  # number of the newest message posted
        self._reached = 0  # number of the newest message handed to the socket, since the last going back
        self._moved = now  # when the oldest unacknowledged message was handed to the socket, or an acknowledgement came
        self._counter = 0
        self._spoke = float("-inf")
        self._seen = 0  # highest counter received
        self._received = 0  # messages received, all in order
        self._told = 0  # of those, acknowledged

    @property
    def unacknowledged(self) -> list[PeerMessage | Offer]:
        """Messages that the peer may or may not have."""
        return [each.message for each in self._posted]

    def post(self, message: PeerMessage | Offer, body: bytes) -> bool:
        """Queue a message, `body` being its bytes; False when the queue is full."""
        if len(self._posted) >= self._limits.messages or self._kept + len(body) > self._limits.kept_bytes:
            return False
        self._last += 1
        self._posted.append(Posted(self._last, body, message))
        self._kept += len(body)
        return True

    def transmit(self, send: Callable[[bytes], bool], now: float) -> None:
        """Hand to the socket what is due. `send` is False when the socket takes no more: the rest stays due."""
        if self._reached < self._last:
            oldest = self._posted[0].number
            for index in range(max(0, self._reached + 1 - oldest), len(self._posted)):
                posted = self._posted[index]
                if not send(self._seal(posted.number, posted.body)):
                    return
                if index == 0:
                    self._moved = now
                self._reached, self._spoke, self._told = posted.number, now, self._received
        if (now - self._spoke >= self._limits.beat or self._received - self._told >= BURST) and send(self._seal(0, b"")):
            self._spoke, self._told = now, self._received

    def open(self, frame: Sealed, now: float) -> bytes | None:
        """The body of the next message, None if the frame brings none. Raises `Rejected`."""
        if frame.incarnation != self._theirs:
            raise Rejected("incarnation")
        mac = seal(self._keys.theirs, frame.session, frame.incarnation, (frame.counter, frame.ack, frame.number), frame.body)
        if frame.session != self.id or not same(mac, frame.mac):
            raise Rejected("mac")
        if frame.counter <= self._seen:
            raise Rejected("replayed")
        self._seen, self.heard = frame.counter, now
        self._acknowledge(frame.ack, now)
        if frame.number == 0:
            return None
        if frame.number <= self._received:
            raise Rejected("repeated")
        if frame.number > self._received + 1:
            raise Rejected("gap")
        self._received += 1
        return frame.body

    def excuse(self, seconds: float) -> None:
        """Time in which this process did not run is not the peer's silence."""
        self.heard += seconds

    def _acknowledge(self, ack: int, now: float) -> None:
        while self._posted and self._posted[0].number <= ack:
            self._kept -= len(self._posted.popleft().body)
            self._moved = now
        if self._posted and self._reached >= self._posted[0].number and now - self._moved >= self._limits.beat:
            self._reached = self._posted[0].number - 1  # the peer is there, and lacks these

    def _seal(self, number: int, body: bytes) -> bytes:
        self._counter += 1
        numbers = (self._counter, self._received, number)
        mac = seal(self._keys.own, self.id, self._own, numbers, body)
        return write(Sealed(self.id, self._own, *numbers, body, mac))
