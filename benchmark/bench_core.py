"""Time the brain alone: what `plan`, `apply` and the radix tree cost per step, request and page, with a runner that computes nothing.

    python benchmark/bench_core.py [--rows 1 64 256 1024] [--steps 300] [--repeats 5] [--tree-tokens 1048576] [--json]

Decode is measured in steady state at depth 1 (one step in flight), page size 16, prompts of staggered length, so that every step fills and
takes its share of pages. Each figure is the best of `--repeats` runs, by median: other processes on the machine only ever add time.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import ParamSpec, TypeVar

import numpy as np

from radixpd.config.settings import CacheSettings, SchedulerSettings
from radixpd.core.page_hash import token_bytes
from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.request import SamplingParams
from radixpd.core.scheduler import Scheduler
from radixpd.core.step import StepPlan, StepResult

PAGE_SIZE = 16
EOS = 2
VOCAB = 50_000
STEP_TARGETS = {64: 150.0, 1024: 1500.0}  # microseconds of plan + apply, median
PAGE_TARGET = 2.0  # microseconds per matched page

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Decode:
    """One decode step at `rows` rows, in microseconds; plan + apply + drain."""

    rows: int
    median: float
    mean: float
    plan: float
    apply: float
    target: float | None


@dataclass(frozen=True, slots=True)
class Admission:
    """Requests of `tokens` prompt tokens that are planned and applied in one step, in microseconds per request."""

    case: str
    tokens: int
    requests: int
    arrive: float
    plan: float
    apply: float


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree of `tokens` tokens; microseconds per matched (match, release, peek) or evicted page."""

    shape: str
    tokens: int
    nodes: int
    pages_per_match: int
    match: float
    release: float
    peek: float
    evict: float


