"""The event loop on which all programs talk to their backends: one, in a thread of its own, from the first use to the end of the process.

Programs are plain functions in threads; whatever waits for a server is a task here, so a fork of a hundred branches costs no thread.
Nothing on it blocks. At exit its tasks are cancelled, so that servers see their streams closed, and connections are closed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["at_end", "call", "event_loop"]

END_SECONDS = 5.0  # for cancelled tasks and closing connections, at exit

Result = TypeVar("Result")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_closers: list[Callable[[], Awaitable[None]]] = []


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop, started on first use."""
    global _loop, _thread
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="radixpd_lang", daemon=True)
            _thread.start()
            atexit.register(_end)
        return _loop


def call(coroutine: Coroutine[Any, Any, Result], seconds: float) -> Result:
    """Run a coroutine on the loop and wait for it, from any other thread. It ends by itself within that time, or else is cancelled."""
    if threading.current_thread() is _thread:
        coroutine.close()
        raise RuntimeError("a call that waits for the event loop cannot be made on it")
    future: Future[Result] = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return future.result(seconds + END_SECONDS)
    finally:
        future.cancel()


def at_end(close: Callable[[], Awaitable[None]]) -> None:
    """Await `close()` on the loop before the process ends."""
    _closers.append(close)


async def _wind_up() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    async with asyncio.timeout(END_SECONDS):
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(close() for close in _closers), return_exceptions=True)


def _end() -> None:
    loop, thread = _loop, _thread
    if loop is None or thread is None or not thread.is_alive():
        return
    future = asyncio.run_coroutine_threadsafe(_wind_up(), loop)
    with contextlib.suppress(TimeoutError):  # the process ends all the same
        future.result(END_SECONDS + 1)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(END_SECONDS)


def _forget() -> None:
    """A forked child has no such thread: it starts its own on first use."""
    global _loop, _thread, _lock
    _loop = _thread = None
    _lock = threading.Lock()
    _closers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
