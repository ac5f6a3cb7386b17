"""`/pd_role_switch`: a prefill server becomes a decode server, or the other way round, and keeps its cache.

The server drains first: while it does, new requests get 503, as at its end. One switch at a time. An order like those of `admin_api`.
Called by the application's router.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest, Overloaded
from radixpd.runtime.admission import read
from radixpd.runtime.defaults import limits_of
from radixpd.runtime.disaggregation import has_peers, mode_of, with_mode
from radixpd.server.docs import Body, Doc
from radixpd.server.replies import json_reply, read_object
from radixpd.server.service import Service, service_of
from radixpd.server.state_answers import Switched

__all__ = ["DOCS", "ROUTES", "RoleBody"]

SETTLE_SECONDS = 30.0  # for pages that a peer may still write into; the scheduler gives up before


class RoleBody(msgspec.Struct, kw_only=True):
    """`timeout`: seconds that running requests get to finish; default: --drain-timeout."""

    role: Literal["prefill", "decode"]
    timeout: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None


async def pd_role_switch(request: web.Request) -> web.Response:
    """POST /pd_role_switch: answers when the server takes requests in its new role; 503, and nothing changed, if it could not drain."""
    service = service_of(request)
    body = read(RoleBody, await read_object(request))
    if not has_peers(service.resolved):
        raise BadRequest(
            "this server does not split prefill and decode; start it with --disaggregation-mode prefill or decode", param="role"
        )
    if service.manager.draining:
        raise Overloaded("the server is draining already")
    before = mode_of(service.resolved)
    if before != body.role:
        service.manager.draining = True
        try:
            await _switch(service, body)
        finally:
            service.manager.draining = False
    return json_reply({"role": body.role, "before": before})


async def _switch(service: Service, body: RoleBody) -> None:
    """With no request open."""
    seconds = service.resolved.settings.server.drain_timeout if body.timeout is None else body.timeout
    try:
        await asyncio.wait_for(service.client.idle(), seconds)
    except TimeoutError:
        raise Overloaded(f"requests were still running after {seconds:g} s (timeout); the role is as it was") from None
    await service.client.control("switch_role", {"role": body.role}, seconds=SETTLE_SECONDS)
    service.resolved = with_mode(service.resolved, body.role)
    service.manager.limits = limits_of(service.resolved)


ROUTES = (web.post("/pd_role_switch", pd_role_switch),)
DOCS = {
    pd_role_switch: Doc(
        "Drain, then be the other half of prefill/decode pairs; the prefix cache stays",
        answer=Switched,
        body=Body(RoleBody),
        errors=(503,),
    )
}
