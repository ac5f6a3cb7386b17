"""What the server is and how it is: health, settings, model, load, metrics.

`/health` only reads state; `/health_generate` runs one token through the engine and cancels it when that takes too long. Called by the
application's router.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from aiohttp import web

from radixpd import __version__
from radixpd.config.resolve import public_view
from radixpd.errors import Overloaded
from radixpd.runtime.admission import Ask, admit
from radixpd.runtime.caller import caller
from radixpd.runtime.disaggregation import has_peers, mode_of
from radixpd.runtime.metrics import CONTENT_TYPE
from radixpd.runtime.tokenizer_manager import State, TokenizerManager
from radixpd.server.docs import Doc
from radixpd.server.replies import json_reply, status_reply
from radixpd.server.service import Service, service_of
from radixpd.server.state_answers import Health, ModelInfo, ServerInfo, ServerLoad

__all__ = ["DOCS", "ROUTES", "probe"]

PROBE_SECONDS = 20.0
STATE_SECONDS = 2.0


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 while requests are taken and the scheduler shows signs of life."""
    service = service_of(request)
    state = service.manager.state
    if state is State.READY and service.client.unresponsive:
        return json_reply({"status": "unresponsive"}, status=503)
    return json_reply({"status": state.value}, status=200 if state is State.READY else 503)


def probe(manager: TokenizerManager, *, tokens: int = 1) -> Ask:
    """A tiny request of the server's own: out of every client's cache, of the request log and of the latencies."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    # Any id will do; not 0, which often is a padding token.
    ask = admit([min(1, manager.limits.vocab_size - 1)], sampling, {"cache_salt": "\0probe"}, limits=manager.limits, names={})
    return dataclasses.replace(ask, no_logs=True, log_metrics=False)


async def health_generate(request: web.Request) -> web.Response:
    """GET /health_generate: 200 when one token came back in time."""
    manager = service_of(request).manager
    async with await manager.submit([probe(manager)]) as generation:
        try:
            await asyncio.wait_for(generation.finished(aborts=True), PROBE_SECONDS)
        except TimeoutError:
            raise Overloaded(f"no token within {PROBE_SECONDS:g} s") from None
    return json_reply({"status": "ok"})


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info: settings, sizes, the scheduler's load and inner state. Secrets are not in it."""
    service = service_of(request)
    state = await service.client.control("state", seconds=STATE_SECONDS) if service.client.ready.is_set() else {}
    events = service.resolved.kv_events
    info = {
        **public_view(service.resolved),
        "version": __version__,
        "incarnation": service.incarnation,
        "role": _role(service),
        "model_fingerprint": service.client.fingerprint,
        "text_identity": service.text_identity,
        "tokenizer_directory": service.resolved.tokenizer_directory,
        "kv_events": events and dataclasses.asdict(events),
        "status": service.manager.state.value,
        "default_sampling_params": service.manager.defaults.shown(),
        "load": dataclasses.asdict(service.client.load),
        "internal_states": [_visible(state)],
    }
    return json_reply(info)


def _role(service: Service) -> str:
    """As load balancers know it."""
    return mode_of(service.resolved) if has_peers(service.resolved) else "regular"


def _visible(state: dict[str, Any]) -> dict[str, Any]:
    """The scheduler's state without other tenants' requests."""
    see = caller().may_see
    return {**state, "requests": [each for each in state["requests"] if see(each["rid"])]} if "requests" in state else state


async def model_info(request: web.Request) -> web.Response:
    """GET /get_model_info."""
    service = service_of(request)
    resolved = service.resolved
    model = resolved.settings.model
    return json_reply(
        {
            "model_path": model.model_path,
            "tokenizer_path": resolved.tokenizer_directory,
            "served_model_name": resolved.served_name,
            "is_generation": True,
            "has_chat_template": service.manager.template is not None,
            "context_length": resolved.context_length,
            "vocab_size": resolved.model.vocab_size,
        }
    )


async def get_load(request: web.Request) -> web.Response:
    """GET /get_load: the scheduler's latest load, and by which a load balancer sees that the server is another one."""
    service = service_of(request)
    name = {"incarnation": service.incarnation, "role": _role(service)}
    return json_reply({**dataclasses.asdict(service.client.load), **name})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    service = service_of(request)
    if not service.resolved.settings.observe.enable_metrics:
        return status_reply(404, "metrics are off")
    return web.Response(body=service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


ROUTES = (
    web.get("/health", health),
    web.get("/ping", health),
    web.get("/health_generate", health_generate),
    web.get("/server_info", server_info),
    web.get("/get_server_info", server_info),
    web.get("/get_model_info", model_info),
    web.get("/get_load", get_load),
    web.get("/metrics", metrics),
)
DOCS = {
    health: Doc("Whether requests are taken; needs no key", answer=Health, others={503: Health}),
    health_generate: Doc("Whether a token comes through the engine", answer=Health, errors=(499, 503)),
    server_info: Doc("Settings without secrets, sizes, load, state", answer=ServerInfo, errors=(503,)),
    model_info: Doc("The model", answer=ModelInfo),
    get_load: Doc("The scheduler's latest load", answer=ServerLoad),
    metrics: Doc("Prometheus text", media=("text/plain",), errors=(404,)),
}
