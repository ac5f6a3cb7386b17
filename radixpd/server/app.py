"""The aiohttp application: routes, which guard each of them has, and how errors are answered.

Invariant: every answer that is not 2xx has the JSON error shape. The one broad except of the HTTP layer is here: it logs the trace and
answers 500 without inner details. Called by the API process's main and by tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from radixpd.errors import EngineFailed, RadixpdError
from radixpd.runtime.caller import caller
from radixpd.server import admin_api, chat, info_api, journey_api, native_api, openai_api, openapi, ops_api, page_api, role_api, text_api
from radixpd.server.guards import Cors, Gate, Keys, stamp
from radixpd.server.observe import observed
from radixpd.server.replies import INTERNAL, error_body, error_reply, status_reply
from radixpd.server.service import SERVICE, Service, service_of
from radixpd.server.stream import STREAM, event
from radixpd.server.unsupported import unsupported

__all__ = ["build_app"]

# Every module with routes.
ROUTED = (native_api, openai_api, chat, text_api, info_api, admin_api, ops_api, page_api, role_api, journey_api, openapi)
GENERATING = (native_api, openai_api, chat)  # what these take by POST or PUT is counted and timed
# Handlers that need an admin key, where one is set: every order, and what shows texts of everybody's prompts.
ADMIN = (*(route.handler for module in (admin_api, ops_api, role_api) for route in module.ROUTES), page_api.cache_tree)
# These show how everybody's requests fare: they join ADMIN where tenants are kept apart.
SHARED = (info_api.server_info, info_api.get_load, info_api.metrics, journey_api.requests)
LAST_WRITE_SECONDS = 5.0  # for the error that ends a stream, if its client reads no more

logger = logging.getLogger(__name__)


def build_app(service: Service) -> web.Application:
    """The application for one server."""
    settings = service.resolved.settings.server
    keys = Keys(settings, admin=ADMIN, shared=SHARED, page=(page_api.index, page_api.page_file))
    generating = {route.handler for module in GENERATING for route in module.ROUTES if route.method in (hdrs.METH_POST, hdrs.METH_PUT)}
    gate, cors = Gate(settings, generating=generating), Cors(settings)
    app = web.Application(
        client_max_size=settings.max_body_size,
        middlewares=[observed, _errors, cors.preflight, keys.check, gate.check],
    )
    app.on_response_prepare.extend((stamp, cors.stamp))
    app[SERVICE] = service
    app[page_api.LOOKOUT] = page_api.Lookout(service)
    for module in ROUTED:
        app.router.add_routes(module.ROUTES)
    docs = {handler: doc for module in ROUTED for handler, doc in module.DOCS.items()}
    app[openapi.DOCUMENT] = openapi.document(app.router, docs, service.manager.limits, keys=keys, gate=gate)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RadixpdError as error:
        return await _failed(request, error)
    except web.HTTPException as error:
        return _refused(request, error)
    except ConnectionError:
        # The client has gone; nobody reads an answer.
        raise
    except Exception:
        logger.exception("%s %s failed (request id %s)", request.method, request.path, caller().id)
        return await _failed(request, EngineFailed(INTERNAL))


def _refused(request: web.Request, error: web.HTTPException) -> web.Response:
    """What the router and the body's limit refuse."""
    if error.status == 404 and (reason := unsupported(request.path)) is not None:
        return status_reply(404, reason, code="unsupported_route")
    if error.status == 413:
        most = service_of(request).resolved.settings.server.max_body_size
        return status_reply(413, f"the body is larger than {most} bytes (--max-body-size)")
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    return status_reply(error.status, f"{error.reason}: {request.method} {request.path[:200]}", headers=headers)


async def _failed(request: web.Request, error: RadixpdError) -> web.StreamResponse:
    """A plain error, or one event where a stream has begun."""
    started = request.get(STREAM)
    if started is None:
        return error_reply(error)
    assert isinstance(started, web.StreamResponse)
    # A client that does not read must not hold its connection for ever.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WRITE_SECONDS):
            # By looking: a write that was cancelled while it waited for room leaves a cancelled future to those that come after it.
            while request.protocol.writing_paused:
                await asyncio.sleep(LAST_WRITE_SECONDS / 100)
            await started.write(event(error_body(error)))
            await started.write_eof()
            return started
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("the client does not read")
