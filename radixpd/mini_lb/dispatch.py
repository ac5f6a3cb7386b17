"""The balancer's memory around the pure policies: what was sent where, what each worker has cached, how fast it is.

`Dispatcher` is used alike by the proxy and by the simulation: `pick` chooses (and changes nothing but the turn and the random state),
`dispatched` opens the account of one request, and its `Account` is told of the first token and of the end. Invariant: an account counts
from `dispatched` until `done`, exactly once, whatever happens in between. Time is an argument; nothing here does I/O.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from radixpd.mini_lb.balance import Situation, choose
from radixpd.mini_lb.snapshot import Choice, RouteAsk, WorkerSnapshot

__all__ = ["Account", "Dispatcher"]


class Account:
    """One request under way. Every method may be called late or twice without harm."""

    def __init__(self, ask: RouteAsk, choice: Choice, now: float) -> None:
        self.ask = ask
        self.choice = choice
        self.started = now

    def first_token(self, now: float, cached: int | None = None) -> None:
        """The first generated token came; `cached`: prompt tokens that the worker says it had, where it says so."""

    def done(self, now: float, *, ok: bool = True, output_tokens: int = 0) -> None:
        """The answer has ended, well or not."""


class Dispatcher:
    """Chooses workers and keeps account."""

    def __init__(self, policy: str = "round_robin", *, prefill_policy: str = "", decode_policy: str = "", seed: int = 0) -> None:
        self.policy = policy
        self.prefill_policy = prefill_policy or policy
        self.decode_policy = decode_policy or policy
        self._random = random.Random(seed)
        self._turn = 0

    def pick(self, ask: RouteAsk, workers: Sequence[WorkerSnapshot], now: float) -> Choice:
        """The worker, or the pair where the workers are prefill and decode ones; raises `Overloaded` where none is usable."""
        situation = Situation(self._turn, self._random)
        self._turn += 1
        return choose(self.policy, ask, workers, situation)

    def dispatched(self, ask: RouteAsk, choice: Choice, now: float) -> Account:
        """`ask` is on its way to the chosen workers."""
        return Account(ask, choice, now)

    def reported(self, worker: WorkerSnapshot, now: float) -> None:
        """A fresh load report of a worker: what it holds beyond our own accounts is other people's load."""

    def forget(self, name: str, now: float) -> None:
        """The worker restarted with an empty cache, or left the fleet: what was known of its cache and its queue is void."""
