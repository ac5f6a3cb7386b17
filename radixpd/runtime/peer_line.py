"""What both ends of the control link share: who this process is, whom it pairs with, the news of a peer, and a paired line.

Invariant: a line exists only after both sides have proven the secret and found each other's `Hello` fitting; it is up once the peer's offer
has come, and hands out messages only then. Both sides compare with the same function, so they refuse each other with the same values.
Called by `peer_call` (decode's end), `peer_door` (prefill's end) and `peers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from radixpd.config.secret import Secret
from radixpd.core.handoff import Arrived, Drained, PeerAbort, PeerMessage, Reserve
from radixpd.runtime.peer_messages import BODY_OVERHEAD, VERSION, Head, Hello, Layout, Offer, Sealed, read_body, write, write_body
from radixpd.runtime.peer_session import PeerLimits, Rejected, Session
from radixpd.runtime.peer_trust import is_loopback, main_key

__all__ = [
    "Event", "Identity", "Line", "News", "PeerGone", "PeerRefused", "PeerUnreachable", "PeerUp", "Site", "bounce", "configure", "head",
    "read_hello", "receive", "refusal", "send",
]  # fmt: skip

PLAIN = "none"  # the transfer dtype that everybody takes
KEEPALIVE = (60, 10, 3)  # seconds idle, seconds between probes, probes
ZMTP_PING, ZMTP_PATIENCE, ZMTP_HANDSHAKE, RECONNECT, RECONNECT_MOST = 5_000, 20_000, 5_000, 100, 2_000  # ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a peer must know of this server. `name`: its address as `host:port`, unlike any other server's, the same after a restart.
    `model`: fingerprint. `codecs`: transfer dtypes that may be used. `offers`: by transport, an opaque description of this side's
    endpoint."""

    role: str
    name: str
    model: str
    layout: Layout
    tp: int
    codecs: tuple[str, ...] = (PLAIN,)
    offers: dict[str, dict[str, Any]] = field(default_factory=dict)


# ---- news -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Paired, or heard again after a silence. `rooms_key`: known to both processes alone, for the tokens of data connections."""

    incarnation: bytes
    offers: dict[str, dict[str, Any]]
    rooms_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The two do not fit; the reason names both values. Whatever waited for the peer has been given back."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """Silent for a while. No proof of anything: it may still write."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The process that had this name has been replaced: its scheduler says nothing more. Its writers die with it; the mover knows when."""

    reason: str


News = PeerUp | PeerRefused | PeerUnreachable | PeerGone
Event = tuple[str, PeerMessage | News]


class Site:
    """This process as its peers see it, and what it has turned away."""

    def __init__(self, secret: Secret | None, incarnation: bytes, limits: PeerLimits, random: Callable[[int], bytes]) -> None:
        self.key = main_key(secret)
        self.secured = secret is not None
        self.incarnation = incarnation
        self.limits = limits
        self.random = random
        self.identity: Identity | None = None
        self.rejected: Counter[str] = Counter()

    def hello(self, called: str) -> bytes:
        """A fresh `Hello`, encoded, to the server that is called by that name. Only once `identity` is known."""
        known = self.identity
        assert known is not None
        hello = Hello(
            version=VERSION,
            incarnation=self.incarnation,
            nonce=self.random(32),
            role=known.role,
            name=known.name,
            called=called,
            secured=self.secured,
            model=known.model,
            layout=known.layout,
            tp=known.tp,
            codecs=known.codecs,
        )
        return write(hello)


_heads = msgspec.msgpack.Decoder(Head)
_hellos = msgspec.msgpack.Decoder(Hello)


def head(raw: bytes) -> Head:
    """The part of a `Hello` that every version has; `Rejected` for anything else."""
    try:
        return _heads.decode(raw)
    except msgspec.MsgspecError:
        raise Rejected("malformed") from None


def read_hello(raw: bytes) -> Hello | None:
    """The whole `Hello`; None if it is damaged, or of a version that has other fields."""
    try:
        return _hellos.decode(raw)
    except msgspec.MsgspecError:
        return None


def refusal(site: Site, raw: bytes, *, wanted: str, where: str) -> tuple[str, Hello | None]:
    """Why this process cannot pair with the authentic `Hello` in `raw`, empty if it can; and the `Hello`. `wanted`: the peer's role."""
    intro = f"cannot pair with the {wanted} server {where}: "
    if (version := head(raw).version) != VERSION:
        return f"{intro}protocol version {version} there, {VERSION} here", None
    if (theirs := read_hello(raw)) is None:
        return f"{intro}its greeting is damaged", None
    identity = site.identity
    assert identity is not None
    if theirs.role != wanted:
        return f"{intro}it is a {theirs.role} server", theirs
    pairs = [("model fingerprint", theirs.model, identity.model), ("tensor parallel size", theirs.tp, identity.tp)]
    for name in ("page_size", "dtype", "layers", "kv_heads", "head_dim", "order", "fingerprint"):
        word = "KV layout" if name == "fingerprint" else f"KV {name}" if name in ("dtype", "order") else name.replace("_", " ")
        pairs.append((word, getattr(theirs.layout, name), getattr(identity.layout, name)))
    wrong = [(word, there, here) for word, there, here in pairs if there != here]
    sent, taken = (theirs.codecs, identity.codecs) if wanted == "prefill" else (identity.codecs, theirs.codecs)
    if {*sent} - {*taken, PLAIN}:
        wrong.append(("--disaggregation-transfer-dtype", ", ".join(theirs.codecs), ", ".join(identity.codecs)))
    if len(wrong) > 1:
        wrong = [each for each in wrong if each[0] != "KV layout"]  # it follows from the others
    return (intro + "; ".join(f"{word} {there} there, {here} here" for word, there, here in wrong) if wrong else ""), theirs


