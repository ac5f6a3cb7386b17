"""The rim where bytes become requests: what aiohttp's own protocol says and does there, made ours.

aiohttp answers bytes that are no HTTP in plain text, with a trace in the log; leaves a handler waiting for a body that turned out damaged;
closes so fast that the refusal is lost; and drops a client that has only closed its sending side. Invariant: whatever arrives is answered
in the JSON error shape or not at all, and costs at most one line in the log, without the client's bytes (they may hold a key). Overrides
methods of aiohttp's `RequestHandler`; tests with raw sockets hold them. Called by the API process, the load balancer and tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion10, HttpVersion11
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from radixpd.server.wire import BAD_ENCODING, INTERNAL, SERVER, status_reply

__all__ = ["Runner"]

MAX_HEADERS = 100
KEEP_ALIVE = 620.0  # seconds; above the idle timeouts of usual load balancers, so that they close first
LINGER = 2.0  # seconds in which a client may read why it was refused
FIRST_PROBE, LAST_PROBE = 0.05, 5.0  # seconds between probes of a client that has closed its sending side
BLIND = 1.0  # seconds between probes after which a client that cannot be probed counts as gone
STILL_THERE = b"HTTP/1.1 100 Continue\r\n\r\n"  # an answer that every client of HTTP/1.1 skips

SAFE = (
    "Missing 'Host' header in request.",
    "Received HTTPS traffic on an HTTP port",
)  # sentences of the parser without a byte of a client's

logger = logging.getLogger(__name__)


class Runner(web.AppRunner):
    """An application on its way to sockets. `max_header_size`: of the request line and of a header, in bytes."""

    def __init__(self, app: web.Application, *, max_header_size: int, **options: Any) -> None:
        ours: dict[str, Any] = {
            "access_log": None,
            "keepalive_timeout": KEEP_ALIVE,
            "max_line_size": max_header_size,
            "max_field_size": max_header_size,
            "max_headers": MAX_HEADERS,
            # A client that hangs up cancels its handler, which aborts what it has started.
            "handler_cancellation": True,
        }
        super().__init__(app, **{**options, **ours})

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if request._version not in (HttpVersion10, HttpVersion11):
                request._version = HttpVersion10  # of the answer
                return _reply(400, "this server speaks HTTP/1.1 and HTTP/1.0")
            expected = request.headers.get(hdrs.EXPECT, "100-continue").lower()
            if expected != "100-continue" and request.version >= HttpVersion11:  # aiohttp's own refusal fails on odd bytes
                return _reply(417, "nothing but 100-continue can be expected")
            return await made.request_handler(request)

        return _Server(handle, request_factory=made.request_factory, handler_cancellation=made.handler_cancellation, **made._kwargs)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """One client."""

    __slots__ = ("_body", "_eof", "_half_closed", "_refused")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._body: StreamReader = EMPTY_PAYLOAD  # of the newest request
        self._eof = asyncio.Event()  # the client has closed its sending side
        self._half_closed = False  # and may wait for an answer
        self._refused = False  # what came was no HTTP

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._messages:
            return
        newest, body = self._messages[-1]
        if isinstance(newest, _ErrInfo) and not self._body.is_eof():
            # The parser has given up in the middle of a body, which would never end.
            self._messages.pop()
            self.close()
            self._body.set_exception(web.RequestPayloadError("the body is damaged"))
            self._body.feed_eof()
        else:
            self._body = body

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A client that has closed its sending side may be gone, or wait for its answer: True keeps the connection."""
        self._eof.set()
        if not self._owes_answer():
            return None
        self._half_closed = True
        self._loop.call_later(FIRST_PROBE, self._probe, FIRST_PROBE)
        return True

    def _owes_answer(self) -> bool:
        """Whether a request has wholly arrived and nothing of its answer has left: who closes in the middle of an answer is gone."""
        request = self._current_request
        if self._refused or self._idle() or (request is not None and request.writer.output_size):
            return False
        return self._body.is_eof()

    def _idle(self) -> bool:
        return self._waiter is not None and not self._messages

    def _probe(self, wait: float) -> None:
        """Write to a client that may be gone: if it is, its machine answers with a reset, which the next look finds."""
        transport, request = self.transport, self._current_request
        if transport is None or transport.is_closing():
            return
        if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return
        if self._idle():
            transport.close()
            return
        # What has been sent of an answer is a probe in itself.
        if request is not None and not request.writer.output_size:
            if request.version >= HttpVersion11:
                transport.write(STILL_THERE)
            elif wait > BLIND:
                transport.abort()
        wait = min(2 * wait, LAST_PROBE)
        self._loop.call_later(wait, self._probe, wait)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        done = await super().finish_response(request, resp, start_time)
        if self._refused:
            await self._linger()
        elif hdrs.CONTENT_ENCODING in request.headers and not request.content.is_eof():
            # aiohttp would go on to unpack what nobody reads, for ten seconds and without a break: a bomb would stop every client.
            await self._linger()
            return done[0], True
        elif self._half_closed and not self._messages:
            self.close()  # no further request can come
        return done

    async def _linger(self) -> None:
        """Close our side and wait for the client's: with bytes of it unread, closing at once would destroy the answer."""
        self.close()  # what still comes is ignored
        if self.transport is None:
            return
        self.transport.write_eof()
        self._resume_transport_reading()  # or the client's end would not be seen
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                await self._eof.wait()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what never reached the application's middlewares."""
        if request.writer.output_size > 0:
            raise ConnectionResetError("an answer has begun")
        if isinstance(exc, HttpProcessingError):
            self._refused = True
            status, text = _complaint(exc, self.max_line_size)
            logger.info("a client at %s was refused: %s", request.remote, text)
        else:
            self.log_exception("%s failed outside its handler", request.path, exc_info=exc)
            status, text = 500, INTERNAL
        return _reply(status, text)

    def log_exception(self, *args: Any, **options: Any) -> None:
        """A body that is damaged is the client's fault: no trace."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **options)


def _reply(status: int, text: str) -> web.Response:
    """An answer without the application, whose last word it is."""
    reply = status_reply(status, text, headers={hdrs.SERVER: SERVER})
    reply.force_close()
    return reply


def _complaint(error: HttpProcessingError, limit: int) -> tuple[int, str]:
    """Status and sentence for bytes that the parser refused; no byte of the client's is in it."""
    # The parser's own words come before a colon at the end of a line, the client's bytes after it.
    reason, colon, _ = error.message.partition(":\n")
    if isinstance(error, LineTooLong):
        return 431, f"the request line or a header is longer than {limit} bytes (--max-header-size)"
    if reason == "Too many headers received":
        return 431, f"there are more than {MAX_HEADERS} headers"
    if isinstance(error, ContentEncodingError):
        return 415, BAD_ENCODING
    if reason.startswith("Pause on PRI"):
        return 400, "this server speaks HTTP/1.1, not HTTP/2"
    return 400, f"the request is not valid HTTP/1.1: {reason}" if colon or reason in SAFE else "the request is not valid HTTP/1.1"
