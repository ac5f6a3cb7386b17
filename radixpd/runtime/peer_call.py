"""Decode's end of the control link: one connection to one prefill server, kept for as long as anybody wants it.

Until the handshake is done messages wait, with a deadline; a peer that does not fit or does not answer is marked, requests for it fail
at once until the mark expires, and it is tried again. Invariant: an unauthenticated frame can cause a new handshake and nothing else, and
while a session is in use not even that: it ends only when the peer no longer knows it. Called by `peers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from radixpd.core.handoff import PeerMessage
from radixpd.runtime.peer_line import Event, Line, PeerGone, PeerRefused, Site, bounce, configure, head, read_hello, receive, refusal, send
from radixpd.runtime.peer_messages import Confirm, Knock, Sealed, Stranger, Welcome, read_frame, write
from radixpd.runtime.peer_session import Rejected, Session
from radixpd.runtime.peer_trust import FLAG, endpoint, proof, rooms_key, same, session_keys

__all__ = ["Call"]


class Call:
    """The connection to `peer`."""

    def __init__(self, context: zmq.Context[Any], site: Site, peer: str, now: float) -> None:
        self.peer = peer
        self.socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
        self.line: Line | None = None
        self._site = site
        self._waiting: deque[tuple[float, PeerMessage]] = deque()
        self._hello = b""  # ours, of the handshake under way
        self._knocked = float("-inf")
        self._mark = ""  # why requests for this peer fail at once, until:
        self._marked_until = float("-inf")
        self._refused = False  # by comparison, not by silence
        self._trouble = ""
        self._used = now
        configure(self.socket, site.limits)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # without a connection nothing queues up unseen
        if peer.startswith("[") or not peer.rpartition(":")[0].replace(".", "").isdigit():
            self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.connect(endpoint(peer))

    @property
    def state(self) -> str:
        """In a word, for people who ask."""
        if self.line is not None:
            return "unreachable" if self.line.silent else "up" if self.line.offers is not None else "pairing"
        return "refused" if self._refused else "unreachable" if self._mark else "pairing"

    def send(self, message: PeerMessage, now: float) -> Iterator[Event]:
        """Send or keep; yields what the own brain must hear instead."""
        self._used = now
        if self.line is not None and self.line.offers is not None:
            yield from self.line.post(message, self._put, now)
        elif self._mark and now < self._marked_until:
            yield from bounce(self.peer, message, self._mark, sent=False)
        elif len(self._waiting) >= self._site.limits.messages:
            self._site.rejected["queue full"] += 1
            yield from bounce(self.peer, message, f"too many messages wait for {self.peer}", sent=False)
        else:
            self._waiting.append((now, message))
            self._knock(now)

    def receive(self, now: float) -> Iterator[Event]:
        """Everything that has arrived."""
        for (frame,) in receive(self.socket, self._site, 1):
            try:
                yield from self._take(bytes(frame.buffer), now)
            except Rejected as rejected:
                self._site.rejected[str(rejected)] += 1

    def tick(self, now: float) -> Iterator[Event]:
        """Knocks, heartbeats, deadlines."""
        limits = self._site.limits
        if self.line is not None:
            yield from self.line.tick(self._put, now)
            if now - self.line.session.heard > limits.forget:
                yield from self._end(f"{self.line.silence(now)}, and is forgotten")
        elif self._waiting or not self._refused:
            self._knock(now)
        if self._waiting and now - self._waiting[0][0] > limits.keep:
            trouble = self._trouble or "it does not answer (a request's bootstrap_port is its --disaggregation-bootstrap-port)"
            self._set_mark(f"the prefill server {self.peer} could not be reached within {limits.keep:g} s: {trouble}", now, refused=False)
            yield from self._give_back()

    @property
    def wants_out(self) -> bool:
        """Whether a knock waits for the connection."""
        known = self._site.identity is not None
        return known and self.line is None and bool(self._waiting) and self._knocked == float("-inf")

    def is_idle(self, now: float) -> bool:
        """Whether nobody would miss this connection."""
        return self.line is None and not self._waiting and now - self._used > self._site.limits.idle

    def excuse(self, seconds: float) -> None:
        """This process did not run for so long."""
        if self.line is not None:
            self.line.session.excuse(seconds)

    def close(self) -> None:
        """Close at once."""
        self.socket.close(linger=0)

    # ---- inner ----------------------------------------------------------------------------------------------------------------

    def _put(self, frame: bytes) -> bool:
        return send(self.socket, [frame])

    def _knock(self, now: float) -> None:
        if self._site.identity is None or now - self._knocked < self._site.limits.beat:
            return
        self._hello = self._hello or self._site.hello(self.peer)
        if self._put(write(Knock(self._hello))):
            self._knocked = now

    def _take(self, data: bytes, now: float) -> Iterator[Event]:
        try:
            frame = read_frame(data)
        except msgspec.MsgspecError:
            raise Rejected("malformed") from None
        match frame:
            case Sealed():
                if self.line is None or frame.session != self.line.session.id:
                    raise Rejected("unknown session")
                fresh = self.line.offers is None
                yield from self.line.take(frame, now)
                if fresh and self.line.offers is not None:
                    yield from self._established(self.line, now)
            case Welcome():
                yield from self._welcome(frame, now)
            case Stranger():
                if self.line is None or frame.session != self.line.session.id:
                    raise Rejected("unknown session")
                if self.line.offers is not None and now - self.line.session.heard < 2 * self._site.limits.beat:
                    raise Rejected("unexpected")  # the peer itself has only just used this session
                self._knock(now)
            case _:
                raise Rejected("unexpected")

    def _welcome(self, welcome: Welcome, now: float) -> Iterator[Event]:
        ours, site = self._hello, self._site
        if not ours:
            raise Rejected("unexpected")
        theirs = head(welcome.hello)
        if not same(welcome.proof, proof(site.key, "prefill", ours, welcome.hello)):
            self._hello = b""  # the next knock is a fresh one
            self._trouble = self._distrust(welcome.hello)
            raise Rejected("proof")
        self._hello, self._trouble = b"", ""
        self._put(write(Confirm(proof(site.key, "decode", ours, welcome.hello))))
        yield from self._replace(theirs.incarnation)
        problem, _ = refusal(site, welcome.hello, wanted="prefill", where=self.peer)
        if problem:
            self._set_mark(problem, now, refused=True)
            yield self.peer, PeerRefused(problem)
            yield from self._give_back()
            return
        keys = session_keys(site.key, ours, welcome.hello, calling=True)
        session = Session(keys, own=site.incarnation, theirs=theirs.incarnation, now=now, limits=site.limits)
        tokens = rooms_key(site.key, site.incarnation, theirs.incarnation)
        self.line = Line(site, self.peer, session, theirs.incarnation, rooms_key=tokens)
        session.transmit(self._put, now)

    def _established(self, line: Line, now: float) -> Iterator[Event]:
        """The peer has taken the session up: not before, because it may have turned our `Confirm` down."""
        self._mark, self._refused = "", False
        waiting, self._waiting = self._waiting, deque()
        for _, message in waiting:
            yield from line.post(message, self._put, now)

    def _distrust(self, hello: bytes) -> str:
        """What may be wrong, in words alone: nothing in this `Hello` is proven."""
        claims = read_hello(hello)
        if claims is not None and claims.secured != self._site.secured:
            here, there = ("a secret", "none") if self._site.secured else ("no secret", "one")
            return f"this server has {here} and it has {there} ({FLAG})"
        return f"it did not prove that it knows the secret of this server ({FLAG})"

    def _replace(self, incarnation: bytes) -> Iterator[Event]:
        """A new session ends the old one; a new process at this address ends the old process."""
        if self.line is None or self.line.offers is None:
            self.line = None
        elif incarnation == self.line.incarnation:
            yield from self._end(f"{self.peer} has forgotten this server")
        else:
            self.line = None
            yield self.peer, PeerGone(f"another process has started at {self.peer}")

    def _end(self, reason: str) -> Iterator[Event]:
        assert self.line is not None
        line, self.line = self.line, None
        yield from line.end(reason)

    def _set_mark(self, reason: str, now: float, *, refused: bool) -> None:
        self._mark, self._marked_until, self._refused = reason, now + self._site.limits.retry, refused

    def _give_back(self) -> Iterator[Event]:
        waiting, self._waiting = self._waiting, deque()
        for _, message in waiting:
            yield from bounce(self.peer, message, self._mark, sent=False)
