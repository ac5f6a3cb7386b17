"""What the API server and the load balancer say in the same way: how a body is read, answers, and the one error shape of all routes.

The error shape is OpenAI's, `{"error": {"message", "type", "param", "code"}}`, also on native routes. Invariant: an error text is
`str(RadixpdError)` or a fixed sentence, never a trace; a body is read within its limits of size and time or refused with the limit's flag.
Knows nothing of a service. Called by `replies`, `connection`, `guards` and the load balancer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest, Overloaded, RadixpdError

__all__ = ["BAD_ENCODING", "INTERNAL", "JSON_TYPE", "SERVER", "error_body", "error_reply", "json_reply", "read_bytes", "status_reply"]

SERVER = "radixpd"  # the header of every answer
JSON_TYPE = "application/json"
ENCODINGS = ("", "identity", "gzip", "deflate")
BAD_ENCODING = "the content encoding must be gzip, deflate or none"
INTERNAL = "internal error; the server's log has the details"
ERROR_TYPES = {
    401: "authentication_error",
    403: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


async def read_bytes(request: web.Request, *, most: int, seconds: float) -> bytes:
    """The body, unpacked, in time and within its limit."""
    if (encoding := request.headers.get("Content-Encoding", "").lower()) not in ENCODINGS:
        raise BadRequest(f"{BAD_ENCODING}, got {encoding[:40]!r}", status=415)
    if (request.content_length or 0) > most:
        raise web.HTTPRequestEntityTooLarge(most, request.content_length or 0)
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except (web.RequestPayloadError, web.PayloadAccessError):
        raise BadRequest("the body could not be read: it is damaged, or its length or encoding is not as announced") from None
    except TimeoutError:
        raise BadRequest(f"the body did not arrive within {seconds:g} s (--body-timeout)", status=408, code="body_timeout") from None


def json_reply(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON_TYPE, headers=headers)


def error_body(error: RadixpdError) -> dict[str, Any]:
    """An error in the shape that clients know."""
    param = error.param if isinstance(error, BadRequest) else None
    return _shape(str(error), status=error.status, param=param, code=error.code)


def error_reply(error: RadixpdError) -> web.Response:
    """The answer to a request that failed before its first token."""
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, Overloaded) else None
    return json_reply(error_body(error), status=error.status, headers=headers)


def status_reply(status: int, message: str, *, headers: Mapping[str, str] | None = None, code: str | None = None) -> web.Response:
    """An error that has no exception of ours: unknown route, wrong method, body too large, missing key, a bug."""
    return json_reply(_shape(message, status=status, code=code), status=status, headers=headers)


def _shape(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