def bounce(peer: str, message: PeerMessage | Offer, reason: str, *, sent: bool) -> Iterator[Event]:
    """What a brain hears of a message that its peer will not, or may not, get. `sent`: the peer may have it all the same."""
    if not isinstance(message, Reserve | Arrived):
        return
    yield peer, PeerAbort(message.room, reason, 502)
    if isinstance(message, Reserve) and not sent:
        yield peer, Drained(message.room)  # a peer that was never asked writes nothing


# ---- sockets --------------------------------------------------------------------------------------------------------------------


def configure(socket: zmq.Socket[Any], limits: PeerLimits) -> None:
    """Bounds and heartbeats that every socket of the control link has."""
    idle, between, probes = KEEPALIVE
    options = {
        zmq.LINGER: 0,
        zmq.SNDHWM: limits.frames,
        zmq.RCVHWM: limits.frames,
        zmq.MAXMSGSIZE: limits.frame,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: idle,
        zmq.TCP_KEEPALIVE_INTVL: between,
        zmq.TCP_KEEPALIVE_CNT: probes,
        zmq.HEARTBEAT_IVL: ZMTP_PING,
        zmq.HEARTBEAT_TIMEOUT: ZMTP_PATIENCE,
        zmq.HANDSHAKE_IVL: ZMTP_HANDSHAKE,
        zmq.RECONNECT_IVL: RECONNECT,
        zmq.RECONNECT_IVL_MAX: RECONNECT_MOST,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


def receive(socket: zmq.Socket[Any], site: Site, parts: int) -> Iterator[list[zmq.Frame]]:
    """What has arrived, up to a bound: messages of `parts` frames, from addresses that may speak."""
    for _ in range(site.limits.frames):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        if len(frames) != parts:
            site.rejected["malformed"] += 1
        elif not site.secured and not is_loopback(str(frames[-1].get("Peer-Address"))):
            site.rejected["address"] += 1
        else:
            yield frames


def send(socket: zmq.Socket[Any], parts: list[bytes]) -> bool:
    """Whether the socket took it: not if its queue is full or nobody is connected."""
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True


# ---- a paired line --------------------------------------------------------------------------------------------------------------


class Line:
    """One session with one process. `send` hands one frame to the socket."""

    def __init__(self, site: Site, peer: str, session: Session, incarnation: bytes, *, rooms_key: bytes) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self.session = session
        self.silent = False
        self.offers: dict[str, dict[str, Any]] | None = None
        self._site = site
        self._rooms_key = rooms_key
        assert site.identity is not None
        offer = Offer(site.identity.offers)
        session.post(offer, write_body(offer))

    def post(self, message: PeerMessage, send: Callable[[bytes], bool], now: float) -> Iterable[Event]:
        """Send, or keep until it can be sent; what the own brain must hear instead, if it cannot."""
        if self.silent and isinstance(message, Reserve):
            return bounce(self.peer, message, self.silence(now), sent=False)
        body = write_body(message)
        if len(body) > self._site.limits.frame - BODY_OVERHEAD:
            reason = f"{len(body)} bytes are too long for one message between the servers"
            self.session.post(refused := PeerAbort(message.room, reason, 502), write_body(refused))
            lost = bounce(self.peer, message, reason, sent=False)
        elif not self.session.post(message, body):
            self._site.rejected["queue full"] += 1
            lost = bounce(self.peer, message, f"too many messages wait for {self.peer}", sent=False)
        else:
            lost = iter(())
        self.session.transmit(send, now)
        return lost

    def take(self, frame: Sealed, now: float) -> list[Event]:
        """What one frame brings. Raises `Rejected`."""
        body = self.session.open(frame, now)
        events: list[Event] = []
        if self.silent and self.offers is not None:
            self.silent = False
            events.append((self.peer, PeerUp(self.incarnation, self.offers, self._rooms_key)))
        if body is None:
            return events
        try:
            message = read_body(body)
        except msgspec.MsgspecError:
            self._site.rejected["malformed"] += 1  # authentic: it will not come better by asking again
            return events
        if isinstance(message, Offer):
            self.offers = message.transports
            events.append((self.peer, PeerUp(self.incarnation, self.offers, self._rooms_key)))
        else:
            events.append((self.peer, message))
        return events

    def tick(self, send: Callable[[bytes], bool], now: float) -> Iterator[Event]:
        """Heartbeats, repeats, silence."""
        self.session.transmit(send, now)
        if self.offers is not None and not self.silent and now - self.session.heard > self._site.limits.silence:
            self.silent = True
            yield self.peer, PeerUnreachable(self.silence(now))

    def silence(self, now: float) -> str:
        """In words."""
        return f"{self.peer} has not been heard for {now - self.session.heard:.0f} s"

    def end(self, reason: str) -> Iterator[Event]:
        """The session is over; the process may live. What it may have missed is told."""
        for message in self.session.unacknowledged:
            yield from bounce(self.peer, message, reason, sent=True)
