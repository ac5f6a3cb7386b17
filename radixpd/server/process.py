"""The API process: HTTP in front, the scheduler's link behind, one asyncio loop (uvloop) between.

Started by the supervisor as `python -m radixpd.server.process`. It serves `/health` (503) while the engine loads, opens after a warm-up
generation that does not go through HTTP, and ends in one of three ways: SIGTERM (finish what runs, or abort it after the drain timeout,
then exit 0), the engine's failure (every open request ends with an error, then exit 1), end of file on the control pipe (exit 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import time
from enum import Enum
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from radixpd import __version__
from radixpd.config.resolve import Resolved, from_json, public_view
from radixpd.errors import EngineFailed
from radixpd.runtime import child
from radixpd.runtime.client import Client
from radixpd.runtime.crash_dump import Recorder
from radixpd.runtime.defaults import defaults_of, limits_of
from radixpd.runtime.metrics import Metrics, View
from radixpd.runtime.request_log import RequestLog
from radixpd.runtime.tokenizer_manager import TokenizerManager
from radixpd.runtime.watchdog import BEAT, Pulse
from radixpd.server.app import build_app
from radixpd.server.connection import Runner
from radixpd.server.info_api import probe
from radixpd.server.service import Service
from radixpd.text.chat import load_chat_template
from radixpd.text.identity import text_identity
from radixpd.text.tokenizer import load_tokenizer

__all__ = ["build_service", "main", "open_service", "serve"]

WARM_UP_TOKENS = 8
LAST_RESORT = 5.0  # seconds by which this process is more patient than the supervisor's watchdog, which also shows stacks
LAST_WRITES = 1.5  # seconds for the last answers to leave
BACKLOG = 1024  # connections that wait to be taken; the kernel may allow fewer
DESCRIPTORS = 65536  # that connections may use, if the machine allows
ABORT_SECONDS = 5.0  # for the brain to end what the drain timeout cut off

logger = logging.getLogger(__name__)


class _End(Enum):
    DRAIN = "drain"
    FAILED = "failed"
    ORPHAN = "orphan"


class _Control:
    """The control pipe: whole lines become failures of the client, end of file ends the process."""

    def __init__(self, client: Client, end: asyncio.Future[_End]) -> None:
        self._client = client
        self._end = end
        self._rest = b""

    def on_readable(self) -> None:
        data = os.read(child.CONTROL_FD, 65536)
        if not data:
            asyncio.get_running_loop().remove_reader(child.CONTROL_FD)
            _settle(self._end, _End.ORPHAN)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._client.fail(str(msgspec.json.decode(line, type=dict[str, str]).get("failed", "the engine failed")))


def build_service(resolved: Resolved, client: Client, *, recorder: Recorder | None = None) -> Service:
    """The parts of an API process, wired."""
    observe = resolved.settings.observe
    metrics = Metrics(
        lambda: View(client.load, client.throughput(), metrics.startup_seconds, client.weights_seconds),
        model=resolved.served_name,
        lengths=observe.collect_tokens_histogram,
    )
    directory = Path(resolved.tokenizer_directory)
    manager = TokenizerManager(
        client,
        load_tokenizer(directory, model_directory=resolved.directory),
        load_chat_template(directory, override=resolved.settings.model.chat_template),
        limits_of(resolved),
        metrics,
        seed=resolved.seed,
        defaults=defaults_of(resolved),
        max_queued=resolved.settings.scheduler.max_queued_requests,
        request_log=RequestLog(observe),
        on_end=(recorder.ended,) if recorder else (),
    )
    identity = text_identity(directory, chat_template=resolved.settings.model.chat_template)
    return Service(resolved, client, manager, metrics, identity)


async def open_service(service: Service, *, began: float | None = None, patience: float = 0.0) -> None:
    """Wait for the engine, warm it up, take requests. `began`: when the command did; `patience`: seconds on top of the watchdog's."""
    manager = service.manager
    # No deadline: weights may take long, and a child that dies before it is ready ends the group.
    await service.client.ready.wait()
    seconds = service.resolved.settings.server.watchdog_timeout + patience
    async with await manager.submit([probe(manager, tokens=min(WARM_UP_TOKENS, manager.limits.longest - 1))], internal=True) as generation:
        try:
            await asyncio.wait_for(generation.finished(aborts=True), seconds)
        except TimeoutError:
            raise EngineFailed(f"it did not finish within {seconds:g} s (--watchdog-timeout)") from None
    manager.warm = True
    if began is not None:
        service.metrics.startup_seconds = time.monotonic() - began
    logger.info("The server is fired up and ready to roll!")


