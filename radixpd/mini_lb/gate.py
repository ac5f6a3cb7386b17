"""How many requests are at the workers at once; the others wait in order, some are refused.

Invariant: a place is given back on every way out, and goes to whoever has waited longest. Called by the proxy; `metrics` shows the counts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from radixpd.errors import Overloaded

__all__ = ["Gate"]


class Gate:
    """`most` requests inside, `queue` waiting for at most `seconds`."""

    def __init__(self, *, most: int, queue: int, seconds: float) -> None:
        self._most = most
        self._queue = queue
        self._seconds = seconds
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.open = 0
        self.rejected: dict[str, int] = {"queue_full": 0, "queue_timeout": 0, "draining": 0}

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def close(self) -> None:
        """Let nobody in from now on; who is inside or waits may go on."""
        self.closed = True

    async def idle(self) -> None:
        """Wait until nobody is inside, and so nobody waits."""
        await self._idle.wait()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place, held while the block runs."""
        if self.closed:
            raise self._refusal("draining", "the load balancer is shutting down", status=503)
        if self.open < self._most:
            self.open += 1
            self._idle.clear()
        else:
            await self._wait()
        try:
            yield
        finally:
            self._give_back()

    async def _wait(self) -> None:
        if len(self._waiting) >= self._queue:
            raise self._refusal("queue_full", f"{self._most} requests are open and {self._queue} wait, as many as --queue-size allows")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._seconds):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            # Somebody may have handed over a place just before this one stopped waiting.
            if turn.done() and not turn.cancelled():
                self._give_back()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise self._refusal("queue_timeout", f"no place within {self._seconds:g} s (--queue-timeout-secs)") from None
            raise

    def _give_back(self) -> None:
        """The place goes to whoever is next, without being free in between."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else it has just been cancelled
                turn.set_result(None)
                return
        self.open -= 1
        if not self.open:
            self._idle.set()

    def _refusal(self, reason: str, message: str, *, status: int = 429) -> Overloaded:
        self.rejected[reason] += 1
        return Overloaded(message, status=status)
