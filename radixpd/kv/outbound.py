"""The sending side of data connections: one `Line` to a peer, made of a few connections that are kept open.

Frames wait at the connection with the least before it; the next one starts when the kernel has taken the last. Connections that end are
opened again. Invariants: every frame is settled exactly once (answered by the receiver, or lost with its connection, or dropped before it
started); a room is quiet only when no started frame of it is unsettled, or the receiver has confirmed that it forgot the room. Whether a
frame still counts is decided after its last byte has left (see `frames`).
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from radixpd.core.handoff import Quiet
from radixpd.kv import frames
from radixpd.kv.stream import Broken, Output, Stream, Talk
from radixpd.kv.transport import Endpoint, Finished, Ground, News

__all__ = ["Frame", "Line", "Outbound"]

BACKOFF = (0.05, 2.0)  # seconds between attempts to connect: first, most


@dataclass(slots=True, eq=False)
class Frame:
    """What is sent in one piece. `body`: the bytes, or a function that puts them in place by itself. `raw`: bytes of the pages, where they
    are coded in `size`."""

    number: int
    room: int
    head: bytes
    body: list[Output]
    size: int
    born: float
    forget: bool = False
    raw: int = 0


class Outbound:
    """One connection to a receiver."""

    def __init__(self, sock: socket.socket, line: Line) -> None:
        self.line = line
        self.born = line.ground.clock()
        self.open = False
        self.waiting: deque[Frame] = deque()
        self.started: dict[int, Frame] = {}  # not answered yet
        self.stream = Stream(line.ground.selector, sock, closed=self._closed, refill=self._refill)

    @property
    def load(self) -> int:
        """Bytes before the next frame."""
        return sum(each.size for each in self.waiting) + sum(each.size for each in self.started.values())

    def talk(self) -> Talk:
        """Prove the token, see the receiver prove it, then read answers."""
        line = self.line
        greeting = bytearray(frames.GREETING.size)
        yield [memoryview(greeting)]
        magic, version, challenge = frames.GREETING.unpack(greeting)
        if (magic, version) != (frames.MAGIC, frames.VERSION):
            raise Broken(f"it speaks version {version} of the data protocol, or none; here it is {frames.VERSION}")
        own = secrets.token_bytes(frames.CHALLENGE)
        fingerprint = line.endpoint.fingerprint
        self.stream.write(memoryview(own + frames.proof(line.token, "sender", challenge + own, fingerprint)))
        word = bytearray(frames.PROOF)
        yield [memoryview(word)]
        if not hmac.compare_digest(bytes(word), frames.proof(line.token, "receiver", challenge + own, fingerprint)):
            raise Broken("it has not the token of the peer it stands for")
        line.opened(self)
        answer = bytearray(frames.ANSWER.size)
        while True:
            yield [memoryview(answer)]
            number, status = frames.ANSWER.unpack(answer)
            frame = self.started.pop(number, None)
            if frame is None:
                raise Broken(f"it answered frame {number}, which it was not sent")
            line.settled(frame, "" if status == frames.TAKEN else frames.REFUSALS.get(status, f"refused with status {status}"))

    def _refill(self) -> bool:
        """Start the next frame."""
        if not self.open or not self.waiting:
            return False
        if not self.started and self.stream.peer_has_closed():
            raise ConnectionResetError
        frame = self.waiting.popleft()
        self.started[frame.number] = frame
        if frame.forget:
            self.stream.queue(memoryview(frame.head))
            return True
        ended, counters = self.line.ground.ended, self.line.ground.counters
        counters.frames_out += 1
        counters.bytes_out += frame.size
        counters.raw_out += frame.raw or frame.size
        self.stream.queue(memoryview(frame.head), *frame.body, lambda: frames.VOID if frame.room in ended else frames.GOOD)
        return True

    def _closed(self, reason: str) -> None:
        stood, self.open = self.open, False
        self.line.closed(self, reason, stood=stood)


class Line:
    """Everything that goes to one peer. `connect` makes a connecting socket; `entered` may take what came with the greeting, or
    raise Broken; `lost`: the last connection has ended."""

    def __init__(
        self,
        ground: Ground,
        endpoint: Endpoint,
        token: bytes,
        *,
        connect: Callable[[], socket.socket],
        connections: int,
        entered: Callable[[Stream], None] = lambda stream: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.ground, self.endpoint, self.token = ground, endpoint, token
        self.news: list[News] = []
        self.trouble = ""
        self._connect, self._size, self._entered, self._lost = connect, connections, entered, lost
        self._members: list[Outbound] = []
        self._backlog: deque[Frame] = deque()
        self._unsure: set[int] = set()  # rooms with frames that were cut off: the receiver may have them half read
        self._forgetting: set[int] = set()
        self._again = 0.0
        self._pause = BACKOFF[0]
        self._ended = False
        self._redial()

    def send(self, frame: Frame) -> None:
        """Queue a frame."""
        if self._ended:
            if not frame.forget:
                self.news.append(Finished(frame.number, "the connection to the peer has been given up"))
            return
        usable = [each for each in self._members if each.open]
        if not usable:
            if not frame.forget:  # said again when a connection stands
                self._backlog.append(frame)
            return
        best = min(usable, key=lambda each: each.load)
        best.waiting.append(frame)
        best.stream.push()

    @property
    def stands(self) -> bool:
        """Whether there is a connection on which both sides have proved the token."""
        return any(each.open for each in self._members)

    def doubt(self, room: int) -> None:
        """Bytes of this room may still be on their way: it is not quiet before the receiver has forgotten it."""
        self._unsure.add(room)

    def drop(self, room: int) -> None:
        """Drop what has not started."""
        for queue in (self._backlog, *(each.waiting for each in self._members)):
            for frame in [each for each in queue if each.room == room and not each.forget]:
                queue.remove(frame)
                self.news.append(Finished(frame.number, frames.REFUSALS[frames.WITHDRAWN]))

    def cancel(self, room: int) -> bool:
        """Drop what has not started; if anything has, the receiver is asked to forget the room. See `KVTransport.cancel`."""
        self.drop(room)
        if room in self._forgetting:
            return False
        if room not in self._unsure and not any(frame.room == room for each in self._members for frame in each.started.values()):
            return True
        self._forgetting.add(room)
        self._forget(room)
        return False

    def poll(self) -> list[News]:
        """Connections that are due, frames that wait in vain; the news."""
        now, limit = self.ground.clock(), self.ground.options.connect
        for each in [each for each in self._members if not each.open and now - each.born > limit]:
            each.stream.close(f"no connection to {self.endpoint.address} within {limit:g} s")
        if not any(each.open for each in self._members):
            while self._backlog and now - self._backlog[0].born > limit:
                reason = self.trouble or f"no connection to {self.endpoint.address} within {limit:g} s"
                self.news.append(Finished(self._backlog.popleft().number, reason))
        self._redial()
        news, self.news = self.news, []
        return news

    def close(self, reason: str, *, gone: bool = False) -> list[News]:
        """End the line. `gone`: the pool at its other end is no more, so that every room is quiet."""
        self._ended = True
        for each in list(self._members):
            each.stream.close(reason)
        self.news.extend(Finished(frame.number, reason) for frame in self._backlog)
        self._backlog.clear()
        if gone:
            self.news.extend(Quiet(room) for room in self._forgetting)
            self._forgetting.clear()
        news, self.news = self.news, []
        return news

    def say(self, kind: int) -> None:
        """A word without an answer, on every connection."""
        for each in self._members:
            if each.open:
                each.stream.write(memoryview(frames.HEAD.pack(kind, 0, 0, 0, 0)))

    # ---- told by the connections ------------------------------------------------------------------------------------------------

    def opened(self, member: Outbound) -> None:
        """A connection stands."""
        self._entered(member.stream)
        member.open, self.trouble = True, ""
        waiting, self._backlog = self._backlog, deque()
        for frame in waiting:
            self.send(frame)
        said = {frame.room for each in self._members for frame in (*each.waiting, *each.started.values()) if frame.forget}
        for room in self._forgetting - said:
            self._forget(room)

    def settled(self, frame: Frame, error: str) -> None:
        """The receiver has answered."""
        if not frame.forget:
            self.news.append(Finished(frame.number, error))
            return
        self._unsure.discard(frame.room)
        if frame.room in self._forgetting:
            self._forgetting.discard(frame.room)
            self.news.append(Quiet(frame.room))

    def closed(self, member: Outbound, reason: str, *, stood: bool) -> None:
        """A connection has ended: what it had started is lost, the rest goes elsewhere."""
        self._members.remove(member)
        self.trouble = f"{self.endpoint.address}: {reason}"
        now = self.ground.clock()
        if stood:
            self._again, self._pause = now, BACKOFF[0]
        else:
            self._back_off(now)
        self.ground.counters.cut += bool(member.started)
        for frame in member.started.values():
            if not frame.forget:
                self._unsure.add(frame.room)
                self.news.append(Finished(frame.number, self.trouble))
        if not self._members:
            self._lost()
        for frame in [each for each in member.started.values() if each.forget] + list(member.waiting):
            self.send(frame)

    # ---- inner ------------------------------------------------------------------------------------------------------------------

    def _forget(self, room: int) -> None:
        number = next(self.ground.numbers)
        self.send(Frame(number, room, frames.HEAD.pack(frames.FORGET, 0, 0, room, number), [], 0, self.ground.clock(), forget=True))

    def _back_off(self, now: float) -> None:
        self._again = now + self._pause
        self._pause = min(2 * self._pause, BACKOFF[1])

    def _redial(self) -> None:
        while not self._ended and len(self._members) < self._size and self.ground.clock() >= self._again:
            try:
                sock = self._connect()
            except OSError as error:
                self.trouble = f"{self.endpoint.address}: {error.strerror or error}"
                self._back_off(self.ground.clock())
                return
            member = Outbound(sock, self)
            self._members.append(member)
            member.stream.start(member.talk())
