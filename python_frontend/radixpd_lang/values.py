"""Values that are on their way from the event loop to programs: text that grows, and variables.

Written by the interpreter on the loop, read by any thread or any other event loop. Every reader gets every piece, in order, whenever it
comes; every wait has a deadline. A value ends exactly once: with a result or with the error that ended its program.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

from radixpd_lang.clock import Deadline
from radixpd_lang.errors import ProgramError

__all__ = ["Feed", "Meta", "Piece", "Value"]

Meta = dict[str, Any]
Piece = tuple[str, Meta]


class Feed:
    """Text that grows at its end, piece by piece, until it is closed."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._error: ProgramError | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], object]] = []

    def push(self, text: str, meta: Meta | None = None) -> None:
        """Add a piece."""
        if text or meta:
            self._change(lambda: self._pieces.append((text, meta or {})))

    def close(self, error: ProgramError | None = None) -> None:
        """Nothing more comes; `error` says why the text is not whole. Only the first call counts."""

        def end() -> None:
            if not self._closed:
                self._closed, self._error = True, error

        self._change(end)

    def _change(self, change: Callable[[], object]) -> None:
        with self._lock:
            change()
            wakers = list(self._wakers)
        for wake in wakers:
            wake()

    def read(self, deadline: Deadline) -> Iterator[Piece]:
        """Every piece, for a thread that may wait."""
        news = threading.Event()
        with _Watch(self, news.set):
            position = 0
            while True:
                news.clear()
                pieces, closed = self._since(position)
                yield from pieces
                position += len(pieces)
                if closed:
                    return
                if not pieces and not news.wait(deadline.patience):
                    raise deadline.missed()

    async def read_async(self, deadline: Deadline) -> AsyncIterator[Piece]:
        """Every piece, for a coroutine of any event loop."""
        news, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the reader's loop has been closed under it: nobody reads any more
                loop.call_soon_threadsafe(news.set)

        with _Watch(self, wake):
            position = 0
            while True:
                news.clear()
                pieces, closed = self._since(position)
                for piece in pieces:
                    yield piece
                position += len(pieces)
                if closed:
                    return
                if not pieces:
                    try:
                        await asyncio.wait_for(news.wait(), deadline.patience)
                    except TimeoutError:
                        raise deadline.missed() from None

    def _since(self, position: int) -> tuple[list[Piece], bool]:
        """New pieces, and whether these are the last; the error once there are none left before it."""
        with self._lock:
            pieces = self._pieces[position:]
            if self._error is not None and not pieces:
                raise self._error.again()
            return pieces, self._closed and self._error is None


class _Watch:
    """While inside, `wake` is called after every change."""

    def __init__(self, feed: Feed, wake: Callable[[], object]) -> None:
        self._feed = feed
        self._wake = wake

    def __enter__(self) -> None:
        with self._feed._lock:
            self._feed._wakers.append(self._wake)

    def __exit__(self, *_: object) -> None:
        with self._feed._lock:
            self._feed._wakers.remove(self._wake)


class Value:
    """A variable: its text as it grows, then its value and what the backend tells about it."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.feed = Feed()
        self.future: Future[Any] = Future()
        self.meta: Meta = {}

    def finish(self, value: Any, meta: Meta | None = None) -> None:
        """The value is there."""
        if not self.future.done():
            self.meta = meta or {}
            self.future.set_result(value)
            self.feed.close()

    def fail(self, error: ProgramError) -> None:
        """The value will never be there."""
        if not self.future.done():
            self.future.set_exception(error)
            self.feed.close(error)

    async def arrive(self) -> Any:
        """Wait for the value on the event loop. A waiter that is cancelled leaves it as it is: others may wait too."""
        loop = asyncio.get_running_loop()
        there = asyncio.Event()
        self.future.add_done_callback(lambda _: loop.call_soon_threadsafe(there.set))
        await there.wait()
        return self.future.result()

    def get(self, deadline: Deadline) -> Any:
        """Wait for the value in a thread."""
        try:
            return self.future.result(deadline.patience)
        except ProgramError as error:
            raise error.again() from error.__cause__
        except TimeoutError:
            raise deadline.missed() from None
