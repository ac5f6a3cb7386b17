"""One connected, non-blocking socket in the mover's selector. What is read is a conversation, what is written a queue of buffers.

The conversation is a generator: it yields the buffers that are to be filled next and goes on when all of them are full, or yields None to
be left alone until `resume`. Queued output is a buffer, or a function that is called when everything before it has been handed to the
kernel and returns the bytes to send then. Invariants: an error of the socket or of the conversation closes this stream, tells `closed`
once, and goes no further; what the other side said before it closed is read first, though it can be told nothing any more.
"""

from __future__ import annotations

import logging
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator
from itertools import islice
from typing import TypeAlias

__all__ = ["Broken", "Output", "Stream", "Talk"]

logger = logging.getLogger(__name__)

Talk: TypeAlias = Generator[list[memoryview] | None, None, None]
Output: TypeAlias = memoryview | Callable[[], bytes]
BURST = 4 << 20  # bytes in one go, so that one stream does not starve the others and the mover's other work
VECTOR = 256  # buffers in one system call
SCRATCH = memoryview(bytearray(1 << 18))  # where bytes go that nobody wants


class Broken(Exception):
    """The other side has said something that makes no sense, or must not go on."""


class Stream:
    """`refill` is asked for more output when the queue is empty; False: there is none."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        *,
        closed: Callable[[str], None],
        refill: Callable[[], bool] = lambda: False,
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fds: list[int] = []  # descriptors that came along (Unix sockets)
        self.open = True
        self.read_bytes = 0
        self._selector = selector
        self._closed, self._refill = closed, refill
        self._talk: Talk | None = None
        self._want: list[memoryview] = []
        self._at = 0
        self._paused = False
        self._unheard = False  # the other side takes nothing any more
        self._out: deque[Output] = deque()
        self._events = 0

    def start(self, talk: Talk) -> None:
        """Begin the conversation."""
        self._talk = talk
        self._guarded(self._next)

    def resume(self) -> None:
        """Go on with a conversation that paused."""
        if self._paused:
            self._paused = False
            self._guarded(self._next)

    def divert(self) -> None:
        """What is still to come for the buffers asked for goes nowhere."""
        left = sum(len(each) for each in self._want[self._at :])
        self._want, self._at = discarded(left), 0

    def write(self, *items: Output) -> None:
        """Queue output and send what goes at once."""
        self._out.extend(items)
        self.push()

    def queue(self, *items: Output) -> None:
        """Queue output only; for `refill`."""
        self._out.extend(items)

    def push(self) -> None:
        """Send what goes."""
        self._guarded(self._send)

    def peer_has_closed(self) -> bool:
        """Whether the end of the other side's words is already here."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self, reason: str) -> None:
        """End it. Output that the kernel has taken is still delivered."""
        if not self.open:
            return
        self.open = False
        self._interest()
        self.sock.close()
        self._out.clear()
        self._closed(reason)

    def event(self, mask: int) -> None:
        """The selector's callback."""
        if mask & selectors.EVENT_READ:
            self._guarded(self._receive)
        if mask & selectors.EVENT_WRITE:
            self._guarded(self._send)

    # ---- inner ----------------------------------------------------------------------------------------------------------------

    def _guarded(self, act: Callable[[], None]) -> None:
        if not self.open:
            return
        try:
            act()
        except (BrokenPipeError, ConnectionResetError):
            self.close("the connection was cut")
        except (OSError, Broken) as error:
            self.close((error.strerror if isinstance(error, OSError) else None) or str(error))
        except Exception as error:  # a fault of ours ends one connection, not the mover
            logger.exception("a data connection failed")
            self.close(f"an internal fault ({type(error).__name__})")
        self._interest()

    def _interest(self) -> None:
        """Tell the selector what we wait for."""
        events = 0
        if self.open:
            events = (0 if self._paused else selectors.EVENT_READ) | (selectors.EVENT_WRITE if self._out else 0)
        if events == self._events:
            return
        if not self._events:
            self._selector.register(self.sock, events, self.event)
        elif events:
            self._selector.modify(self.sock, events, self.event)
        else:
            self._selector.unregister(self.sock)
        self._events = events

    def _next(self) -> None:
        """Let the conversation say what it wants next."""
        assert self._talk is not None
        while self.open:
            wanted = next(self._talk, None)
            if wanted is None:
                self._want, self._at, self._paused = [], 0, True
                return
            self._want, self._at = [each for each in wanted if len(each)], 0
            if self._want:
                return

    def _receive(self) -> None:
        budget = BURST
        while self.open and not self._paused and budget > 0:
            try:
                count = self._fill()
            except BlockingIOError:
                return
            if not count:
                self.close("the other side has closed the connection")
                return
            budget -= count
            self.read_bytes += count
            self._advance(count)

    def _fill(self) -> int:
        buffers = self._want[self._at : self._at + VECTOR]
        if self.sock.family != socket.AF_UNIX:
            return self.sock.recvmsg_into(buffers)[0] if len(buffers) > 1 else self.sock.recv_into(buffers[0])
        count, extras, _, _ = self.sock.recvmsg_into(buffers, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.fds.extend(struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4]))
        return count

    def _advance(self, count: int) -> None:
        while count:
            head = self._want[self._at]
            if count < len(head):
                self._want[self._at] = head[count:]
                return
            count -= len(head)
            self._at += 1
        if self._at == len(self._want):
            self._next()

    def _send(self) -> None:
        budget = BURST
        while self.open and not self._unheard and budget > 0 and (self._out or self._refill()):
            head = self._out[0]
            if not isinstance(head, memoryview):
                self._out[0] = memoryview(head())
            buffers: list[memoryview] = []
            for each in islice(self._out, VECTOR):
                if not isinstance(each, memoryview):
                    break
                buffers.append(each)
            try:
                count = self.sock.sendmsg(buffers)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                # It has closed. Its last words may be here already; the end of them closes this stream.
                self._unheard = True
                break
            budget -= count
            self._sent(count)
        if self._unheard:
            self._out.clear()

    def _sent(self, count: int) -> None:
        while self._out and isinstance(head := self._out[0], memoryview) and count >= len(head):
            count -= len(head)
            self._out.popleft()
        if count:
            head = self._out[0]
            assert isinstance(head, memoryview)
            self._out[0] = head[count:]


def discarded(size: int) -> list[memoryview]:
    """Buffers for `size` bytes that nobody wants."""
    whole, rest = divmod(size, len(SCRATCH))
    return [SCRATCH] * whole + ([SCRATCH[:rest]] if rest else [])
