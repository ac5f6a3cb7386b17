"""A server of the test's own, on the package's event loop: answers come from functions of path and body, every request is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from gates import SECONDS
from radixpd_lang import loop

__all__ = ["Events", "Stub", "serving"]


@dataclass(frozen=True)
class Events:
    """An answer that is a stream; None holds it open until the client hangs up."""

    events: list[Any]


class Stub:
    """`answers`: by path, a function of the body that returns JSON, (status, JSON), (status, JSON, headers), or `Events`."""

    def __init__(self, answers: dict[str, Callable[[Any], Any]]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.hung_up = asyncio.Event()
        self._news = asyncio.Event()

    def bodies(self, path: str) -> list[Any]:
        return [body for where, body in self.requests if where == path]

    async def asked(self, count: int) -> None:
        """Wait for so many requests."""
        while len(self.requests) < count:
            self._news.clear()
            await self._news.wait()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.path, body))
        self._news.set()
        self.headers.append(dict(request.headers))
        answer = self.answers[request.path](body)
        if isinstance(answer, Events):
            return await self._stream(request, answer.events)
        status, answer, headers = (*answer, {})[:3] if isinstance(answer, tuple) else (200, answer, {})
        return web.json_response(answer, status=status, headers=headers)

    async def _stream(self, request: web.Request, events: list[Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            if event is None:
                try:
                    await asyncio.sleep(SECONDS)
                except asyncio.CancelledError:
                    self.hung_up.set()
                    raise
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        return response


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """The stub's URL while it runs."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stub.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    stub.url = loop.call(start(), SECONDS)
    try:
        yield stub.url
    finally:
        loop.call(runner.cleanup(), SECONDS)
