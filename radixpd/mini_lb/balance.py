"""Policies: which worker serves a request. Each is a function of the ask, the usable workers and the situation; none keeps state.

Invariant: `choose` is the only door, for the proxy and for the simulation alike; it drops workers that are not usable and never returns one
of them. `hits` says what a policy wants to know of caches, so that nobody looks up what nobody reads. Called by `dispatch` and `pairing`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from radixpd.errors import Overloaded
from radixpd.mini_lb.cost import kv_cost
from radixpd.mini_lb.snapshot import Candidate, Choice, RouteAsk, Situation, WorkerSnapshot

__all__ = ["POLICIES", "Policy", "choose"]

BOUNDED_LOAD = 1.25  # consistent_hash: requests in flight over the mean that a worker may have


@dataclass(frozen=True, slots=True)
class Policy:
    """`hits`: from the workers' own events where they send them (`known`), from what was sent before (`sent`), or not needed."""

    choose: Callable[[RouteAsk, Sequence[WorkerSnapshot], Situation], Choice]
    hits: Literal["known", "sent", "none"] = "none"


def choose(policy: str, ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    """The worker for `ask` among those that are usable."""
    usable = [worker for worker in workers if worker.usable]
    if not usable:
        raise Overloaded("no worker is available")
    return POLICIES[policy].choose(ask, usable, situation)


def _random(ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    return _plain(ask, situation.random.choice(workers), "by chance")


def _round_robin(ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    return _plain(ask, workers[situation.turn % len(workers)], "next in turn")


def _power_of_two(ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    """Two by chance, of them the one with fewer requests."""
    two = situation.random.sample(workers, min(2, len(workers)))
    return _plain(ask, min(two, key=lambda worker: (worker.in_flight, worker.queued_tokens)), "fewer requests of two by chance")


def _least_backlog(ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    """The fewest prompt tokens that are still to be computed."""
    return _plain(ask, _least(workers, situation, lambda worker: (worker.queued_tokens, worker.in_flight)), "fewest prompt tokens waiting")


def _cache_aware(ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    """SGLang's rule: the longest match if it is long enough and nobody is far busier than another, else the fewest requests."""
    tuning = situation.tuning
    loads = [worker.in_flight for worker in workers]
    if max(loads) - min(loads) > tuning.balance_abs_threshold and max(loads) > tuning.balance_rel_threshold * min(loads):
        return _plain(ask, _least(workers, situation, _busyness), "fewest requests, for balance")
    best = max(worker.hits.tokens for worker in workers)
    if best > tuning.cache_threshold * ask.tokens:
        longest = [worker for worker in workers if worker.hits.tokens == best]
        return _plain(ask, _least(longest, situation, _busyness), "longest match with what was sent there before")
    return _plain(ask, _least(workers, situation, _busyness), "fewest requests, no long match")


def _consistent_hash(ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    """Rendezvous hashing by session: a worker that comes or goes moves its own sessions only. A full one passes on to a session's next."""
    if not ask.session:
        return _plain(ask, _least(workers, situation, _busyness), "fewest requests, no session named")
    most = BOUNDED_LOAD * (sum(worker.in_flight for worker in workers) + 1) / len(workers)
    preferred = sorted(workers, key=lambda worker: _rank(ask.session, worker.name), reverse=True)
    free = next((worker for worker in preferred if worker.in_flight < most), preferred[0])
    return _plain(ask, free, "the session's worker" if free is preferred[0] else "the session's next worker, the first one is full")


def _busyness(worker: WorkerSnapshot) -> tuple[int, float]:
    return worker.in_flight, worker.recent_s


def _least(workers: Sequence[WorkerSnapshot], situation: Situation, key: Callable[[WorkerSnapshot], tuple[float, ...]]) -> WorkerSnapshot:
    least = min(key(worker) for worker in workers)
    return situation.random.choice([worker for worker in workers if key(worker) == least])


def _rank(session: str, name: str) -> bytes:
    framed = len(session).to_bytes(4, "little") + f"{session}{name}".encode(errors="surrogatepass")
    return hashlib.blake2b(framed, digest_size=8).digest()


def _plain(ask: RouteAsk, worker: WorkerSnapshot, reason: str) -> Choice:
    """A choice that weighed no times, with an estimate all the same."""
    cached = min(worker.hits.tokens, ask.tokens)
    prefill_s = worker.prefill.seconds(ask.tokens - cached, cached)
    return Choice(
        worker.name, reason, candidates=(Candidate(worker.name, 0.0, hits=worker.hits, queue_s=worker.queued_s, prefill_s=prefill_s),)
    )


POLICIES: dict[str, Policy] = {
    "kv_cost": Policy(kv_cost, hits="known"),
    "cache_aware": Policy(_cache_aware, hits="sent"),
    "consistent_hash": Policy(_consistent_hash),
    "least_backlog": Policy(_least_backlog),
    "power_of_two": Policy(_power_of_two),
    "round_robin": Policy(_round_robin),
    "random": Policy(_random),
}
