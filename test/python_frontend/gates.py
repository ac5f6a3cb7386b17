"""An answer that comes when the test lets it, for programs against the fake backend."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from threading import Event

from radixpd_lang import Prompt, Sampling

__all__ = ["LONG", "SECONDS", "Gate"]

SECONDS = 20.0  # within which everything in these tests happens
LONG = 600.0  # the time of a program that must end because it is cancelled, not because its time is over


class Gate:
    """`asked` is set once the program has asked, `cancelled` when the request was given up; `open(text)` answers."""

    def __init__(self) -> None:
        self.asked = Event()
        self.cancelled = Event()
        self._text: Future[str] = Future()

    def open(self, text: str) -> None:
        self._text.set_result(text)

    async def __call__(self, prompt: Prompt, sampling: Sampling) -> str:
        self.asked.set()
        try:
            return await asyncio.shield(asyncio.wrap_future(self._text))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
