"""What the API server and the load balancer do alike when a request goes wrong: a plain error, or one event where a stream has begun.

Invariants: every answer that is not 2xx has the JSON error shape; a client that does not read is cut off after a while, and so holds
nothing that others wait for. The one broad except of the HTTP layer is here: it logs the trace and answers 500 without inner details.
Knows no service. Called by the two applications, and by what sends streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from radixpd.errors import EngineFailed, RadixpdError
from radixpd.runtime.caller import caller
from radixpd.server.wire import INTERNAL, error_body, error_reply, status_reply

__all__ = ["STREAM", "event", "faults", "send"]

STALLED_SECONDS = 60.0  # for a client to read some of what lies ready
LAST_WRITE_SECONDS = 5.0  # for the error that ends a stream, if its client reads no more
STREAM = web.RequestKey("stream", web.StreamResponse)  # the started response

logger = logging.getLogger(__name__)


def event(body: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def send(request: web.Request, started: web.StreamResponse, data: bytes) -> None:
    """Send more of a stream, once the client has made room. One that reads nothing is cut off after a while."""
    try:
        async with asyncio.timeout(STALLED_SECONDS):
            await started.write(data)
    except TimeoutError:
        raise _cut_off(request) from None


def faults(most: int, refused: Callable[[web.Request, web.HTTPException], web.Response | None] | None = None) -> Middleware:
    """The middleware that answers what is raised. `most`: the limit of a body; `refused`: better words for what the router refuses."""

    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RadixpdError as error:
            return await _failed(request, error)
        except web.HTTPException as error:
            return (refused and refused(request, error)) or _refused(request, error, most)
        except ConnectionError:
            # The client has gone; nobody reads an answer.
            raise
        except Exception:
            logger.exception("%s %s failed (request id %s)", request.method, request.path, caller().id)
            return await _failed(request, EngineFailed(INTERNAL))

    return answered


def _refused(request: web.Request, error: web.HTTPException, most: int) -> web.Response:
    """What the router and the body's limit refuse."""
    if error.status == 413:
        return status_reply(413, f"the body is larger than {most} bytes (--max-body-size)")
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    return status_reply(error.status, f"{error.reason}: {request.method} {request.path[:200]}", headers=headers)


async def _failed(request: web.Request, error: RadixpdError) -> web.StreamResponse:
    """A plain error, or one event where a stream has begun."""
    started = request.get(STREAM)
    if started is None:
        return error_reply(error)
    assert isinstance(started, web.StreamResponse)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WRITE_SECONDS):
            # By looking: a write that was cancelled while it waited for room leaves a cancelled future to those that come after it.
            while request.protocol.writing_paused:
                await asyncio.sleep(LAST_WRITE_SECONDS / 100)
            await started.write(event(error_body(error)))
            await started.write_eof()
            return started
    raise _cut_off(request)


def _cut_off(request: web.Request) -> ConnectionResetError:
    if request.transport is not None:
        request.transport.abort()
    return ConnectionResetError("the client does not read")
