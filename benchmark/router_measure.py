"""The three measurements of `bench_router`, each router on the same work in the same run.

*cache*: hit rates and balance, a fresh router and empty caches for each seed and workload. *latency*: what a router adds to stubs
that take no time, all routers up at once and asked in turns, beside the worker itself. *pairs*: requests per second of prefill/decode
routing. Called by `bench_router`, which prints.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmark.router_client import Drive, drive
from benchmark.router_fleet import Peers, Router, start_fleet, start_router
from benchmark.router_plans import Plan, ideal_hits, make, pooled_hits
from radixpd.errors import EngineFailed

__all__ = ["CacheRow", "LatencyRow", "PairsRow", "cache_rows", "latency_rows", "pairs_rows"]

INSTANT = ("--prefill-us-per-char", "0", "--itl-ms", "0", "--cache-chars", "1000000")
DIRECT = "direct"
SSE_ONE, PLAIN_ONE, SSE_MANY, PLAIN_MANY = 60, 200, 300, 600  # requests of one turn, of one client and of many


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One router, workload and seed. `of_ideal`, `of_pooled`: hits as a share of those caches'; `work`, `requests`: busiest over mean."""

    router: str
    workload: str
    seed: int
    hit_rate: float
    of_ideal: float
    of_pooled: float
    work: float
    requests: float
    rate: float
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One router. Milliseconds added at one client; requests per second of many."""

    router: str
    plain_p50: float
    plain_p99: float
    sse_p50: float
    sse_p99: float
    plain_rate: float
    sse_rate: float


@dataclass(frozen=True, slots=True)
class PairsRow:
    """One router: median requests per second, and p50 and p99 in milliseconds."""

    router: str
    rate: float
    p50: float
    p99: float


def cache_rows(
    routers: Sequence[Router], peers: Peers, folder: Path, *, workloads: Sequence[str], seeds: Sequence[int], requests: int, workers: int,
    chars: int, clients: int, stream: bool, speed: Sequence[str],
) -> Iterator[CacheRow]:  # fmt: skip
    """Rows as they are measured; routers take turns within a seed. `speed`: flags of the stubs."""
    with start_fleet(workers, folder, flags=("--cache-chars", str(chars), *speed)) as fleet:
        for seed in seeds:
            plans = [make(name, seed, requests) for name in workloads]
            bounds = [(plan.chars, ideal_hits(plan), pooled_hits(plan, workers * chars, clients)) for plan in plans]
            for router in routers:
                for plan, bound in zip(plans, bounds):
                    with start_router(router, fleet, peers) as url:
                        fleet.flush()
                        found = run(drive(url, plan, clients=clients, stream=stream))
                        yield _cache_row(router, plan, seed, bound, fleet.stats(), found)


def _cache_row(router: Router, plan: Plan, seed: int, bound: tuple[int, int, int], stats: list[dict[str, float]], found: Drive) -> CacheRow:
    chars, ideal, pooled = bound
    hits = sum(each["cached_chars"] for each in stats)
    if (asked := sum(each["prompt_chars"] for each in stats)) != chars and not found.failures:
        raise EngineFailed(f"{router.name}, {plan.name}: workers saw {asked:.0f} characters of prompts, the plan has {chars}")
    work, requests = [each["work_s"] for each in stats], [each["requests"] for each in stats]
    return CacheRow(
        router.name, plan.name, seed, hits / chars, hits / ideal, hits / pooled, _busiest(work),
        _busiest(requests), found.rate, dict(found.failures),
    )  # fmt: skip


def _busiest(loads: list[float]) -> float:
    """Over the mean."""
    return max(loads) / (statistics.fmean(loads) or 1.0)


def latency_rows(routers: Sequence[Router], peers: Peers, folder: Path, *, turns: int, clients: int) -> list[LatencyRow]:
    """All routers, and first the worker itself."""
    with start_fleet(2, folder, flags=INSTANT) as fleet, ExitStack() as stack:
        urls = {DIRECT: fleet.urls[0]}
        urls |= {router.name: stack.enter_context(start_router(router, fleet, peers)) for router in routers}
        found = {name: _Turns() for name in urls}
        for turn in range(turns + 1):
            for name, url in urls.items():
                measured = run(_turn(url, turn, clients))
                if turn:  # the first one warms up
                    found[name].add(*measured)
    direct = found[DIRECT]
    return [
        LatencyRow(
            name, *_added(each.plain, direct.plain, latencies), *_added(each.sse, direct.sse, firsts),
            statistics.median(drove.rate for drove in each.plain_many), statistics.median(drove.rate for drove in each.sse_many),
        )
        for name, each in found.items()
    ]  # fmt: skip


class _Turns:
    """What one target gave in each turn."""

    def __init__(self) -> None:
        self.plain: list[Drive] = []
        self.sse: list[Drive] = []
        self.plain_many: list[Drive] = []
        self.sse_many: list[Drive] = []

    def add(self, *drives: Drive) -> None:
        for kept, found in zip((self.plain, self.sse, self.plain_many, self.sse_many), drives, strict=True):
            kept.append(found)


async def _turn(url: str, turn: int, clients: int) -> list[Drive]:
    """Prefixes repeat within a turn, the ends of prompts are new."""
    sizes = ((PLAIN_ONE, 1, False), (SSE_ONE, 1, True), (PLAIN_MANY, clients, False), (SSE_MANY, clients, True))
    found = []
    for kind, (requests, many, stream) in enumerate(sizes):
        drove = await drive(url, make("repeated", 10 * turn + kind, requests), clients=many, stream=stream)
        if drove.failures:
            raise EngineFailed(f"{url}: requests failed: {dict(drove.failures)}")
        found.append(drove)
    return found


def latencies(drove: Drive) -> list[float]:
    return drove.latencies


def firsts(drove: Drive) -> list[float]:
    return drove.firsts


def _added(own: list[Drive], direct: list[Drive], times: Any) -> tuple[float, float]:
    """Milliseconds over the worker itself: median over turns of the difference of medians, and the difference of the 99th percentiles."""
    median = statistics.median(statistics.median(times(mine)) - statistics.median(times(theirs)) for mine, theirs in zip(own, direct))
    tail = _p99([time for each in own for time in times(each)]) - _p99([time for each in direct for time in times(each)])
    return 1e3 * median, 1e3 * tail


def pairs_rows(routers: Sequence[Router], peers: Peers, folder: Path, *, turns: int, clients: int) -> list[PairsRow]:
    """One prefill and one decode stub; the routers are asked in turns."""
    with start_fleet(2, folder, flags=INSTANT) as fleet, ExitStack() as stack:
        urls = {router.name: stack.enter_context(start_router(router, fleet, peers, pairs=True)) for router in routers}
        found: dict[str, list[Drive]] = {name: [] for name in urls}
        for turn in range(turns + 1):
            for name, url in urls.items():
                drove = run(drive(url, make("repeated", turn, PLAIN_MANY), clients=clients))
                if drove.failures:
                    raise EngineFailed(f"{name}: requests failed: {dict(drove.failures)}")
                if turn:
                    found[name].append(drove)
    return [_pairs_row(name, drives) for name, drives in found.items()]


def _pairs_row(name: str, drives: list[Drive]) -> PairsRow:
    times = [each for drove in drives for each in drove.latencies]
    return PairsRow(name, statistics.median(drove.rate for drove in drives), 1e3 * statistics.median(times), 1e3 * _p99(times))


def _p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """In a loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
