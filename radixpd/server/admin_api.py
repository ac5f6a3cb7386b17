"""Orders to the server: flush the cache, end requests, hold everything up for a while.

With `--api-key` these need a key, as everything does. Called by the application's router.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest
from radixpd.runtime.admission import read
from radixpd.server.docs import Body, Doc, Schema
from radixpd.server.replies import json_reply, read_object
from radixpd.server.service import service_of
from radixpd.server.state_answers import Aborted, Continued, Flushed, Paused

__all__ = ["DOCS", "ROUTES"]

PAUSE_SECONDS = 60.0  # for the steps in flight


class AbortBody(msgspec.Struct, kw_only=True):
    """Body of `/abort_request`."""

    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct, kw_only=True):
    """Body of `/pause_generation`: what becomes of the requests that are there."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


async def flush_cache(request: web.Request) -> web.Response:
    """GET or POST /flush_cache: 400 while requests run."""
    await service_of(request).client.control("flush_cache")
    return json_reply({"success": True})


async def abort_request(request: web.Request) -> web.Response:
    """POST /abort_request: by rid, or all. An unknown rid is no error: the answer and the abort may have crossed."""
    manager = service_of(request).manager
    body = read(AbortBody, await read_object(request))
    if not body.rid and not body.abort_all:
        raise BadRequest("give rid, or abort_all: true", param="rid")
    return json_reply({"aborted": manager.abort_all() if body.abort_all else manager.abort(body.rid or "")})


async def pause_generation(request: web.Request) -> web.Response:
    """POST /pause_generation: answers once no step runs; requests that come later wait for /continue_generation."""
    body = read(PauseBody, await read_object(request))
    await service_of(request).client.control(f"pause_{body.mode}", seconds=PAUSE_SECONDS)
    return json_reply({"success": True})


async def continue_generation(request: web.Request) -> web.Response:
    """POST /continue_generation: without a pause it does nothing."""
    await service_of(request).client.control("continue")
    return json_reply({"success": True})


ROUTES = (
    web.get("/flush_cache", flush_cache),
    web.post("/flush_cache", flush_cache),
    web.post("/abort_request", abort_request),
    web.post("/pause_generation", pause_generation),
    web.post("/continue_generation", continue_generation),
)
ANY_NAME: Schema = {"type": ["string", "null"]}
NAMED: Schema = {
    "anyOf": [
        {"required": ["rid"], "properties": {"rid": {"type": "string", "minLength": 1}}},
        {"required": ["abort_all"], "properties": {"abort_all": {"const": True}}},
    ]
}
DOCS = {
    pause_generation: Doc("Run no step until /continue_generation", answer=Paused, body=Body(PauseBody), errors=(503,)),
    continue_generation: Doc("End a pause", answer=Continued, errors=(503,)),
    flush_cache: Doc("Empty the prefix cache; 400 while requests run", answer=Flushed, errors=(400, 503)),
    abort_request: Doc("End a request by its rid, or all", answer=Aborted, body=Body(AbortBody, fields={"rid": ANY_NAME}, rule=NAMED)),
}
