"""The parts of one load balancer, wired, in one object that the application carries.

Built once by `__main__` or by a test, inside the loop that serves; it has no state of its own.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from aiohttp import web

from radixpd.mini_lb.decisions import Decisions
from radixpd.mini_lb.dispatch import Dispatcher
from radixpd.mini_lb.fleet import Fleet
from radixpd.mini_lb.gate import Gate
from radixpd.mini_lb.metrics import Metrics
from radixpd.mini_lb.prompts import Prompts
from radixpd.mini_lb.proxy import Proxy
from radixpd.mini_lb.request_log import RequestLog
from radixpd.mini_lb.settings import LbSettings, workers
from radixpd.mini_lb.upstream import Upstream
from radixpd.mini_lb.workers_file import WorkersFile

__all__ = ["PARTS", "Parts", "build_parts", "parts_of"]


@dataclass(frozen=True, slots=True)
class Parts:
    """See the module."""

    settings: LbSettings
    fleet: Fleet
    upstream: Upstream
    gate: Gate
    metrics: Metrics
    proxy: Proxy
    decisions: Decisions
    request_log: RequestLog
    workers_file: WorkersFile | None

    async def close(self) -> None:
        """Stop looking at workers, close connections to them, write the last lines of the log."""
        if self.workers_file is not None:
            await self.workers_file.close()
        await self.fleet.close()
        await self.upstream.close()
        await asyncio.to_thread(self.request_log.close)

    def hang_up(self) -> None:
        """SIGHUP: files are read, or opened, again."""
        self.request_log.reopen()
        if self.workers_file is not None:
            self.workers_file.reread()


PARTS: web.AppKey[Parts] = web.AppKey("parts", Parts)


def parts_of(request: web.Request) -> Parts:
    """The load balancer that this request came to."""
    return request.app[PARTS]


def build_parts(settings: LbSettings) -> Parts:
    """A load balancer that begins to look at its workers."""
    fleet_settings, door = settings.fleet, settings.door
    path, seconds = fleet_settings.workers_file, fleet_settings.health_check_interval_secs
    workers_file = None if path is None else WorkersFile(path, workers(fleet_settings), seconds=seconds)
    request_log = RequestLog(settings.observe.request_log)
    upstream = Upstream(settings)
    dispatcher = Dispatcher(
        fleet_settings.policy,
        prefill_policy=fleet_settings.prefill_policy,
        decode_policy=fleet_settings.decode_policy,
        cap_bytes=fleet_settings.index_memory_mb * 2**20,
        seed=secrets.randbits(62),
    )
    prompts = Prompts(fleet_settings.tokenizer_path)
    fleet = Fleet(fleet_settings, workers(fleet_settings), upstream=upstream, dispatcher=dispatcher, prompts=prompts)
    gate = Gate(most=door.max_concurrent_requests, queue=door.queue_size, seconds=door.queue_timeout_secs)
    metrics = Metrics(fleet, gate, request_log)
    decisions = Decisions()
    proxy = Proxy(
        settings,
        fleet=fleet,
        upstream=upstream,
        dispatcher=dispatcher,
        gate=gate,
        metrics=metrics,
        decisions=decisions,
        prompts=prompts,
    )
    fleet.start()
    if workers_file is not None:
        workers_file.start(fleet)
    return Parts(settings, fleet, upstream, gate, metrics, proxy, decisions, request_log, workers_file)
