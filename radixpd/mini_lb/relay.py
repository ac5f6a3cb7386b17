"""A worker's answer on its way to the client.

A plain answer is read whole before anything of it is sent, so until then it may be tried elsewhere. A stream passes event by event as it
comes; once its first event is on the way, a worker that dies is told to the client by an error event. Invariant: only the worker's faults
speak against the worker: a client that hangs up or does not read says nothing about it. Called by the proxy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import aiohttp
from aiohttp import web

from radixpd.errors import PeerFailed
from radixpd.mini_lb.answers import Figures, Reader, read_figures
from radixpd.mini_lb.decisions import Decision
from radixpd.mini_lb.dispatch import Account
from radixpd.mini_lb.legs import Answer, Legs, verdict
from radixpd.mini_lb.upstream import LegFailed, response_headers
from radixpd.server.faults import STREAM, send

__all__ = ["Books", "relay"]

EVENT_STREAM = "text/event-stream"


class Books:
    """What is written down about one try of one generation. `first`: called with the seconds from arrival to a stream's first text. What
    the end of an answer teaches is learned in the loop's next turn: the answer leaves first."""

    def __init__(self, decision: Decision, account: Account, first: Callable[[float], None]) -> None:
        self._decision = decision
        self._account = account
        self._first = first
        self._began = False
        self._output_tokens = 0
        self._loop = asyncio.get_running_loop()

    def streamed(self, reader: Reader) -> None:
        """More of a stream has passed."""
        if not self._began and reader.generated:
            self._began = True
            now = time.monotonic()
            self._account.first_token(now, reader.figures().cached)
            self._decision.ttft_s = now - self._decision.arrived
            self._first(self._decision.ttft_s)

    def prefilled(self) -> None:
        """The prefill server is free for others."""
        self._account.prefilled(time.monotonic())

    def answered(self, figures: Figures) -> None:
        """The whole answer is known. A plain one shows no first token, but what was cached."""
        self._output_tokens = figures.output_tokens
        self._decision.figures = figures
        if not self._began:
            self._loop.call_soon(self._account.first_token, time.monotonic(), figures.cached)

    def close(self) -> None:
        """The try has ended, well or not."""
        self._loop.call_soon(partial(self._account.done, time.monotonic(), output_tokens=self._output_tokens))


async def relay(request: web.Request, legs: Legs, answer: Answer, books: Books | None) -> web.StreamResponse:
    """Pass an answer on; `LegFailed` while the client has got nothing of it, `PeerFailed` later."""
    response = answer.response
    if response.content_type == EVENT_STREAM:
        return await _stream(request, answer, books)
    body = await legs.read(answer)
    if books is not None and response.status == 200:
        books.answered(read_figures(body))
    return web.Response(status=response.status, headers=response_headers(response.headers), body=body)


async def _stream(request: web.Request, answer: Answer, books: Books | None) -> web.StreamResponse:
    response, lease = answer.response, answer.lease
    started = web.StreamResponse(status=response.status, headers=response_headers(response.headers))
    started.headers["X-Accel-Buffering"] = "no"
    reader = Reader()
    while True:
        try:
            chunk = await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            lease.ok = False
            if not started.prepared:
                raise LegFailed(answer.worker, "the stream broke off before its first event") from error
            raise PeerFailed("the worker that generated this answer failed; the answer is incomplete") from error
        events = reader.feed(chunk) if chunk else reader.rest()
        if events:
            await _send(request, started, events)
        if not chunk:
            break
        if books is not None:
            books.streamed(reader)
    lease.ok = verdict(response.status)
    if books is not None:
        books.answered(reader.figures())
    if not started.prepared:
        await started.prepare(request)
    await started.write_eof()
    return started


async def _send(request: web.Request, started: web.StreamResponse, events: bytes) -> None:
    if not started.prepared:
        request[STREAM] = started
        await started.prepare(request)
    await send(request, started, events)
