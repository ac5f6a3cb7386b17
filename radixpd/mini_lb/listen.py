"""KV events of the workers, over ZMQ: heard as they are published, asked for where some were missed, given up where nobody answers.

A `Listener` subscribes first and then asks for everything from the start; from then on it asks every `BEAT` for whatever has come since,
and for the newest batch once more: who cannot send that one as it was is another process, who sends nothing has died. Invariant: `in_sync`
is true only while the index has all that the worker had told a moment ago; whatever goes wrong ends it, drops what was known, and the
listener begins anew by itself, later each time. Nothing here waits or blocks: sockets are read when they are readable, a turn reads so many
messages at most. Called by `fleet`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq

from radixpd.errors import PeerFailed
from radixpd.mini_lb.card import Endpoints
from radixpd.mini_lb.feed import Feed, decode

__all__ = ["Listener", "Listeners"]

BEAT = 0.5  # seconds between two questions for what is new
DEADLINE = 3.0  # seconds for an answer, or more of it, to come
FIRST_PAUSE, LAST_PAUSE = 0.5, 30.0  # seconds before a new attempt
SETTLED = 2  # answers in a row, a beat apart, after which it works again
TURN = 100  # messages read in one go
HELD = 10_000  # messages that a socket holds, as many as a publisher
LARGEST = 2**28  # bytes of a message; more is no batch
RECONNECT_MS = (100, 5000)
CONNECT_MS = 5000
END = b"\xff" * 8  # of a replay

logger = logging.getLogger(__name__)


class Listener:
    """Hears one process. Made inside the loop; `close` it when the worker is another process, or has left."""

    def __init__(self, context: zmq.Context[Any], endpoints: Endpoints, feed: Feed) -> None:
        self._context = context
        self._endpoints = endpoints
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._sockets: list[zmq.Socket[Any]] = []  # live, and where there is one replay
        self._current = False  # everything up to the newest answer is known
        self._asked: float | None = None  # when the question under way was sent, or its last part answered
        self._newest: tuple[int, bytes] | None = None  # batch that was heard or replayed
        self._proof: tuple[int, bytes] | None = None  # what the answer under way must begin with
        self._answers = 0  # questions answered since it began
        self._pause = FIRST_PAUSE
        self._begin_at = 0.0
        self._silent = False  # what is wrong has been logged
        self._timer: asyncio.Handle | None = self._loop.call_soon(self._beat)

    @property
    def in_sync(self) -> bool:
        """Whether the index knows this worker's cache."""
        return self._current and self._feed.whole and not self._feed.behind

    def close(self) -> None:
        """Hear no more, and forget what was heard."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._hang_up()

    # ---- sockets --------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Subscribe, then ask: what is published in between comes twice, and nothing is missed."""
        try:
            self._connect(zmq.SUB, self._endpoints.live)
            if self._endpoints.replay:
                self._connect(zmq.DEALER, self._endpoints.replay)
        except zmq.ZMQError as error:
            self._give_up(f"cannot connect: {zmq.strerror(error.errno or 0)}")
            return
        self._ask(anyway=True)

    def _connect(self, kind: int, endpoint: str) -> None:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        self._sockets.append(socket)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, HELD),
            (zmq.MAXMSGSIZE, LARGEST),
            (zmq.IPV6, 1),
            (zmq.CONNECT_TIMEOUT, CONNECT_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS[0]),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1]),
            (zmq.TCP_KEEPALIVE, 1),
        ):
            socket.setsockopt(option, value)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, self._endpoints.topic.encode())
        socket.connect(endpoint)
        self._loop.add_reader(int(socket.getsockopt(zmq.FD)), self._read)
        self._loop.call_soon(self._read)  # edges before this line are not signalled again

    def _hang_up(self) -> None:
        for socket in self._sockets:
            self._loop.remove_reader(int(socket.getsockopt(zmq.FD)))
            socket.close(linger=0)
        self._sockets.clear()
        self._current, self._asked, self._newest, self._proof, self._answers = False, None, None, None, 0
        self._feed.restarted()

    def _give_up(self, reason: str) -> None:
        """For now. Said once, until it has worked again."""
        if not self._silent:
            logger.warning("KV events of %s: %s; what was sent there is taken for what it has", self._feed.worker, reason)
            self._silent = True
        self._hang_up()
        self._begin_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LAST_PAUSE)

    # ---- time -----------------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        now = time.monotonic()
        if not self._sockets:
            if now >= self._begin_at:
                self._begin()
        elif self._asked is not None and now - self._asked > DEADLINE:
            self._give_up(f"no answer within {DEADLINE:g} s")
        else:
            self._ask(anyway=True)
        self._timer = self._loop.call_later(BEAT, self._beat)

    def _ask(self, *, anyway: bool = False) -> None:
        """Ask for what is missing. Where nobody can be asked it stays missing."""
        if self._asked is not None:
            return
        if len(self._sockets) < 2:
            if self._feed.ask() is not None:
                self._feed.replay_ended(time.monotonic())
            return
        first = self._feed.ask(anyway=anyway)
        if first is None:
            return
        self._proof = self._newest if self._newest is not None and self._newest[0] == first - 1 else None
        if self._proof is not None:
            first -= 1
        try:
            self._sockets[1].send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._give_up(f"cannot ask for what was missed: {zmq.strerror(error.errno or 0)}")
            return
        self._asked = time.monotonic()
        self._loop.call_soon(self._read)  # sending may have used up the edge

    # ---- messages -------------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take what has come, live batches first: they tell of a new process."""
        try:
            taken = sum(self._drain(socket, take) for socket, take in zip(tuple(self._sockets), (self._live, self._replayed)))
        except zmq.ZMQError as error:
            self._give_up(f"the socket failed: {zmq.strerror(error.errno or 0)}")
        except PeerFailed as error:
            self._give_up(str(error))
        else:
            if taken:  # there may be more
                self._loop.call_soon(self._read)

    def _drain(self, socket: zmq.Socket[Any], take: Callable[[list[bytes]], None]) -> int:
        for taken in range(TURN):
            if socket.closed:
                return taken
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return taken
            take(frames)
        return TURN

    def _live(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            raise PeerFailed("KV events that cannot be read: a message is not topic, sequence, payload")
        before, sequence = self._feed.next, int.from_bytes(frames[1], "big")
        self._feed.live(sequence, decode(frames[2]), time.monotonic())
        if self._feed.next < before:
            self._begin_anew()
            return
        self._note(sequence, frames[2])
        self._current = self._current or len(self._sockets) == 1
        self._ask()

    def _replayed(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            raise PeerFailed("KV events that cannot be read: an answer is not sequence, payload")
        now, proof = time.monotonic(), self._proof
        if proof is not None and frames[1:] != [proof[0].to_bytes(8, "big"), proof[1]]:
            self._begin_anew()
            return
        self._proof = None
        if frames[1] != END:
            self._asked, sequence = now, int.from_bytes(frames[1], "big")
            if proof is None:
                self._feed.replayed(sequence, decode(frames[2]), now)
                self._note(sequence, frames[2])
            return
        self._asked = None
        self._feed.replay_ended(now)
        self._current = True
        self._answers += 1
        if self._answers < SETTLED:  # who answers well once may still send rubbish in between
            self._ask()
            return
        self._pause = FIRST_PAUSE
        if self._silent:
            logger.info("KV events of %s are heard again", self._feed.worker)
            self._silent = False
        self._ask()

    def _note(self, sequence: int, payload: bytes) -> None:
        if self._newest is None or sequence > self._newest[0]:
            self._newest = sequence, payload

    def _begin_anew(self) -> None:
        """It is another process, whose answers must not be mixed with those of the one before."""
        self._hang_up()
        self._begin()


class Listeners:
    """One for each worker that tells of its pages. `feed`: where a worker's events go."""

    def __init__(self, feed: Callable[[str], Feed]) -> None:
        self._feed = feed
        self._context: zmq.Context[Any] | None = None
        self._listeners: dict[str, Listener] = {}

    def told(self, worker: str, endpoints: Endpoints | None) -> None:
        """The worker is a process that tells of its pages there, or nowhere."""
        self.left(worker)
        if endpoints is not None:
            self._context = self._context or zmq.Context()
            self._listeners[worker] = Listener(self._context, endpoints, self._feed(worker))

    def left(self, worker: str) -> None:
        """The worker, or the process that it was, has gone."""
        if (listener := self._listeners.pop(worker, None)) is not None:
            listener.close()

    def hears(self, worker: str) -> bool:
        """Whether the index knows this worker's cache now."""
        listener = self._listeners.get(worker)
        return listener is not None and listener.in_sync

    def close(self) -> None:
        """Hear nobody any more."""
        for worker in tuple(self._listeners):
            self.left(worker)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
