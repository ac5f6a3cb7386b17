"""The load balancer's application: routes, who may call them, how errors are answered.

Invariants: every answer that is not 2xx has the servers' JSON error shape; with keys set every path but `/health` needs one; a path that
is not listed here reaches no worker. The one broad except of the load balancer is here. Called by `__main__` and by tests.
"""

from __future__ import annotations

import time

from aiohttp import web
from aiohttp.typedefs import Handler

from radixpd.mini_lb import board, control_api, explain_api, page_api
from radixpd.mini_lb.decisions import CLIENT_CLOSED, DECISION, ROUTE_HEADER, tell_route
from radixpd.mini_lb.parts import PARTS, Parts, parts_of
from radixpd.mini_lb.request_log import line
from radixpd.mini_lb.settings import access
from radixpd.runtime.caller import caller
from radixpd.server.faults import faults
from radixpd.server.guards import Cors, Keys, stamp

__all__ = ["build_app"]

UNKNOWN = "other"  # the label of paths without a route
ROUTED = (control_api, explain_api, board, page_api)  # what the balancer answers itself
GENERATING = (("POST", "/generate"), ("PUT", "/generate"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"))
LOOKING = frozenset(("GET", "HEAD", "OPTIONS"))
ANYWHERE = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{id:[^/]+(?:/[^/]+)*}"),
    ("GET", "/health_generate"),
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    ("GET", "/get_model_info"),
    ("GET", "/tokenizer_info"),
    ("POST", "/tokenize"),
    ("POST", "/v1/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/detokenize"),
)


def build_app(parts: Parts) -> web.Application:
    """The application for one load balancer."""
    settings, door = access(parts.settings), parts.settings.door
    shared = (*control_api.SHARED, explain_api.explain, board.events)
    keys = Keys(settings, admin=control_api.ADMIN, shared=shared, page=(page_api.index, page_api.page_file))
    told = parts.settings.observe.route_header
    cors = Cors(settings, exposed=(ROUTE_HEADER,) if told else ())
    app = web.Application(
        client_max_size=door.max_body_size, middlewares=[_observed, faults(door.max_body_size), cors.preflight, keys.check]
    )
    app.on_response_prepare.extend((stamp, cors.stamp, *((tell_route,) if told else ())))
    app[PARTS] = parts
    app[board.BOARD] = board.Board(parts)
    app.on_shutdown.append(board.end_views)
    for method, path in GENERATING:
        app.router.add_route(method, path, parts.proxy.generate)
    for method, path in ANYWHERE:
        app.router.add_route(method, path, parts.proxy.pass_on)
    for module in ROUTED:
        app.router.add_routes(module.ROUTES)
    return app


@web.middleware
async def _observed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count every answer, and log it; a label is a route's pattern, never a path that a client made up."""
    status, arrived = CLIENT_CLOSED, time.monotonic()
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        resource = request.match_info.route.resource
        route, method = (resource.canonical, request.method) if resource else (UNKNOWN, UNKNOWN)
        _ended(request, route=route, method=method, status=status, arrived=arrived)


def _ended(request: web.Request, *, route: str, method: str, status: int, arrived: float) -> None:
    parts, now, decision = parts_of(request), time.monotonic(), request.get(DECISION)
    parts.metrics.answered(route, method, status)
    if decision is not None:
        decision.ended(status, now)
    # What only looks is not logged.
    if parts.request_log.enabled and request.method not in LOOKING:
        told = line(decision, rid=caller().id, method=method, route=route, status=status, seconds=now - arrived)
        parts.request_log.write(told)
