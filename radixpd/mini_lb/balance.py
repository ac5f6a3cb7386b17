"""Policies: which worker serves a request. Each is a function of the ask, the usable workers and the situation; none keeps state.

Invariant: `choose` is the only door, for the proxy and for the simulation alike; it drops workers that are not usable and never returns one
of them. Time and randomness are arguments. Called by `dispatch`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixpd.errors import Overloaded
from radixpd.mini_lb.snapshot import Candidate, Choice, RouteAsk, WorkerSnapshot

__all__ = ["POLICIES", "Policy", "Situation", "choose"]


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy may use besides ask and workers. `turn` counts the choices made so far."""

    turn: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))


Policy = Callable[[RouteAsk, Sequence[WorkerSnapshot], Situation], Choice]


def choose(policy: str, ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    """The worker for `ask` among those that are usable."""
    usable = [worker for worker in workers if worker.usable]
    if not usable:
        raise Overloaded("no worker is available")
    return POLICIES[policy](ask, usable, situation)


def _random(ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    return _plain(situation.random.choice(workers), "random")


def _round_robin(ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    return _plain(workers[situation.turn % len(workers)], "next in turn")


def _plain(worker: WorkerSnapshot, reason: str) -> Choice:
    return Choice(worker.name, reason, candidates=(Candidate(worker.name, 0.0, hits=worker.hits),))


POLICIES: dict[str, Policy] = {"random": _random, "round_robin": _round_robin}
