"""What the load balancer answers itself: its health, its workers, its metrics, and orders that go to every worker.

Invariant: reading `/health` needs nothing and asks nobody. A worker that joins is called by this balancer, so adding one takes an admin
key where there is one, and a JSON content type always: no web page of another origin can send that. Called by the application's router.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, get_args

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest, ConfigError
from radixpd.mini_lb.fleet import Worker
from radixpd.mini_lb.metrics import CONTENT_TYPE
from radixpd.mini_lb.parts import Parts, parts_of
from radixpd.mini_lb.settings import BOOTSTRAP_PORT, WorkerSpec, check_url
from radixpd.mini_lb.snapshot import Role
from radixpd.mini_lb.upstream import LegFailed, Outgoing
from radixpd.server.wire import JSON_TYPE, json_reply

__all__ = ["ADMIN", "ROUTES", "SHARED", "shown"]

ORDER_SECONDS = 30.0  # for a worker to obey


class WorkerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /workers."""

    url: str
    role: Role = "regular"
    bootstrap_port: int = BOOTSTRAP_PORT


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 while some worker can take a request."""
    parts = parts_of(request)
    if parts.gate.closed:
        return json_reply({"status": "draining"}, status=503)
    if not parts.fleet.usable():
        return json_reply({"status": "no worker is available"}, status=503)
    return json_reply({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: of the load balancer; each worker has its own."""
    return web.Response(body=parts_of(request).metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def list_workers(request: web.Request) -> web.Response:
    """GET /workers."""
    now = time.monotonic()
    parts = parts_of(request)
    told: dict[str, Any] = {"workers": [shown(worker, now) for worker in parts.fleet]}
    if parts.workers_file is not None:
        told["workers_file"] = {"error": parts.workers_file.error or None}
    return json_reply(told)


async def add_worker(request: web.Request) -> web.Response:
    """POST /workers: it gets requests once its /health has answered."""
    if request.content_type != JSON_TYPE:
        raise BadRequest(f"the content type must be {JSON_TYPE}", status=415)
    parts = parts_of(request)
    try:
        body = msgspec.json.decode(await parts.proxy.body(request), type=WorkerBody)
        spec = WorkerSpec(check_url(body.url, "url"), body.role, body.bootstrap_port)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body must hold url, and may hold role ({', '.join(get_args(Role))}) and bootstrap_port: {error}") from None
    except ConfigError as error:
        raise BadRequest(str(error), param="url") from None
    if not 1 <= spec.bootstrap_port <= 65535:
        raise BadRequest(f"bootstrap_port must be between 1 and 65535, got {spec.bootstrap_port}", param="bootstrap_port")
    return json_reply(shown(parts.fleet.add(spec), time.monotonic()), status=201)


async def remove_worker(request: web.Request) -> web.Response:
    """DELETE /workers/URL: it gets no more requests and leaves when those that it has are over."""
    return json_reply(shown(parts_of(request).fleet.drain(request.match_info["url"]), time.monotonic()))


async def order(request: web.Request) -> web.Response:
    """An order for every worker; 200 if all obey, else the worst status."""
    parts = parts_of(request)
    body = await parts.proxy.body(request) if request.can_read_body else None
    outgoing = parts.proxy.outgoing(request)
    found = await asyncio.gather(*(_obey(parts, worker.name, outgoing, body) for worker in parts.fleet))
    return json_reply({"workers": found}, status=max((each["status"] for each in found), default=503))


async def _obey(parts: Parts, name: str, outgoing: Outgoing, body: bytes | None) -> dict[str, Any]:
    try:
        async with asyncio.timeout(ORDER_SECONDS):
            response = await parts.upstream.open(name, outgoing, body)
            try:
                text = (await parts.upstream.read(name, response)).decode(errors="replace")
            finally:
                response.close()
    except LegFailed as error:
        return {"url": name, "status": 502, "answer": error.reason}
    except TimeoutError:
        return {"url": name, "status": 504, "answer": f"no answer within {ORDER_SECONDS:g} s"}
    return {"url": name, "status": response.status, "answer": text}


def shown(worker: Worker, now: float) -> dict[str, Any]:
    """A worker as `/workers` and the status page tell it."""
    load = worker.load
    return {
        "url": worker.name,
        "name": worker.short,
        "role": worker.spec.role,
        "bootstrap_port": worker.spec.bootstrap_port if worker.spec.role == "prefill" else None,
        "state": worker.state(now),
        "open_requests": worker.open,
        "incarnation": worker.incarnation,
        "cache_known": worker.hears(),
        "ended_requests": worker.outcomes,
        "load": {"running": load.running, "waiting": load.waiting, "kv_tokens": load.kv_tokens, "free_tokens": load.free_tokens},
    }


ROUTES = (
    web.get("/health", health),
    web.get("/metrics", metrics),
    web.get("/workers", list_workers),
    web.post("/workers", add_worker),
    web.delete("/workers/{url:.+}", remove_worker),
    web.get("/flush_cache", order),
    web.post("/flush_cache", order),
    web.post("/abort_request", order),
    web.post("/pause_generation", order),
    web.post("/continue_generation", order),
)
ADMIN = (add_worker, remove_worker, order)
SHARED = (metrics, list_workers)  # these show how everybody's requests fare
