"""Orders about the server's own workings: what it logs, profiles of the model runner, its garbage collectors.

An unknown field is refused here (elsewhere it is ignored), because an order that does half of what was meant is worse than none; and no
field is a path: where files go is fixed by flags. Called by the application's router.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest
from radixpd.runtime.admission import read
from radixpd.runtime.orders import obey
from radixpd.server.docs import Body, Doc
from radixpd.server.replies import json_reply, read_object
from radixpd.server.service import Service, service_of
from radixpd.server.state_answers import Frozen, LogSettings, ProfileStarted, ProfileWritten

__all__ = ["DOCS", "ROUTES"]

PROFILE_STEPS = 50
MOST_PROFILE_STEPS = 1000
LEVELS = (0, 3)
WRITE_SECONDS = 120.0  # for the trace of a profile
PATHS = ("output_dir", "dump_requests_folder", "crash_dump_folder")  # fields of SGLang's bodies


class LoggingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `/configure_logging`; what is not given stays as it is."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_requests_format: Literal["text", "json"] | None = None


class ProfileBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `/start_profile`."""

    num_steps: int | None = None
    record_shapes: bool | None = None
    with_stack: bool | None = None
    activities: list[Literal["CPU"]] | None = None


async def configure_logging(request: web.Request) -> web.Response:
    """POST /configure_logging: the request log, and the level of every process but the supervisor."""
    service = service_of(request)
    service.manager.check_open()
    body = read(LoggingBody, _without_paths(await read_object(request), "--crash-dump-folder"))
    level = body.log_requests_level
    if level is not None and not LEVELS[0] <= level <= LEVELS[1]:
        raise BadRequest(f"log_requests_level must be between {LEVELS[0]} and {LEVELS[1]}, got {level}", param="log_requests_level")
    if body.log_level is not None:
        await _everywhere(service, "configure_logging", {"log_level": body.log_level})
    log = service.manager.request_log
    log.configure(enabled=body.log_requests, level=level, format=body.log_requests_format)
    answer = LogSettings(
        log_level=logging.getLevelName(logging.getLogger().level).lower(),
        log_requests=log.enabled,
        log_requests_level=log.level,
        log_requests_format="json" if log.format == "json" else "text",
    )
    return json_reply(answer)


async def start_profile(request: web.Request) -> web.Response:
    """POST /start_profile: record the runner's next steps. The trace is written when they have run, or at /stop_profile."""
    service = service_of(request)
    service.manager.check_open()
    given = await read_object(request) if request.can_read_body else {}
    body = read(ProfileBody, _without_paths(given, "--profile-folder"))
    steps = PROFILE_STEPS if body.num_steps is None else body.num_steps
    if not 1 <= steps <= MOST_PROFILE_STEPS:
        raise BadRequest(f"num_steps must be between 1 and {MOST_PROFILE_STEPS}, got {steps}", param="num_steps")
    args = {"steps": steps, "record_shapes": body.record_shapes is True, "with_stack": body.with_stack is True}
    await service.client.control("start_profile", args, to="runner", seconds=WRITE_SECONDS)
    return json_reply(ProfileStarted(num_steps=steps))


async def stop_profile(request: web.Request) -> web.Response:
    """POST /stop_profile: the path of the trace on the server's machine."""
    service = service_of(request)
    service.manager.check_open()
    return json_reply(await service.client.control("stop_profile", to="runner", seconds=WRITE_SECONDS))


async def freeze_gc(request: web.Request) -> web.Response:
    """POST /freeze_gc: objects that live now are not looked at again by the garbage collectors, in every process but the supervisor."""
    service = service_of(request)
    service.manager.check_open()
    replies = await _everywhere(service, "freeze_gc", {})
    return json_reply({name: body["frozen"] for name, body in replies.items()})


def _without_paths(body: dict[str, Any], flag: str) -> dict[str, Any]:
    for name in PATHS:
        if body.get(name) is not None:
            raise BadRequest(f"{name} is no field of this server: where files go is fixed at start, see {flag}", param=name)
    return {name: value for name, value in body.items() if name not in PATHS}


async def _everywhere(service: Service, action: str, args: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Scheduler and runner first: if one does not answer in time, the client is told so and gives the order again."""
    replies = {name: await service.client.control(action, args, to=name) for name in ("scheduler", "runner")}
    return {"api": obey(action, args), **replies}


ROUTES = (
    web.post("/configure_logging", configure_logging),
    web.post("/start_profile", start_profile),
    web.post("/stop_profile", stop_profile),
    web.post("/freeze_gc", freeze_gc),
)
DOCS = {
    configure_logging: Doc(
        "Change the request log and the log level",
        answer=LogSettings,
        body=Body(LoggingBody, ranges={"log_requests_level": LEVELS}),
        errors=(400, 503),
    ),
    start_profile: Doc(
        "Profile the model runner's next steps",
        answer=ProfileStarted,
        body=Body(ProfileBody, ranges={"num_steps": (1, MOST_PROFILE_STEPS)}, required=False),
        errors=(400, 503),
    ),
    stop_profile: Doc("End a profile; the trace's path", answer=ProfileWritten, errors=(400, 503)),
    freeze_gc: Doc("Take what lives now out of garbage collection", answer=Frozen, errors=(400, 503)),
}