async def serve(launch: child.Launch, listener: socket.socket) -> int:
    """Run until told to stop; returns the exit code."""
    resolved = from_json(launch.resolved)
    loop = asyncio.get_running_loop()
    end: asyncio.Future[_End] = loop.create_future()
    client = Client(launch.directory, watchdog=resolved.settings.server.watchdog_timeout + LAST_RESORT)
    loop.add_reader(child.CONTROL_FD, _Control(client, end).on_readable)
    recorder = _recorder(resolved)
    service = build_service(resolved, client, recorder=recorder)
    limit = resolved.settings.server.max_header_size
    runner = Runner(build_app(service), max_header_size=limit, shutdown_timeout=LAST_WRITES)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    loop.add_signal_handler(signal.SIGTERM, _settle, end, _End.DRAIN)
    tasks = [
        loop.create_task(open_service(service, began=launch.began, patience=LAST_RESORT)),
        loop.create_task(_failure(client, end)),
        loop.create_task(_beat(Pulse(launch.watch_fd))),
    ]
    tasks[0].add_done_callback(lambda task: _opened(task, client))
    try:
        how = await end
        if how is _End.DRAIN:
            await _drain(service, end)
            return child.EXIT_FAILED if client.failed.is_set() else 0
        return child.EXIT_FAILED
    finally:
        dump = asyncio.create_task(asyncio.to_thread(recorder.dump, client.failure)) if recorder and client.failed.is_set() else None
        for task in tasks:
            task.cancel()
        # Lets handlers that still write their last answer finish.
        await runner.cleanup()
        if dump is not None:
            await dump
        client.close()


async def _drain(service: Service, end: asyncio.Future[_End]) -> None:
    """Finish what runs within the drain timeout, abort the rest, let the scheduler go."""
    client, manager = service.client, service.manager
    manager.draining = True
    timeout = service.resolved.settings.server.drain_timeout
    logger.info("draining: %d requests are open, %g s to finish", len(client.outputs), timeout)
    try:
        await asyncio.wait_for(client.idle(), timeout)
    except TimeoutError:
        logger.warning("aborting %d requests that did not finish in time", len(client.outputs))
        manager.abort_all(message="the server is shutting down", status=503)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.idle(), ABORT_SECONDS)
    client.shutdown()


async def _beat(pulse: Pulse) -> None:
    """Show the supervisor that this loop turns."""
    while True:
        pulse.beat()
        await asyncio.sleep(BEAT)


def _recorder(resolved: Resolved) -> Recorder | None:
    folder = resolved.settings.observe.crash_dump_folder
    return Recorder(folder, {"version": __version__, "settings": public_view(resolved)}) if folder else None


async def _failure(client: Client, end: asyncio.Future[_End]) -> None:
    await client.failed.wait()
    _settle(end, _End.FAILED)


def _opened(task: asyncio.Task[None], client: Client) -> None:
    """A warm-up that failed is a failure of the engine."""
    if not task.cancelled() and (error := task.exception()) is not None:
        if not isinstance(error, EngineFailed):
            logger.error("the warm-up failed", exc_info=error)
        client.fail(f"the warm-up failed: {error}")


def _settle(end: asyncio.Future[_End], how: _End) -> None:
    if not end.done():
        end.set_result(how)


def _raise_descriptor_limit() -> None:
    """Idle connections cost a descriptor each, and the usual soft limit of 1024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main() -> None:
    """The process's main."""

    def body(launch: child.Launch) -> int:
        _raise_descriptor_limit()
        with socket.socket(fileno=launch.listen_fd) as listener:
            return uvloop.run(serve(launch, listener))

    child.run("api", body, keep_sigterm=True)


if __name__ == "__main__":
    main()
