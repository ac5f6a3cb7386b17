"""Prefill's end of the control link: the bootstrap port, where decode servers knock.

Invariant: whatever comes without a proof of the secret changes nothing but counters and a bounded list of begun handshakes. A session
belongs to a process, not to a connection: its frames may come over a new one. A decode server is known to this brain as
`name#incarnation`, so a restarted one is another peer. Called by `peers`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from radixpd.core.handoff import PeerMessage
from radixpd.errors import ConfigError
from radixpd.runtime.peer_line import Event, Line, PeerGone, Site, bounce, configure, head, read_hello, receive, refusal, send
from radixpd.runtime.peer_messages import Confirm, Hello, Knock, Sealed, Stranger, Welcome, read_frame, write
from radixpd.runtime.peer_session import Rejected, Session
from radixpd.runtime.peer_trust import proof, rooms_key, same, session_keys

__all__ = ["Door"]

PENDING = 30.0  # seconds that a begun handshake is remembered

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Begun:
    """A handshake that waits for its `Confirm`."""

    theirs: bytes
    ours: bytes
    since: float


@dataclass(slots=True)
class Guest:
    """A paired decode server. `called`: how it calls this one; `route`: the connection it was last heard on."""

    name: str
    called: str
    line: Line
    route: bytes


class Door:
    """The bound socket and everyone behind it."""

    def __init__(self, context: zmq.Context[Any], site: Site, host: str, port: int) -> None:
        self.socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        self.guests: dict[bytes, Guest] = {}  # by session
        self._site = site
        self._begun: OrderedDict[bytes, Begun] = OrderedDict()  # by connection
        self._refused: dict[str, float] = {}  # by text: when it was last logged
        configure(self.socket, site.limits)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if ":" in host:
            self.socket.setsockopt(zmq.IPV6, 1)
        where = f"[{host}]" if ":" in host else host
        try:
            self.socket.bind(f"tcp://{where}:{port or '*'}")
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise ConfigError(f"--disaggregation-bootstrap-port {port}: cannot bind {where}: {zmq.strerror(error.errno or 0)}") from None

    @property
    def port(self) -> int:
        """The port that is bound."""
        return int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def send(self, peer: str, message: PeerMessage, now: float) -> Iterator[Event]:
        """Send, or say that this guest has left."""
        guest = self._of(peer)
        if guest is None:
            yield from bounce(peer, message, f"{peer} is no longer connected", sent=True)
        else:
            yield from guest.line.post(message, lambda frame: self._put(guest, frame), now)

    def receive(self, now: float) -> Iterator[Event]:
        """Everything that has arrived."""
        for route, frame in receive(self.socket, self._site, 2):
            try:
                yield from self._take(bytes(route.buffer), bytes(frame.buffer), now)
            except Rejected as rejected:
                self._site.rejected[str(rejected)] += 1

    def tick(self, now: float) -> Iterator[Event]:
        """Heartbeats, repeats, silence, and what can be forgotten."""
        for guest in list(self.guests.values()):
            yield from guest.line.tick(lambda frame, guest=guest: self._put(guest, frame), now)  # type: ignore[misc]
            if now - guest.line.session.heard > self._site.limits.forget:
                yield from self._drop(guest, f"{guest.line.silence(now)}, and is forgotten")
        while self._begun and now - next(iter(self._begun.values())).since > PENDING:
            self._begun.popitem(last=False)
        self._refused = {text: when for text, when in self._refused.items() if now - when < self._site.limits.idle}

    def excuse(self, seconds: float) -> None:
        """This process did not run for so long."""
        for guest in self.guests.values():
            guest.line.session.excuse(seconds)

    def close(self) -> None:
        """Close at once."""
        self.socket.close(linger=0)

    # ---- inner ----------------------------------------------------------------------------------------------------------------

    def _of(self, peer: str) -> Guest | None:
        return next((guest for guest in self.guests.values() if guest.line.peer == peer), None)

    def _put(self, guest: Guest, frame: bytes) -> bool:
        return send(self.socket, [guest.route, frame])

    def _take(self, route: bytes, data: bytes, now: float) -> Iterator[Event]:
        try:
            frame = read_frame(data)
        except msgspec.MsgspecError:
            raise Rejected("malformed") from None
        match frame:
            case Sealed():
                guest = self.guests.get(frame.session)
                if guest is None:
                    send(self.socket, [route, write(Stranger(frame.session))])
                    raise Rejected("unknown session")
                events = guest.line.take(frame, now)  # first of all it must be authentic
                guest.route = route
                yield from events
            case Knock():
                self._knock(route, frame, now)
            case Confirm():
                yield from self._confirm(route, frame, now)
            case _:
                raise Rejected("unexpected")

    def _knock(self, route: bytes, knock: Knock, now: float) -> None:
        site = self._site
        if site.identity is None:
            return  # it will knock again
        head(knock.hello)
        begun = self._begun.pop(route, None)
        if begun is None or begun.theirs != knock.hello:
            begun = Begun(knock.hello, site.hello(""), now)
        self._begun[route] = begun
        while len(self._begun) > site.limits.handshakes:
            self._begun.popitem(last=False)
        send(self.socket, [route, write(Welcome(begun.ours, proof(site.key, "prefill", begun.theirs, begun.ours)))])

    def _confirm(self, route: bytes, confirm: Confirm, now: float) -> Iterator[Event]:
        site, begun = self._site, self._begun.pop(route, None)
        if begun is None:
            raise Rejected("unexpected")
        if not same(confirm.proof, proof(site.key, "decode", begun.theirs, begun.ours)):
            raise Rejected("proof")
        known = read_hello(begun.theirs)
        problem, theirs = refusal(site, begun.theirs, wanted="decode", where=known.name if known else "of another version")
        if problem or theirs is None:
            self._refuse(problem, now)
            return
        yield from self._make_way(theirs, now)
        keys = session_keys(site.key, begun.theirs, begun.ours, calling=False)
        session = Session(keys, own=site.incarnation, theirs=theirs.incarnation, now=now, limits=site.limits)
        tokens = rooms_key(site.key, theirs.incarnation, site.incarnation)
        peer = f"{theirs.name}#{theirs.incarnation.hex()[:8]}"
        if self._of(peer) is not None:
            peer += f"@{theirs.called}"  # it knows this server by two names
        line = Line(site, peer, session, theirs.incarnation, rooms_key=tokens)
        guest = self.guests[session.id] = Guest(theirs.name, theirs.called, line, route)
        session.transmit(lambda frame: self._put(guest, frame), now)

    def _make_way(self, theirs: Hello, now: float) -> Iterator[Event]:
        """Older sessions of the same server end, if they are its own or have fallen silent."""
        for guest in [each for each in self.guests.values() if each.name == theirs.name]:
            if guest.line.incarnation == theirs.incarnation:
                if guest.called == theirs.called:
                    yield from self._drop(guest, f"{guest.line.peer} has connected anew")
            elif now - guest.line.session.heard < 2 * self._site.limits.beat:
                raise Rejected("name in use")  # two servers, or one that has only just gone; it will knock again
            else:
                del self.guests[guest.line.session.id]
                yield guest.line.peer, PeerGone(f"it has been restarted as {theirs.name}#{theirs.incarnation.hex()[:8]}")

    def _drop(self, guest: Guest, reason: str) -> Iterator[Event]:
        del self.guests[guest.line.session.id]
        yield from guest.line.end(reason)

    def _refuse(self, problem: str, now: float) -> None:
        self._site.rejected["refused"] += 1
        if problem not in self._refused and len(self._refused) < self._site.limits.handshakes:
            self._refused[problem] = now
            logger.warning("%s", problem)
