"""`python -m radixpd.mini_lb --worker-urls URL...`: arguments -> settings -> serve (or, with `--simulate`, replay a trace).

Exit code 0 after a clean drain, 2 when the settings or the address do not fit (one line on standard error). SIGTERM and SIGINT drain: new
requests get 503, open ones the drain timeout; a second signal ends them. SIGHUP reads the workers file and opens the request log anew.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import sys
import time
from collections.abc import Sequence

import uvloop
from aiohttp import web

from radixpd.errors import ConfigError
from radixpd.mini_lb import simulate
from radixpd.mini_lb.app import build_app
from radixpd.mini_lb.parts import Parts, build_parts
from radixpd.mini_lb.settings import DoorSettings, LbSettings, parse
from radixpd.runtime.logs import log_to_stderr
from radixpd.server.connection import Runner

__all__ = ["main", "serve"]

BACKLOG = 1024
REPEAT = 2.0  # one stop may arrive as several signals: so long they are the same one
LAST_WRITES = 1.5  # seconds for the last answers to leave

logger = logging.getLogger(__name__)


class _Stop:
    """Signals: the first drains, one that comes later ends the drain."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        self._first = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        now = time.monotonic()
        if not self.asked.is_set():
            self._first = now
            self.asked.set()
        elif now - self._first >= REPEAT:
            self.forced.set()


async def serve(settings: LbSettings) -> int:
    """Run until told to stop; the exit code."""
    stop = _Stop()
    parts = build_parts(settings)
    if settings.observe.request_log or settings.fleet.workers_file:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, parts.hang_up)
    runner = Runner(build_app(parts), max_header_size=settings.door.max_header_size, shutdown_timeout=LAST_WRITES)
    try:
        await runner.setup()
        port = await _listen(runner, settings.door)
        logger.info("the load balancer listens on http://%s:%d", settings.door.host, port)
        await stop.asked.wait()
        await _drain(parts, stop.forced)
    finally:
        await runner.cleanup()
        await parts.close()
    return 0


async def _listen(runner: Runner, door: DoorSettings) -> int:
    """Bind; the port, which the kernel chooses for 0."""
    try:
        await web.TCPSite(runner, door.host, door.port, backlog=BACKLOG, reuse_address=True).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {door.port} on {door.host} is in use: stop what listens there or choose another with --port") from None
        raise ConfigError(f"cannot listen on port {door.port} of {door.host} (--port, --host): {error.strerror or error}") from None
    return int(runner.addresses[0][1])


async def _drain(parts: Parts, forced: asyncio.Event) -> None:
    """Finish what is open within the drain timeout, end the rest with an error."""
    gate, seconds = parts.gate, parts.settings.door.drain_timeout
    gate.close()
    logger.info("draining: %d requests are open, %g s to finish", gate.open + gate.waiting, seconds)
    tasks = [asyncio.create_task(gate.idle()), asyncio.create_task(forced.wait())]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    if gate.open:
        logger.warning("ending %d requests that did not finish in time", gate.open + gate.waiting)
        parts.proxy.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop, or simulate; the exit code."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        if simulate.wanted(argv):
            return simulate.main(argv)
        settings = parse(argv)
        log_to_stderr("mini_lb", settings.observe.log_level, settings.observe.log_format)
        return uvloop.run(serve(settings))
    except ConfigError as error:
        print(f"radixpd: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
