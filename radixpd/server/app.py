"""The aiohttp application: routes, and which guard each of them has.

Invariant: every answer that is not 2xx has the JSON error shape (`faults`). Called by the API process's main and by tests.
"""

from __future__ import annotations

from aiohttp import hdrs, web

from radixpd.server import admin_api, chat, info_api, journey_api, native_api, openai_api, openapi, ops_api, page_api, role_api, text_api
from radixpd.server.faults import faults
from radixpd.server.guards import Cors, Gate, Keys, stamp
from radixpd.server.observe import observed
from radixpd.server.replies import status_reply
from radixpd.server.service import SERVICE, Service
from radixpd.server.unsupported import unsupported

__all__ = ["build_app"]

# Every module with routes.
ROUTED = (native_api, openai_api, chat, text_api, info_api, admin_api, ops_api, page_api, role_api, journey_api, openapi)
GENERATING = (native_api, openai_api, chat)  # what these take by POST or PUT is counted and timed
# Handlers that need an admin key, where one is set: every order, and what shows texts of everybody's prompts.
ADMIN = (*(route.handler for module in (admin_api, ops_api, role_api) for route in module.ROUTES), page_api.cache_tree)
# These show how everybody's requests fare: they join ADMIN where tenants are kept apart.
SHARED = (info_api.server_info, info_api.get_load, info_api.metrics, journey_api.requests)


def build_app(service: Service) -> web.Application:
    """The application for one server."""
    settings = service.resolved.settings.server
    keys = Keys(settings, admin=ADMIN, shared=SHARED, page=(page_api.index, page_api.page_file))
    generating = {route.handler for module in GENERATING for route in module.ROUTES if route.method in (hdrs.METH_POST, hdrs.METH_PUT)}
    gate, cors = Gate(settings, generating=generating), Cors(settings)
    app = web.Application(
        client_max_size=settings.max_body_size,
        middlewares=[observed, faults(settings.max_body_size, _in_other_words), cors.preflight, keys.check, gate.check],
    )
    app.on_response_prepare.extend((stamp, cors.stamp))
    app[SERVICE] = service
    app[page_api.LOOKOUT] = page_api.Lookout(service)
    for module in ROUTED:
        app.router.add_routes(module.ROUTES)
    docs = {handler: doc for module in ROUTED for handler, doc in module.DOCS.items()}
    app[openapi.DOCUMENT] = openapi.document(app.router, docs, service.manager.limits, keys=keys, gate=gate)
    return app


def _in_other_words(request: web.Request, error: web.HTTPException) -> web.Response | None:
    """A route that others have and this server lacks."""
    reason = unsupported(request.path) if error.status == 404 else None
    return None if reason is None else status_reply(404, reason, code="unsupported_route")
