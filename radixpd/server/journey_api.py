"""Where requests are and how they went: `/requests` for everything that is alive, `/journey/{rid}` for one request, alive or ended.

The scheduler says where a live one is; the client remembers how the last ones went (`runtime.journeys`). Invariant: a caller learns
nothing of other tenants' requests, not even that a name is in use; rooms and pages that belong to no request are an operator's business.
Called by the application's router.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from radixpd.errors import BadRequest
from radixpd.runtime.caller import caller
from radixpd.runtime.client import Client
from radixpd.runtime.journeys import Ended
from radixpd.server.docs import Doc
from radixpd.server.native_shape import finish_reason
from radixpd.server.replies import json_reply
from radixpd.server.service import service_of
from radixpd.server.state_answers import JourneyAnswer, RequestState

__all__ = ["DOCS", "ROUTES"]

STATE_SECONDS = 2.0


async def requests(request: web.Request) -> web.Response:
    """GET /requests: everything that is alive, and whom it waits for."""
    service = service_of(request)
    if not service.client.ready.is_set():
        service.manager.check_open()
    state = await service.client.control("state", seconds=STATE_SECONDS)
    see = caller().may_see
    return json_reply([_shown(each) for each in state["requests"] if see(each["rid"])])


async def journey(request: web.Request) -> web.Response:
    """GET /journey/{rid}: one answer, or a list of them where a request has several outputs."""
    client, rid = service_of(request).client, request.match_info["rid"]
    for name in caller().names(rid):
        live = sorted(client.groups.get(name, ())) or [name] * (name in client.outputs)
        # Ended ones are read after the question: what ends meanwhile is among them.
        places = await _places(client, live)
        answers = [*map(_ended, client.journeys.of(name)), *(_live(client, each, places) for each in live if each in client.outputs)]
        if answers:
            answers.sort(key=lambda answer: (len(answer["id"]), answer["id"]))
            return json_reply(answers if len(answers) > 1 else answers[0])
    raise BadRequest(f"no request {rid[:100]!r} is alive, or was among the last to end", param="rid", code="request_not_found", status=404)


async def _places(client: Client, rids: list[str]) -> dict[str, Any]:
    """Where these are, as far as the scheduler still has them."""
    if not rids:
        return {}
    state = await client.control("state", {"rids": rids}, seconds=STATE_SECONDS)
    return {each["rid"]: each for each in state["requests"]}


def _live(client: Client, rid: str, places: dict[str, Any]) -> dict[str, Any]:
    """An output that the brain has not ended. It may do so at this moment: then the place is nowhere."""
    output, place = client.outputs[rid], places.get(rid)
    if (ended := Ended.of(output)) is not None:
        return _ended(ended)
    return {
        "id": caller().shown(rid),
        "live": True,
        "whereabouts": None if place is None else _shown(place),
        "finish_reason": None,
        "kv_journey": output.journey,
    }


def _ended(ended: Ended) -> dict[str, Any]:
    return {
        "id": caller().shown(ended.rid),
        "live": False,
        "whereabouts": None,
        "finish_reason": finish_reason(ended.finish, ended.completion),
        "kv_journey": ended.journey,
    }


def _shown(place: dict[str, Any]) -> dict[str, Any]:
    """A place with the name that the caller gave the request."""
    return {**place, "rid": None if place["rid"] is None else caller().shown(place["rid"])}


ROUTES = (web.get("/requests", requests), web.get("/journey/{rid:.+}", journey))
DOCS = {
    requests: Doc("Live requests: where each is, since when, whom it waits for", answer=list[RequestState], errors=(503,)),
    journey: Doc(
        "One request: where it is while it lives, how it went for a while afterwards",
        answer=JourneyAnswer | list[JourneyAnswer],
        errors=(404, 503),
    ),
}
