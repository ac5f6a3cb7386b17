"""Where data connections come in: lets in who has a peer's token, and looks after those who wait.

Invariant: a connection that has proved no token gets no further than the greeting, nor may it take its time; whoever waits (for a room, for
staging memory) goes on when it is there, in turn, or when it never will be. Used by the tcp and shm transports, which differ in whether the
bytes come along.
"""

from __future__ import annotations

import hmac
import logging
import os
import selectors
import socket
from collections.abc import Callable

import numpy as np

from radixpd.kv import frames
from radixpd.kv.inbound import Inbound
from radixpd.kv.stream import Broken
from radixpd.kv.transport import Ground, News

__all__ = ["Reception"]

logger = logging.getLogger(__name__)

STRANGERS = 64  # connections that have not proved anything yet; more are turned away


class Reception:
    """The listening socket and everybody who came. `rows`: the pool's bytes by layer where frames bring bytes, None where they do not.

    `welcome` sends the last word of the greeting (and whatever comes with it), `left` is told of every known connection that ended.
    """

    def __init__(
        self,
        ground: Ground,
        listener: socket.socket,
        *,
        fingerprint: str,
        pages: int,
        rows: list[np.ndarray] | None,
        welcome: Callable[[Inbound, bytes], None],
        gone: Callable[[Inbound], None],
    ) -> None:
        self.ground, self.fingerprint, self.pages, self.rows = ground, fingerprint, pages, rows
        self.tokens: dict[str, bytes] = {}
        self.guests: set[Inbound] = set()
        self.news: list[News] = []
        self._welcome, self._gone = welcome, gone
        self._listener = listener
        listener.setblocking(False)
        ground.selector.register(listener, selectors.EVENT_READ, self._accept)

    def of(self, peer: str) -> list[Inbound]:
        """The peer's connections."""
        return [guest for guest in self.guests if guest.peer == peer]

    def recognise(self, guest: Inbound, challenges: bytes, answer: bytes) -> str:
        """Whose token was proved. Every token is tried, so that time tells nothing."""
        found = ""
        for peer, token in self.tokens.items():
            if hmac.compare_digest(frames.proof(token, "sender", challenges, self.fingerprint), answer):
                found = peer
        if not found:
            self.ground.counters.wrong_tokens += 1
            raise Broken("it has no token of a known peer")
        return found

    def greet(self, guest: Inbound, word: bytes) -> None:
        """Let it in."""
        self._welcome(guest, word)

    def left(self, guest: Inbound, reason: str) -> None:
        """A connection has ended."""
        self.guests.discard(guest)
        for fd in guest.stream.fds:  # nobody is asked for descriptors
            os.close(fd)
        if guest.peer:
            logger.info("a data connection of %s has ended: %s", guest.peer, reason)
            self._gone(guest)

    def poll(self) -> None:
        """Strangers that say nothing, frames that wait for their room, or for staging memory."""
        now, arrivals = self.ground.clock(), self.ground.arrivals
        for guest in list(self.guests):
            if not guest.peer and now - guest.since > self.ground.options.connect:
                guest.stream.close("it did not introduce itself in time")
            room = guest.waits_for
            if room is not None and (now >= guest.waits_until or arrivals.find(room) is not None or arrivals.has_ended(room)):
                guest.stream.resume()
            if guest.crowded is not None and arrivals.find(guest.crowded.room) is not guest.crowded:
                guest.stream.resume()
        self._seat_next()

    def _seat_next(self) -> None:
        """Staging memory that has become free goes to whoever waits for it, in turn."""
        decoder = self.ground.decoder
        while decoder is not None and isinstance(first := decoder.staging.first, Inbound):
            first.stream.resume()
            if decoder.staging.first is first:
                return

    def dismiss(self, peer: str, reason: str) -> None:
        """Close all connections of a peer."""
        for guest in self.of(peer):
            guest.stream.close(reason)

    def close(self) -> None:
        """Close everything."""
        self.ground.selector.unregister(self._listener)
        self._listener.close()
        for guest in list(self.guests):
            guest.stream.close("this server has closed its pool")
        self.rows = None

    def _accept(self, mask: int) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody more, or out of descriptors: the next event tries again
                return
            if sum(not guest.peer for guest in self.guests) >= STRANGERS:
                sock.close()
                continue
            guest = Inbound(sock, self)
            self.guests.add(guest)
            guest.stream.start(guest.talk())
