"""A request that two workers share: the same body to a prefill and a decode server, joined by rooms; decode's answer is the client's.

Whoever fails first before decode has begun to answer ends the request for both, once; after that decode alone decides, since it can
compute what prefill did not send. A server that changes its role meanwhile has failed: it drains before, so what it has came after, and
two halves of one kind would wait for each other. Invariant: on every way out, the client's hang-up too, both legs are over: their
connections are closed, which tells the servers, and their leases are given back. Called by the proxy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from yarl import URL

from radixpd.mini_lb.ask import Ask, Contact, with_rooms
from radixpd.mini_lb.legs import Answer, Legs
from radixpd.mini_lb.upstream import LegFailed, Outgoing

__all__ = ["pair"]

GRACE = 0.5  # seconds for the prefill server's answer to arrive behind decode's last byte

logger = logging.getLogger(__name__)


@asynccontextmanager
async def pair(
    legs: Legs, *, prefill: str, decode: str, outgoing: Outgoing, ask: Ask, prefilled: Callable[[], None]
) -> AsyncIterator[Answer]:
    """Decode's answer, once decode has begun; `LegFailed` names the worker whose leg failed before that. `prefilled` is called when the
    prefill leg is over."""
    with legs.fleet.lease(prefill) as first, legs.fleet.lease(decode) as second:
        spec = first.worker.spec
        body = with_rooms(ask, Contact(URL(spec.url).host or "", spec.bootstrap_port))
        handoff = asyncio.create_task(legs.whole(first, outgoing, body))
        handoff.add_done_callback(lambda _: prefilled())
        head = asyncio.create_task(legs.head(second, outgoing, body))
        turned = [(lease.worker, lease.worker.turned) for lease in (first, second)]
        awaited: list[asyncio.Future[Any]] = [handoff, head, *(each for _, each in turned)]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not head.done():
                for worker, each in turned:
                    if each.done():
                        raise LegFailed(worker.name, "has changed its role")
                handoff.result()
            yield await head
            await asyncio.wait((handoff,), timeout=GRACE)
        finally:
            await _end(handoff, head)


async def _end(handoff: asyncio.Task[None], head: asyncio.Task[Answer]) -> None:
    """Neither leg goes on."""
    handoff.cancel()
    head.cancel()
    begun = head.done() and not head.cancelled() and head.exception() is None
    if begun:
        head.result().response.close()
    # What a leg failed of is known to the caller, or no longer matters; a cancelled request closes its connection.
    failed, _ = await asyncio.gather(handoff, head, return_exceptions=True)
    if begun and isinstance(failed, LegFailed) and head.result().response.status == 200:
        logger.warning("the prefill leg failed after decode had begun: %s", failed)
