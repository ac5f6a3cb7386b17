"""One request to one worker: its lease, its head, its verdict.

A leg's lease begins with the choice and ends with the answer, or with whatever stops it. Invariant: only a connection that fails or one of
`FAULTS` speaks against a worker; a 4xx is the client's, a 503 says that the worker is busy and still lives. Called by the proxy and `pd`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from radixpd.mini_lb.fleet import Fleet, Lease
from radixpd.mini_lb.upstream import LegFailed, Outgoing, Reply, Upstream, response_headers

__all__ = ["Answer", "Legs", "verdict"]

FAULTS = frozenset((500, 502, 504))


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of a worker's answer; the body is still to be read."""

    response: aiohttp.ClientResponse
    lease: Lease

    @property
    def worker(self) -> str:
        """Its name."""
        return self.lease.worker.name


class Legs:
    """Opens legs. `covers`: whether an answer with this status is worth a try elsewhere."""

    def __init__(self, fleet: Fleet, upstream: Upstream, covers: Callable[[int], bool]) -> None:
        self.fleet = fleet
        self._upstream = upstream
        self._covers = covers

    @asynccontextmanager
    async def alone(self, worker: str, outgoing: Outgoing, body: bytes | None) -> AsyncIterator[Answer]:
        """A request that one worker answers whole."""
        with self.fleet.lease(worker) as lease:
            answer = await self.head(lease, outgoing, body)
            try:
                yield answer
            finally:
                answer.response.close()

    async def head(self, lease: Lease, outgoing: Outgoing, body: bytes | None) -> Answer:
        """The head of an answer, unless it is one to be tried elsewhere."""
        answer = Answer(await self._open(lease, outgoing, body), lease)
        if self._covers(answer.response.status):
            raise await self._refused(answer)
        return answer

    async def whole(self, lease: Lease, outgoing: Outgoing, body: bytes | None) -> None:
        """A leg whose answer nobody reads: over when it has been answered well, else `LegFailed`."""
        answer = Answer(await self._open(lease, outgoing, body), lease)
        if answer.response.status >= 400:
            raise await self._refused(answer)
        await self.read(answer)

    async def read(self, answer: Answer) -> bytes:
        """The rest of an answer; the leg has its verdict then."""
        lease = answer.lease
        try:
            body = await self._upstream.read(answer.worker, answer.response)
        except LegFailed:
            lease.ok = False
            raise
        finally:
            answer.response.close()
        lease.ok = verdict(answer.response.status)
        return body

    async def _open(self, lease: Lease, outgoing: Outgoing, body: bytes | None) -> aiohttp.ClientResponse:
        try:
            response = await self._upstream.open(lease.worker.name, outgoing, body)
        except LegFailed:
            lease.ok = False
            raise
        if verdict(response.status):
            lease.answered()
        return response

    async def _refused(self, answer: Answer) -> LegFailed:
        """What to raise for an answer that is an error."""
        response = answer.response
        status = response.status
        reply = Reply(status, response_headers(response.headers), await self.read(answer))
        return LegFailed(answer.worker, f"answered {status}", reply=reply, retryable=self._covers(status))


def verdict(status: int) -> bool | None:
    """What a status says about the worker."""
    return False if status in FAULTS else None if status == 503 else True
