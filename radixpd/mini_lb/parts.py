"""The parts of one load balancer, wired, in one object that the application carries.

Built once by `__main__` or by a test, inside the loop that serves; it has no state of its own.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from aiohttp import web

from radixpd.mini_lb.dispatch import Dispatcher
from radixpd.mini_lb.fleet import Fleet
from radixpd.mini_lb.gate import Gate
from radixpd.mini_lb.metrics import Metrics
from radixpd.mini_lb.proxy import Proxy
from radixpd.mini_lb.settings import LbSettings, workers
from radixpd.mini_lb.upstream import Upstream

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

    async def close(self) -> None:
        """Stop looking at workers, close connections to them."""
        await self.fleet.close()
        await self.upstream.close()


PARTS: web.AppKey[Parts] = web.AppKey("parts", Parts)


def parts_of(request: web.Request) -> Parts:
    """The load balancer that this request came to."""
    return request.app[PARTS]


def build_parts(settings: LbSettings) -> Parts:
    """A load balancer that begins to look at its workers."""
    fleet_settings, door = settings.fleet, settings.door
    upstream = Upstream(settings)
    dispatcher = Dispatcher(
        fleet_settings.policy,
        prefill_policy=fleet_settings.prefill_policy,
        decode_policy=fleet_settings.decode_policy,
        seed=secrets.randbits(62),
    )
    fleet = Fleet(fleet_settings, workers(fleet_settings), upstream, dispatcher)
    gate = Gate(most=door.max_concurrent_requests, queue=door.queue_size, seconds=door.queue_timeout_secs)
    metrics = Metrics(fleet, gate)
    proxy = Proxy(settings, fleet=fleet, upstream=upstream, dispatcher=dispatcher, gate=gate, metrics=metrics)
    fleet.start()
    return Parts(settings, fleet, upstream, gate, metrics, proxy)
