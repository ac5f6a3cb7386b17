"""Work that would hold up the event loop runs in a thread of its own, with a deadline, or gives the loop a turn now and then.

The threads are daemons and not a pool's: one that never returns (a chat template is a program) neither blocks the next request nor the
exit of the process. Called by the tokenizer manager and by routes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Pace", "in_thread"]

SLICE = 0.01  # seconds that a long loop over the parts of one request may hold the event loop

Value = TypeVar("Value")


async def in_thread(work: Callable[[], Value], *, seconds: float) -> Value:
    """What `work()` returns or raises; TimeoutError when that takes longer than `seconds`."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Value] = loop.create_future()

    def settle(value: Value | None, error: Exception | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]  # None only if that is what `work` returns

    def run() -> None:
        try:
            result: tuple[Value | None, Exception | None] = work(), None
        except Exception as error:  # handed on to whoever waits
            result = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *result)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wait_for(done, seconds)


class Pace:
    """For a long loop over small parts: `breathe` between them lets other requests run when their time has come."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def breathe(self) -> None:
        """Give the event loop a turn, if it has not had one for `SLICE` seconds."""
        if time.monotonic() - self._since > SLICE:
            await asyncio.sleep(0)
            self._since = time.monotonic()
