"""Work that would hold up the event loop runs in a thread of its own, with a deadline.

The threads are daemons and not a pool's: one that never returns (a chat template is a program) neither blocks the next request nor the
exit of the process. Called by the tokenizer manager.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

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
