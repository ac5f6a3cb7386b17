"""The aiohttp application: routes, and what holds for every route (errors, keys, size of a body).

Invariant: every answer that is not 2xx has the JSON error shape; with keys set, every path but `/health` needs one, unknown paths
too. The one broad except of the HTTP layer is here: it logs the trace and answers 500 without inner details. Called by the API
process's main and by tests.
"""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from radixpd.errors import EngineFailed, RadixpdError
from radixpd.server import admin_api, chat, info_api, native_api, openai_api, openapi, ops_api, page_api, text_api
from radixpd.server.observe import observed, one_line_for_garbage
from radixpd.server.replies import error_body, error_reply, status_reply
from radixpd.server.service import SERVICE, Service, service_of
from radixpd.server.stream import STREAM, event

__all__ = ["build_app"]

ROUTED = (native_api, openai_api, chat, text_api, info_api, admin_api, ops_api, page_api, openapi)  # every module with routes
MAX_BODY = 32 * 2**20
OPEN_PATHS = frozenset(("/health",))
INTERNAL = "internal error; the server's log has the details"

logger = logging.getLogger(__name__)
logging.getLogger("aiohttp.server").addFilter(one_line_for_garbage)


def build_app(service: Service) -> web.Application:
    """The application for one server."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[observed, _errors, _keys])
    app[SERVICE] = service
    app[page_api.LOOKOUT] = page_api.Lookout(service)
    for module in ROUTED:
        app.router.add_routes(module.ROUTES)
    docs = {handler: doc for module in ROUTED for handler, doc in module.DOCS.items()}
    closed = bool(service.resolved.settings.server.api_key)
    app[openapi.DOCUMENT] = openapi.document(app.router, docs, service.manager.limits, closed=closed, open_paths=OPEN_PATHS)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RadixpdError as error:
        return await _failed(request, error)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        message = (
            f"the body is larger than {MAX_BODY} bytes" if error.status == 413 else f"{error.reason}: {request.method} {request.path[:200]}"
        )
        return status_reply(error.status, message, headers=headers)
    except ConnectionError:
        # The client has gone; nobody reads an answer.
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return await _failed(request, EngineFailed(INTERNAL))


async def _failed(request: web.Request, error: RadixpdError) -> web.StreamResponse:
    """The error as an answer, or as the last event of a stream that has begun."""
    started = request.get(STREAM)
    if started is None:
        return error_reply(error)
    assert isinstance(started, web.StreamResponse)
    await started.write(event(error_body(error)))
    await started.write_eof()
    return started


@web.middleware
async def _keys(request: web.Request, handler: Handler) -> web.StreamResponse:
    keys = service_of(request).resolved.settings.server.api_key
    if keys and request.path not in OPEN_PATHS:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # Every key is compared, so that time tells nothing.
        good = sum(key.matches(given) for key in keys) if scheme.lower() == "bearer" else 0
        if not good:
            return status_reply(
                401,
                "this server needs an API key: Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
                code="invalid_api_key",
            )
    return await handler(request)
