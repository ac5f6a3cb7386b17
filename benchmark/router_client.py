"""The client of `bench_router`: so many at once, each sends its talk's next prompt when the answer to the one before is there.

Chat requests, plain or streamed. A request that fails is counted with its reason, and its talk goes on. Called by `bench_router` and tests.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from benchmark.router_plans import Plan

__all__ = ["Drive", "drive"]

TIMEOUT = aiohttp.ClientTimeout(total=60)
HEADERS = {"Content-Type": "application/json"}
DONE = b"data: [DONE]"


@dataclass(slots=True)
class Drive:
    """What came of it, in seconds. `firsts`: to the first event of streams; `failures`: by reason."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Whole answers per second."""
        return len(self.latencies) / self.seconds


async def drive(url: str, plan: Plan, *, clients: int, stream: bool = False, tokens: int = 8) -> Drive:
    """Send all of a plan."""
    found, talks = Drive(), iter(plan.talks)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT) as session:
        began = time.perf_counter()
        await asyncio.gather(*(_client(session, talks, stream, tokens, found) for _ in range(clients)))
        found.seconds = time.perf_counter() - began
    return found


async def _client(session: aiohttp.ClientSession, talks: Iterator[Sequence[str]], stream: bool, tokens: int, found: Drive) -> None:
    for talk in talks:
        for prompt in talk:
            messages = [{"role": "user", "content": prompt}]
            body = msgspec.json.encode({"model": "stub", "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream})
            try:
                await _one(session, body, stream, found)
            except (aiohttp.ClientError, TimeoutError) as error:
                found.failures[type(error).__name__] += 1


async def _one(session: aiohttp.ClientSession, body: bytes, stream: bool, found: Drive) -> None:
    began = time.perf_counter()
    first, last = 0.0, b""
    async with session.post("/v1/chat/completions", data=body, headers=HEADERS) as response:
        if response.status != 200:
            found.failures[f"status {response.status}"] += 1
            return
        if not stream:
            await response.read()
        else:
            async for line in response.content:
                if line.startswith(b"data:"):
                    first, last = first or time.perf_counter() - began, line
    if stream and not last.startswith(DONE):
        found.failures["a stream without an end"] += 1
        return
    found.latencies.append(time.perf_counter() - began)
    if stream:
        found.firsts.append(first)
