"""The load balancer and other routers on the same work: `python -m benchmark.bench_router [--peers PYTHON] [--part latency]`.

*cache*: stub workers with an LRU cache each; for every policy the hits as a share of those of one cache without an end (`ideal`) and of one
LRU cache as large as all together (`pooled`), and the busiest worker over the mean, by simulated work and by requests: medians over seeds.
*latency*: what a router adds, plain answers and time to first token of streams, at one client; requests per second of many.
*pairs*: requests per second with one prefill and one decode worker. `--peers` names a Python that has sglang-router and vllm-router.
Exit code 0, also where a target is missed; 1 when a measurement failed, 2 when it could not start.
"""

from __future__ import annotations

import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmark.flags import add_flags, flag, new_parser, read_flags
from benchmark.router_fleet import FAMILIES, Peers, Router
from benchmark.router_measure import CacheRow, LatencyRow, PairsRow, cache_rows, latency_rows, pairs_rows
from benchmark.router_plans import PLANS
from benchmark.router_stub import write_tokenizer
from radixpd.errors import ConfigError, RadixpdError
from radixpd.mini_lb.balance import POLICIES

__all__ = ["Asked", "Median", "main", "medians", "targets"]

OURS, BEST = "radixpd", "radixpd kv_cost"
WORKLOADS = ("prefixes", "turns", "zipf", "exceeding")
# Of kv_cost: least share of the ideal cache's hits, of the pooled cache's, most imbalance of work.
TARGETS: dict[str, tuple[float, float, float]] = {
    "prefixes": (0.995, 0.0, 1.15),
    "turns": (0.995, 0.0, 1.10),
    "zipf": (0.95, 0.0, 1.25),
    "exceeding": (0.0, 0.98, 0.0),
}
OVER_PEERS = ("zipf", "exceeding")  # where sglang-router must not be better
PLAIN_MS, SSE_MS, TURNS_MS = 1.5, 2.5, 0.7


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure."""

    part: str = flag("all", "which measurement", choices=("cache", "latency", "pairs", "all"))
    workloads: tuple[str, ...] = flag(WORKLOADS, "of the cache part", many=True, choices=tuple(PLANS))
    policies: tuple[str, ...] = flag(tuple(POLICIES), "of our own, in the cache part", many=True, choices=tuple(POLICIES))
    peers: str = flag("", "a Python that has sglang-router and vllm-router; without it they are left out", metavar="PYTHON")
    peer_policies: tuple[str, ...] = flag(("cache_aware",), "of theirs, in the cache part", many=True)
    seeds: int = flag(5, "of each workload", low=1, high=1000)
    first_seed: int = flag(0, "of them", low=0, high=10**9)
    requests: int = flag(0, "of each workload; 0 for its own number", low=0, high=10**6)
    workers: int = flag(4, "stub workers of the cache part", low=1, high=64)
    cache_chars: int = flag(100_000, "characters in each worker's cache", low=64, high=10**9)
    prefill_us_per_char: float = flag(10.0, "that a worker of the cache part takes for what is not cached", low=0, high=1e6)
    itl_ms: float = flag(2.5, "that it takes for each of the 8 tokens of an answer", low=0, high=1e5)
    clients: int = flag(16, "at once", low=1, high=1024)
    turns: int = flag(5, "of every router in the latency and pairs parts", low=1, high=100)
    stream: bool = flag(False, "stream the answers of the cache part")
    json: bool = flag(False, "print all rows as one JSON object, too")


@dataclass(frozen=True, slots=True)
class Median:
    """One router on one workload, medians over seeds."""

    router: str
    workload: str
    of_ideal: float
    of_pooled: float
    hit_rate: float
    work: float
    requests: float
    rate: float
    failures: int


def medians(rows: Iterable[CacheRow]) -> list[Median]:
    """In the order of the rows."""
    groups: dict[tuple[str, str], list[CacheRow]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.router), []).append(row)
    names = ("of_ideal", "of_pooled", "hit_rate", "work", "requests", "rate")
    return [
        Median(
            router,
            workload,
            **{name: statistics.median(getattr(row, name) for row in group) for name in names},
            failures=sum(sum(row.failures.values()) for row in group),
        )
        for (workload, router), group in groups.items()
    ]


def targets(found: Sequence[Median]) -> list[str]:
    """One line for each target that these figures can meet or miss."""
    lines = []
    by_name = {(each.workload, each.router): each for each in found}
    for workload, (of_ideal, of_pooled, work) in TARGETS.items():
        if (own := by_name.get((workload, BEST))) is None:
            continue
        wanted = [("of ideal", own.of_ideal, of_ideal), ("of one pooled LRU", own.of_pooled, of_pooled)]
        lines += [_line(f"{workload}: {name} {value:.4f}, at least {least}", value >= least) for name, value, least in wanted if least]
        if work:
            lines.append(_line(f"{workload}: work of the busiest {own.work:.3f} of the mean, at most {work}", own.work <= work))
        other = by_name.get((workload, "sglang-router cache_aware"))
        if other is not None and workload in OVER_PEERS:
            words = f"{workload}: of ideal {own.of_ideal:.4f}, sglang-router {other.of_ideal:.4f}"
            lines.append(_line(words, own.of_ideal >= other.of_ideal))
    return lines


def _line(words: str, met: bool) -> str:
    return f"  {words}: {'met' if met else 'MISSED'}"


def _cache(asked: Asked, peers: Peers, folder: Path) -> list[CacheRow]:
    routers = [Router(OURS, policy) for policy in asked.policies]
    routers += [Router(family, policy) for family in peers.families for policy in asked.peer_policies]
    rows = []
    for row in cache_rows(
        routers, peers, folder, workloads=asked.workloads, seeds=range(asked.first_seed, asked.first_seed + asked.seeds),
        requests=asked.requests, workers=asked.workers, chars=asked.cache_chars, clients=asked.clients, stream=asked.stream,
        speed=("--prefill-us-per-char", str(asked.prefill_us_per_char), "--itl-ms", str(asked.itl_ms)),
    ):  # fmt: skip
        rows.append(row)
        print(f"  seed {row.seed} {row.workload:10} {row.router:26} of ideal {row.of_ideal:.4f}", file=sys.stderr, flush=True)
    found = medians(rows)
    speed = f"{asked.prefill_us_per_char:g} us per character, {asked.itl_ms:g} ms per token"
    print(
        f"\ncache: {asked.workers} workers with {asked.cache_chars} characters each, {speed}; {asked.clients} clients, {asked.seeds} seeds "
        f"from {asked.first_seed}"
    )
    for workload in asked.workloads:
        print(f"  {workload:34} of ideal  of pooled  hit rate  work  requests  req/s  failed")
        for each in (each for each in found if each.workload == workload):
            shares = f"{each.of_ideal:8.4f} {each.of_pooled:10.4f} {each.hit_rate:9.4f} {each.work:5.2f} {each.requests:9.2f}"
            print(f"    {each.router:32} {shares} {each.rate:6.0f} {each.failures:7}")
    print(*targets(found), sep="\n", flush=True)
    return rows


def _latency(asked: Asked, peers: Peers, folder: Path) -> list[LatencyRow]:
    routers = [Router(OURS, policy) for policy in ("kv_cost", "round_robin") if policy in asked.policies]
    routers += [Router(family, policy) for family in peers.families for policy in ("cache_aware", "round_robin")]
    rows = latency_rows(routers, peers, folder, turns=asked.turns, clients=asked.clients)
    print("\nlatency: milliseconds added at one client, and requests per second at " + f"{asked.clients} clients")
    print(f"    {'':32} plain p50    p99   SSE first p50    p99   req/s  SSE req/s")
    for row in rows:
        print(
            f"    {row.router:32} {row.plain_p50:9.2f} {row.plain_p99:6.2f} {row.sse_p50:15.2f} {row.sse_p99:6.2f} {row.plain_rate:7.0f} "
            f"{row.sse_rate:10.0f}"
        )
    for row in rows:
        if row.router == BEST:
            print(_line(f"kv_cost adds {row.plain_p50:.2f} ms, at most {PLAIN_MS}", row.plain_p50 <= PLAIN_MS))
            print(_line(f"kv_cost adds {row.sse_p50:.2f} ms to a first token, at most {SSE_MS}", row.sse_p50 <= SSE_MS))
        elif row.router == "radixpd round_robin":
            print(_line(f"round_robin adds {row.plain_p50:.2f} ms, at most {TURNS_MS}", row.plain_p50 <= TURNS_MS))
    sys.stdout.flush()
    return rows


def _pairs(asked: Asked, peers: Peers, folder: Path) -> list[PairsRow]:
    routers = [Router(OURS, policy) for policy in ("kv_cost", "round_robin") if policy in asked.policies]
    if "sglang-router" in peers.families:
        routers += [Router("sglang mini-lb", "random"), Router("sglang-router", "cache_aware")]
    rows = pairs_rows(routers, peers, folder, turns=asked.turns, clients=asked.clients)
    print(f"\npairs: one prefill and one decode worker, {asked.clients} clients, plain answers")
    for row in rows:
        print(f"    {row.router:32} {row.rate:6.0f} req/s   p50 {row.p50:6.2f} ms   p99 {row.p99:6.2f} ms")
    rates = {row.router: row.rate for row in rows}
    if BEST in rates and "sglang mini-lb random" in rates:
        other = rates["sglang mini-lb random"]
        print(_line(f"kv_cost {rates[BEST]:.0f} req/s, sglang's Python mini-lb {other:.0f}", rates[BEST] > other))
    sys.stdout.flush()
    return rows


PARTS: dict[str, Callable[[Asked, Peers, Path], Sequence[Any]]] = {"cache": _cache, "latency": _latency, "pairs": _pairs}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = new_parser("benchmark.bench_router", "Compare routers on the same work.")
    add_flags(parser, Asked)
    asked = read_flags(parser.parse_args(argv), Asked)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {cores} cores, load average {load:.1f} at the start", flush=True)
    rows: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="bench_router") as name:
            folder, peers = write_tokenizer(Path(name)), Peers.find(asked.peers)
            for missing in sorted(set(FAMILIES) - set(peers.families)):
                print(f"{missing} is left out: " + (f"{asked.peers} cannot import it" if asked.peers else "--peers is not given"))
            for part, measure in PARTS.items():
                if asked.part in (part, "all"):
                    rows[part] = [asdict(row) for row in measure(asked, peers, folder)]
    except ConfigError as error:
        print(f"bench_router: error: {error}", file=sys.stderr)
        return 2
    except RadixpdError as error:
        print(f"bench_router: {error}", file=sys.stderr)
        return 1
    if asked.json:
        print(msgspec.json.encode(rows).decode())
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started ends, too
    sys.exit(main())
