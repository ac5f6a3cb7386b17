"""JSON in and out: a request's body as an object; bytes, answers and errors are those of `wire`.

Invariant: whatever is no JSON object is refused here. Called by the middlewares and all handlers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest
from radixpd.server.service import service_of
from radixpd.server.wire import INTERNAL, JSON_TYPE, error_body, error_reply, json_reply, read_bytes, status_reply

__all__ = ["INTERNAL", "error_body", "error_reply", "json_reply", "read_object", "status_reply", "warn_unknown"]

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
    settings = service_of(request).resolved.settings.server
    raw = await read_bytes(request, most=settings.max_body_size, seconds=settings.body_timeout)
    try:
        body = _DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def warn_unknown(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """One warning in the log for each unknown field name, ever; the field is ignored."""
    known = frozenset(known)
    for name in body:
        if len(_warned) >= MAX_WARNED:
            return  # a body may hold millions of names
        if name not in known and name not in _warned:
            _warned.add(name)
            logger.warning("unknown request field %r is ignored", name[:100])