class Clock:
    """Splits time into named parts; nanoseconds."""

    def __init__(self) -> None:
        self.parts: dict[str, list[int]] = {}

    def time(self, name: str, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `action` and note how long it took."""
        start = time.perf_counter_ns()
        result = action(*args, **kwargs)
        self.parts.setdefault(name, []).append(time.perf_counter_ns() - start)
        return result

    def total(self, *names: str) -> np.ndarray:
        """Microseconds of the parts together, one value per round."""
        result: np.ndarray = np.sum([self.parts[name] for name in names], axis=0) / 1000
        return result


def _scheduler(slots: int, pages: int, context: int) -> Scheduler:
    settings = SchedulerSettings(max_running_requests=slots, chunked_prefill_size=-1, max_prefill_tokens=2**24)
    return Scheduler(settings, CacheSettings(page_size=PAGE_SIZE), pages=pages, context_length=context, eos_ids=(EOS,))


def _answer(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    """The no-op runner: random tokens that end nothing."""
    return StepResult(step=plan.step, tokens=rng.integers(EOS + 1, VOCAB, len(plan.sample_slots), dtype=np.int32))


def bench_decode(rows: int, steps: int) -> Decode:
    """Fill `rows` slots, then plan step n + 1 before step n is applied, for `steps` steps after a warm-up."""
    rng = np.random.default_rng(rows)
    warm = 2 * PAGE_SIZE
    length = 64 + PAGE_SIZE + steps + warm + 8
    scheduler = _scheduler(rows, rows * (length // PAGE_SIZE + 2), length)
    for row in range(rows):
        prompt = rng.integers(EOS + 1, VOCAB, 64 + row % PAGE_SIZE, dtype=np.int32)
        scheduler.arrive((f"request-{row:06d}",), prompt, SamplingParams(max_new_tokens=steps + warm + 4))
    clock = Clock()
    flying = scheduler.plan(0.0, 0)
    assert flying is not None
    assert len(flying.slots) == rows
    for step in range(steps + warm):
        if step == warm:
            clock.parts.clear()
            gc.collect()
        plan = clock.time("plan", scheduler.plan, 0.0, 0)
        assert plan is not None
        assert len(plan.slots) == rows
        clock.time("apply", scheduler.apply, _answer(flying, rng))
        clock.time("drain", scheduler.drain)
        flying = plan
    whole = clock.total("plan", "apply", "drain")
    plan_part, apply_part = (float(np.median(clock.total(name))) for name in ("plan", "apply"))
    return Decode(rows, float(np.median(whole)), float(whole.mean()), plan_part, apply_part, STEP_TARGETS.get(rows))


def bench_admission(case: str, requests: int = 64, tokens: int = 1024) -> Admission:
    """Admit `requests` prompts in one step: nothing cached, or all but the last page cached."""
    rng = np.random.default_rng(0)
    scheduler = _scheduler(requests, 4 * requests * tokens // PAGE_SIZE, tokens + 8)
    prompts = rng.integers(EOS + 1, VOCAB, (requests, tokens), dtype=np.int32)
    clock = Clock()
    for turn in range(2 if case == "cached" else 1):
        clock.parts.clear()
        for row, prompt in enumerate(prompts):
            clock.time("arrive", scheduler.arrive, (f"request-{turn}-{row:06d}",), prompt, SamplingParams(max_new_tokens=1))
        gc.collect()
        plan = clock.time("plan", scheduler.plan, 0.0, 0)
        assert plan is not None
        assert len(plan.begins) == requests
        clock.time("apply", scheduler.apply, _answer(plan, rng))
        scheduler.drain()
    arrive, plan_part, apply_part = (float(clock.total(name).sum()) / requests for name in ("arrive", "plan", "apply"))
    return Admission(case, tokens, requests, arrive, plan_part, apply_part)


def _store(cache: PrefixCache, data: bytes) -> None:
    pages = len(data) // cache.page_bytes
    node, found = cache.match(b"", data, pages)
    fresh = cache.allocate(pages - len(found))
    done = cache.commit(node, data[len(found) * cache.page_bytes :], fresh, 0)
    cache.release(done.node, fresh[:0])
    cache.events.clear()


def _build(shape: str, tokens: int) -> tuple[PrefixCache, list[bytes]]:
    """A full tree and the prompts to look up. `long`: runs of 1,024 pages. `short`: a branch of 3 pages at each page of a run of 128,
    so that each matched page is a node of its own."""
    pages = tokens // PAGE_SIZE
    cache, rng = PrefixCache(pages, PAGE_SIZE), np.random.default_rng(1)
    run, branch = (1024, 0) if shape == "long" else (128, 3)
    stems = []
    for _ in range(max(pages // (run * (1 + branch)), 1)):
        stem = token_bytes(rng.integers(0, VOCAB, run * PAGE_SIZE))
        stems.append(stem)
        _store(cache, stem)
        for at in range(run if branch else 0):
            _store(cache, stem[: at * cache.page_bytes] + token_bytes(rng.integers(0, VOCAB, branch * PAGE_SIZE)))
    return cache, stems


def bench_tree(shape: str, tokens: int) -> Tree:
    """Look every run up, then evict everything, a few pages at a time."""
    cache, stems = _build(shape, tokens)
    nodes, held = sum(1 for _ in cache.tree.nodes()), cache.tree.pages
    limit = len(stems[0]) // cache.page_bytes
    clock = Clock()
    gc.collect()
    for stem in stems:
        assert clock.time("peek", cache.peek, b"", stem, limit)[1] == limit
        node, found = clock.time("match", cache.match, b"", stem, limit)
        assert len(found) == limit
        clock.time("release", cache.release, node, found[:0])
    match, release, peek = (float(clock.total(name).sum()) / (limit * len(stems)) for name in ("match", "release", "peek"))
    cache.allocate(cache.allocator.free_pages)
    while cache.available:
        clock.time("evict", cache.allocate, min(16, cache.available))
        cache.events.clear()
    return Tree(shape, held * PAGE_SIZE, nodes, limit, match, release, peek, float(clock.total("evict").sum()) / held)


def _best(repeats: int, cost: Callable[[R], float], run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return min((run(*args, **kwargs) for _ in range(repeats)), key=cost)


def _verdict(value: float, target: float | None) -> str:
    return "" if target is None else f"  target {target:g}: {'met' if value <= target else 'MISSED'}"


def _print(decode: list[Decode], admission: list[Admission], trees: list[Tree]) -> None:
    print("decode step, us (plan + apply + drain)")
    for d in decode:
        parts = f"plan {d.plan:7.1f}  apply {d.apply:7.1f}"
        print(f"  {d.rows:5d} rows  median {d.median:8.1f}  mean {d.mean:8.1f}  {parts}{_verdict(d.median, d.target)}")
    first, last = decode[0], decode[-1]
    if last.rows > first.rows:
        growth = last.median / first.median
        print(f"  {last.rows / first.rows:.0f} times the rows cost {growth:.1f} times the time: {_linear(decode)}")
    print("admission, us per request")
    for a in admission:
        print(f"  {a.requests} x {a.tokens} tokens, {a.case:8s} arrive {a.arrive:6.1f}  plan {a.plan:7.1f}  apply {a.apply:7.1f}")
    print("tree, us per page")
    for t in trees:
        shape = f"{t.shape:5s} {t.tokens} tokens, {t.nodes} nodes, {t.pages_per_match} pages a match"
        print(f"  {shape}:  match {t.match:.3f}  release {t.release:.3f}  peek {t.peek:.3f}  evict {t.evict:.3f}", end="")
        print(_verdict(max(t.match, t.peek), PAGE_TARGET))


def _linear(decode: list[Decode]) -> str:
    """Whether no step from one batch size to the next costs more than in proportion."""
    worse = [after.rows for before, after in pairwise(decode) if after.median / before.median > after.rows / before.rows]
    return f"worse than linear at {worse}" if worse else "no worse than linear"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the brain alone.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=300, help="measured decode steps per run (at least 200 for a steady median)")
    parser.add_argument("--repeats", type=int, default=5, help="runs per figure; the best counts")
    parser.add_argument("--tree-tokens", type=int, default=2**20)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    times = args.repeats
    decode = [_best(times, lambda d: d.median, bench_decode, rows, args.steps) for rows in sorted(args.rows)]
    admission = [_best(3 * times, lambda a: a.plan + a.apply, bench_admission, case) for case in ("new", "cached")]
    trees = [_best(times, lambda t: t.match, bench_tree, shape, args.tree_tokens) for shape in ("long", "short")]
    if args.json:
        figures = {"decode": list(map(asdict, decode)), "admission": list(map(asdict, admission)), "tree": list(map(asdict, trees))}
        print(json.dumps(figures))
    else:
        _print(decode, admission, trees)


if __name__ == "__main__":
    main()
