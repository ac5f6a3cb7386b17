"""The control link between prefill and decode schedulers: who is there, what they say, and what it cost to listen.

The scheduler's loop owns one `Peers`: it polls, calls `drain` and then `tick` with the time of its turn, and `send`s what its brain tells
a peer. Nothing here waits, sleeps or starts a thread. Invariants: messages of a peer come in order, once, unaltered; a message that cannot
be delivered is answered to the own brain as if the peer had given the room up; bytes from strangers change counters only. Give it a ZMQ
context of its own: host names are resolved in the context's thread.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import zmq

from radixpd.config.secret import Secret
from radixpd.core.handoff import PeerMessage
from radixpd.errors import BadRequest
from radixpd.runtime.peer_call import Call
from radixpd.runtime.peer_door import Door
from radixpd.runtime.peer_line import Event, Identity, News, PeerGone, PeerRefused, PeerUnreachable, PeerUp, Site, bounce
from radixpd.runtime.peer_session import PeerLimits
from radixpd.runtime.peer_trust import contact

__all__ = ["Event", "Identity", "News", "PeerGone", "PeerLimits", "PeerRefused", "PeerUnreachable", "PeerUp", "PeerView", "Peers"]

REPORT = 10.0  # seconds between two log lines about rejected frames

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer for people and metrics. `state`: up, pairing, unreachable, refused."""

    peer: str
    state: str
    silent_seconds: float
    unacknowledged: int


class Peers:
    """All control connections of one scheduler process."""

    def __init__(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller,
        *,
        secret: Secret | None,
        incarnation: bytes,
        bind: tuple[str, int] | None = None,
        allowed: Iterable[str] = (),
        limits: PeerLimits | None = None,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`bind`: host and port where decode servers knock; raises `ConfigError` if that is taken. `incarnation`: 16 random bytes of this
        process. `allowed`: `--disaggregation-peers`. Sockets enter and leave `poller` by themselves."""
        self.limits = limits or PeerLimits()
        self._site = Site(secret, incarnation, self.limits, random)
        self._context = context
        self._poller = poller
        self._allowed = tuple(allowed)
        self._door = Door(context, self._site, *bind) if bind else None
        self._calls: dict[str, Call] = {}
        self._ready: list[Event] = []
        self._ticked: float | None = None
        self._reported: Counter[str] = Counter()
        self._report_at = 0.0
        if self._door is not None:
            poller.register(self._door.socket, zmq.POLLIN)

    @property
    def rejected(self) -> Counter[str]:
        """Frames that changed nothing, by reason."""
        return self._site.rejected

    @property
    def port(self) -> int:
        """The bound port; 0 without one."""
        return self._door.port if self._door else 0

    def identify(self, identity: Identity) -> None:
        """From now on this server pairs: before, knocks go unanswered and own messages wait. Existing sessions keep what they agreed on."""
        self._site.identity = identity

    def send(self, peer: str, message: PeerMessage, now: float) -> None:
        """Deliver in order, sooner or later; if that fails `drain` says so."""
        if self._door is not None and "#" in peer:
            self._ready += self._door.send(peer, message, now)
            return
        call = self._calls.get(peer)
        try:
            call = call or self._open(peer, now)
        except BadRequest as error:
            self._ready += bounce(peer, message, str(error), sent=False)
            return
        self._ready += call.send(message, now)
        self._watch(call)

    def doubt(self, peer: str) -> None:
        """Somebody else has seen its process, or its data connections, end: until it is heard again it counts as silent."""
        if (call := self._calls.get(peer)) is not None and call.line is not None and call.line.offers is not None:
            call.line.silent = True

    def drain(self, now: float) -> list[Event]:
        """What has come, of all peers: messages for the brain, and news."""
        events, self._ready = self._ready, []
        if self._door is not None:
            events += self._door.receive(now)
        for call in self._calls.values():
            events += call.receive(now)
            self._watch(call)
        return events

    def tick(self, now: float) -> None:
        """At least every `limits.beat` seconds, after `drain`: heartbeats, deadlines. News come with the next `drain`."""
        gap = now - self._ticked if self._ticked is not None else 0.0
        self._ticked = now
        ends: list[Door | Call] = [*self._calls.values(), *([self._door] if self._door else [])]
        for end in ends:
            if gap > self.limits.standstill:
                end.excuse(gap)
            self._ready += end.tick(now)
        for call in [each for each in self._calls.values() if each.is_idle(now)]:
            self._close(call)
        for call in self._calls.values():
            self._watch(call)
        self._report(now)

    @property
    def has_news(self) -> bool:
        """Whether `drain` has something without any socket being readable."""
        return bool(self._ready)

    def view(self, now: float) -> list[PeerView]:
        """Every peer that is known."""
        guests = (
            [(guest.line.peer, _state_of_guest(guest.line.silent), guest.line) for guest in self._door.guests.values()]
            if self._door
            else []
        )
        calls = [(call.peer, call.state, call.line) for call in self._calls.values()]
        return [
            PeerView(peer, state, now - line.session.heard if line else 0.0, len(line.session.unacknowledged) if line else 0)
            for peer, state, line in [*guests, *calls]
        ]

    def close(self) -> None:
        """Close every socket at once; the peers will find this process silent."""
        for call in list(self._calls.values()):
            self._close(call)
        if self._door is not None:
            self._poller.unregister(self._door.socket)
            self._door.close()
            self._door = None

    # ---- inner ----------------------------------------------------------------------------------------------------------------

    def _open(self, peer: str, now: float) -> Call:
        host, _, port = peer.rpartition(":")
        if not port.isdigit() or contact(host, int(port), allowed=self._allowed, secured=self._site.secured) != peer:
            raise BadRequest(f"{peer!r} is not the name of a peer")
        if len(self._calls) >= self.limits.calls:
            raise BadRequest(f"{peer} would be more than the {self.limits.calls} prefill servers that this server keeps connections to")
        call = self._calls[peer] = Call(self._context, self._site, peer, now)
        self._poller.register(call.socket, zmq.POLLIN)
        return call

    def _watch(self, call: Call) -> None:
        self._poller.modify(call.socket, zmq.POLLIN | (zmq.POLLOUT if call.wants_out else 0))

    def _close(self, call: Call) -> None:
        del self._calls[call.peer]
        self._poller.unregister(call.socket)
        call.close()

    def _report(self, now: float) -> None:
        if now < self._report_at or self._site.rejected == self._reported:
            return
        new = self._site.rejected - self._reported
        logger.warning(
            "frames from peers that changed nothing: %s", ", ".join(f"{count} {reason}" for reason, count in sorted(new.items()))
        )
        self._reported, self._report_at = self._site.rejected.copy(), now + REPORT


def _state_of_guest(silent: bool) -> str:
    return "unreachable" if silent else "up"
