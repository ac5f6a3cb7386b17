"""JSON in and out: reading a request's body, answers, and the one error shape of all routes.

The error shape is OpenAI's, `{"error": {"message", "type", "param", "code"}}`, also on native routes. Invariant: an error text is
`str(RadixpdError)` or a fixed sentence, never a trace. Called by the middlewares and all handlers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest, Overloaded, RadixpdError
from radixpd.server.service import service_of

__all__ = ["BAD_ENCODING", "INTERNAL", "error_body", "error_reply", "json_reply", "read_object", "status_reply", "warn_unknown"]

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
MAX_WARNED = 1000
EXACT = 2**53  # floats below it hold every integer

logger = logging.getLogger(__name__)
_warned: set[str] = set()


def _number(text: str) -> float:
    """A number with a point or an exponent. 16.0 is an integer, to JSON Schema and to languages that know only floats."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < EXACT else value


_DECODER = msgspec.json.Decoder(float_hook=_number)


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object."""
    if "Content-Type" in request.headers and not (request.content_type == JSON_TYPE or request.content_type.endswith("+json")):
        raise BadRequest(f"the content type must be {JSON_TYPE}, got {request.content_type}", status=415)
    if (encoding := request.headers.get("Content-Encoding", "").lower()) not in ENCODINGS:
        raise BadRequest(f"{BAD_ENCODING}, got {encoding[:40]!r}", status=415)
    raw = await _read(request)
    try:
        body = _DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


async def _read(request: web.Request) -> bytes:
    """The body, in time and within its limit."""
    settings = service_of(request).resolved.settings.server
    if (request.content_length or 0) > settings.max_body_size:
        raise web.HTTPRequestEntityTooLarge(settings.max_body_size, request.content_length or 0)
    try:
        async with asyncio.timeout(settings.body_timeout):
            return await request.read()
    except (web.RequestPayloadError, web.PayloadAccessError):
        raise BadRequest("the body could not be read: it is damaged, or its length or encoding is not as announced") from None
    except TimeoutError:
        raise BadRequest(
            f"the body did not arrive within {settings.body_timeout:g} s (--body-timeout)", status=408, code="body_timeout"
        ) from None


def warn_unknown(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """One warning in the log for each unknown field name, ever; the field is ignored."""
    known = frozenset(known)
    for name in body:
        if len(_warned) >= MAX_WARNED:
            return  # a body may hold millions of names
        if name not in known and name not in _warned:
            _warned.add(name)
            logger.warning("unknown request field %r is ignored", name[:100])


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
