"""How many requests are at the workers at once; the others wait in a fair line, some are refused.

Invariants: a place is given back on every way out, and goes to whose turn it is: in order within a tenant, by turns among tenants. Whoever
leaves the line gets a place or one refusal. Called by the proxy; `metrics` shows the counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from radixpd.errors import Overloaded
from radixpd.mini_lb.fair_queue import FairQueue

__all__ = ["Gate"]


class Gate:
    """`most` requests inside, `queue` waiting for at most `seconds`."""

    def __init__(self, *, most: int, queue: int, seconds: float) -> None:
        self._most = most
        self._queue = queue
        self._seconds = seconds
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(queue)
        self.closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.open = 0
        self.rejected: dict[str, int] = {"queue_full": 0, "queue_timeout": 0, "draining": 0, "slo_ttft": 0, "slo_tpot": 0}

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
    async def place(self, tenant: str = "") -> AsyncIterator[float]:
        """A place, held while the block runs; for how many seconds it had to be waited for."""
        if self.closed:
            raise self.refusal("draining", "the load balancer is shutting down", status=503)
        waited = 0.0
        if self.open < self._most:
            self.open += 1
            self._idle.clear()
        else:
            began = time.monotonic()
            await self._wait(tenant)
            waited = time.monotonic() - began
        try:
            yield waited
        finally:
            self._give_back()

    def refusal(self, reason: str, message: str, *, status: int = 429, retry_after: int = 1) -> Overloaded:
        """What to raise for a request that is not let in; it is counted."""
        self.rejected[reason] += 1
        return Overloaded(message, status=status, retry_after=retry_after)

    async def _wait(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone = self._waiting.push(tenant, turn)
        if gone is turn:
            raise self._full()
        if gone is not None and not gone.done():
            gone.set_exception(self._full())
        try:
            async with asyncio.timeout(self._seconds):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            # Just before it stopped waiting, somebody may have handed over a place, or pushed it out of line.
            decided = turn.done() and not turn.cancelled()
            pushed_out = turn.exception() if decided else None
            if decided and pushed_out is None:
                self._give_back()
            elif not decided:
                self._waiting.remove(tenant, turn)
            if isinstance(error, TimeoutError):
                if pushed_out is not None:
                    raise pushed_out from None
                raise self.refusal("queue_timeout", f"no place within {self._seconds:g} s (--queue-timeout-secs)") from None
            raise

    def _full(self) -> Overloaded:
        waiting = len(self._waiting)
        return self.refusal("queue_full", f"{self._most} requests are open and {waiting} wait, as many as --queue-size allows")

    def _give_back(self) -> None:
        """The place goes to whoever is next, without being free in between."""
        while (turn := self._waiting.pop()) is not None:
            if not turn.done():  # else it has just been cancelled
                turn.set_result(None)
                return
        self.open -= 1
        if not self.open:
            self._idle.set()
