"""Every HTTP request is counted, and one that is answered with an error is told to the request log.

The outermost middleware, so that it sees what the others answer. A label is a route's pattern, never a path that a client made up. Called
by the application.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from radixpd.runtime.caller import caller
from radixpd.runtime.output import CLIENT_CLOSED
from radixpd.server.service import service_of

__all__ = ["observed"]

UNKNOWN = "other"  # the label of paths without a route
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))


@web.middleware
async def observed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """See the module."""
    try:
        response = await handler(request)
    except (asyncio.CancelledError, ConnectionError):
        _count(request, CLIENT_CLOSED)
        raise
    _count(request, response.status)
    log = service_of(request).manager.request_log
    # An abort has its line already: the end of a request that was taken.
    if log.enabled and response.status >= 400 and response.status != CLIENT_CLOSED and (error := _error_of(response)):
        log.refused(
            route=request.path[:200],
            method=request.method,
            client=request.remote or "",
            request_id=caller().id,
            status=response.status,
            error=error,
        )
    return response


def _count(request: web.Request, status: int) -> None:
    resource = request.match_info.route.resource
    method = request.method if request.method in METHODS else UNKNOWN
    service_of(request).metrics.answered(resource.canonical if resource else UNKNOWN, method, status)


def _error_of(response: web.StreamResponse) -> dict[str, Any]:
    body = getattr(response, "body", None)
    if isinstance(body, bytes) and response.content_type == "application/json":
        error = msgspec.json.decode(body).get("error")
        return error if isinstance(error, dict) else {}
    return {}
