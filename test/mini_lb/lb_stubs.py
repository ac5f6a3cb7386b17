"""Stub workers and a load balancer in the test's own loop.

A `Stub` answers as a script says and remembers what came: every leg has a `Visit` that tells how it ended. Nothing sleeps: a script waits
for events that the test sets.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from radixpd.mini_lb.app import build_app
from radixpd.mini_lb.parts import Parts, build_parts
from radixpd.mini_lb.settings import parse
from radixpd.server.connection import Runner

__all__ = ["DEADLINE", "Lb", "Script", "Stub", "Visit", "broken", "dying", "event", "events_of", "stream", "until"]

DEADLINE = 10.0
QUIET = logging.getLogger("stub")  # a stub that breaks on purpose leaves no traces
QUIET.disabled = True
GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions")


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Let the loop turn until the condition holds; its value."""
    try:
        async with asyncio.timeout(DEADLINE):
            while not (value := condition()):
                await asyncio.sleep(0.002)
            return value
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE} s: {what}") from None


def event(body: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def events_of(data: bytes) -> list[Any]:
    """Events parsed; [DONE] as a string."""
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [part.decode() if part == b"[DONE]" else json.loads(part) for part in parts]


@dataclass
class Visit:
    """One request at a stub. `end`: answered, gone (the other side closed), or broken (the stub broke it)."""

    path: str
    method: str
    headers: Any
    raw: bytes
    end: str = ""

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


Script = Callable[[web.Request, Visit], Awaitable[web.StreamResponse]]


async def stream(request: web.Request, *parts: bytes | asyncio.Event) -> web.StreamResponse:
    """Send parts as they are; wait where there is an event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        if isinstance(part, asyncio.Event):
            await part.wait()
        else:
            await response.write(part)
    await response.write_eof()
    return response


@dataclass
class Stub:
    """One worker. `script` answers what generates."""

    name: str
    script: Script | None = None
    healthy: bool = True
    load: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)  # what /server_info says, if anything
    statuses: dict[str, int] = field(default_factory=dict)  # by path, where it is not 200 and no script answers
    visits: list[Visit] = field(default_factory=list)  # but for looks at health and load
    looks: list[Visit] = field(default_factory=list)
    url: str = ""
    port: int = 0
    _runner: web.AppRunner | None = None

    async def start(self) -> Stub:
        """Listen; after `stop` on the same port again."""
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0, logger=QUIET)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self) -> None:
        """As if the process died: the port closes and every connection with it."""
        if self._runner is None or self._runner.server is None:
            return
        for site in list(self._runner.sites):
            await site.stop()
        # Connections that were taken a moment ago become known in the next turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        visit = Visit(request.path_qs, request.method, request.headers.copy(), b"")
        if request.path in ("/health", "/get_load"):
            self.looks.append(visit)
            if request.path == "/health":
                return web.Response(status=200 if self.healthy else 503)
            return web.json_response(self.load)
        if request.path == "/server_info" and self.info:
            self.looks.append(visit)
            return web.json_response(self.info)
        visit.raw = await request.read()
        self.visits.append(visit)
        try:
            if request.path in GENERATING and self.script is not None:
                response = await self.script(request, visit)
            else:
                status = self.statuses.get(request.path, 200)
                response = web.json_response({"text": self.name, "meta_info": {"completion_tokens": 1}}, status=status)
            visit.end = visit.end or "answered"
            return response
        except (asyncio.CancelledError, ConnectionError):
            visit.end = visit.end or "gone"
            raise


def broken(request: web.Request, visit: Visit) -> web.StreamResponse:
    """Cut the connection: the worker has died."""
    visit.end = "broken"
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError


def dying(die: asyncio.Event, *parts: bytes) -> Script:
    """A script that begins a stream and dies once told to: not before its client has what was sent, as a reset may overtake it."""

    async def script(request: web.Request, visit: Visit) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        await die.wait()
        return broken(request, visit)

    return script


class Lb:
    """The load balancer under test."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.app = build_app(parts)
        self._runner = Runner(self.app, max_header_size=parts.settings.door.max_header_size, shutdown_timeout=0)
        self.url = ""
        self.http: aiohttp.ClientSession

    @classmethod
    async def start(cls, *flags: str) -> Lb:
        """With these flags; looks at workers often, and workers take turns."""
        quick = ("--health-check-interval-secs", "0.05", "--retry-initial-backoff-ms", "1", "--policy", "round_robin")
        lb = cls(build_parts(parse([*quick, *flags])))
        await lb._runner.setup()
        await web.TCPSite(lb._runner, "127.0.0.1", 0).start()
        lb.url = f"http://127.0.0.1:{lb._runner.addresses[0][1]}"
        lb.http = aiohttp.ClientSession(lb.url, timeout=aiohttp.ClientTimeout(total=DEADLINE))
        return lb

    async def close(self) -> None:
        await self.http.close()
        await self._runner.cleanup()
        await self.parts.close()

    async def up(self, count: int) -> None:
        """So many workers get requests."""
        await until(lambda: sum(worker.state(0.0) == "up" for worker in self.parts.fleet) == count, f"{count} workers are up")

    def idle(self) -> bool:
        """No lease, no place and no account is held."""
        return not self.parts.gate.open and not any(worker.open for worker in self.parts.fleet)

    async def post(self, path: str = "/generate", body: Any = None, *, status: int = 200, **options: Any) -> Any:
        """A JSON answer."""
        async with self.http.post(path, json={"text": "abc"} if body is None else body, **options) as response:
            text = await response.text()
            assert response.status == status, text
            return json.loads(text)

    async def events(self, path: str = "/generate", body: Any = None, **options: Any) -> list[Any]:
        """All events of a stream."""
        async with self.http.post(path, json={"text": "abc", "stream": True} if body is None else body, **options) as response:
            data = await response.read()
            assert response.status == 200, data
            return events_of(data)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        async with self.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [line for line in lines if line.startswith(f"radixpd_lb_{name}") and all(each in line for each in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)
