"""One worker's circuit: closed, open, half-open.

Closed: requests go there; so many failures in a row open it. Open: nothing goes there for a while, longer each time. Then half-open: one
trial request at a time, until enough have been answered (closed) or one fails (open again). Invariant: what a request did counts only
while the circuit is in the state that let it pass, so a burst that fails together opens it once. Time and jitter are arguments; called by
`fleet`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Breaker", "BreakerRules", "State", "Ticket"]

JITTER = 0.2  # of the wait, either way: circuits that opened together do not try together


class State(Enum):
    """What `/workers` and the metrics show."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """`failures` in a row open, `successes` in a row close; it stays open for `seconds`, doubled each time up to `most`."""

    failures: int = 5
    successes: int = 2
    seconds: float = 2.0
    most: float = 60.0


@dataclass(slots=True)
class Ticket:
    """A request that was let pass; `epoch` names the stretch of time without a change of state."""

    epoch: int
    trial: bool


class Breaker:
    """See the module. `uniform(low, high)` draws the jitter."""

    def __init__(self, rules: BreakerRules, uniform: Callable[[float, float], float]) -> None:
        self._rules = rules
        self._uniform = uniform
        self._state = State.CLOSED
        self._epoch = 0
        self._until = 0.0  # when an open circuit becomes half-open
        self._opened = 0  # times in a row
        self._failures = 0
        self._successes = 0
        self._trials = 0  # under way
        self.transitions = 0

    def state(self, now: float) -> State:
        """An open circuit becomes half-open by time alone."""
        return State.HALF_OPEN if self._state is State.OPEN and now >= self._until else self._state

    def allows(self, now: float) -> bool:
        """Whether a request may go to this worker now."""
        state = self.state(now)
        return state is State.CLOSED or (state is State.HALF_OPEN and not self._trials)

    def begin(self, now: float) -> Ticket:
        """A request goes there. `end` must follow."""
        if self._state is State.OPEN and now >= self._until:
            self._change(State.HALF_OPEN)
        trial = self._state is State.HALF_OPEN
        self._trials += trial
        return Ticket(self._epoch, trial)

    def answered(self, ticket: Ticket) -> None:
        """The worker has begun to answer: a trial need not wait for the end of a long stream."""
        if not self._counts(ticket) or not ticket.trial:
            return
        ticket.trial = False
        self._trials -= 1
        self._successes += 1
        if self._successes >= self._rules.successes:
            self._opened = 0
            self._change(State.CLOSED)

    def end(self, ticket: Ticket, ok: bool | None, now: float) -> None:
        """How it went; None: it ended for a reason that tells nothing about the worker."""
        if not self._counts(ticket):
            return
        if ok:
            self.answered(ticket)
            self._failures = 0
        self._trials -= ticket.trial
        ticket.trial = False
        if ok is False:
            self._failures += 1
            if self._state is State.HALF_OPEN or self._failures >= self._rules.failures:
                self._open(now)

    def reset(self) -> None:
        """The worker is a new process: nothing is known against it."""
        self._opened = 0
        if self._state is not State.CLOSED:
            self._change(State.CLOSED)
        self._failures = 0

    def _counts(self, ticket: Ticket) -> bool:
        return ticket.epoch == self._epoch

    def _open(self, now: float) -> None:
        wait = min(self._rules.most, self._rules.seconds * 2.0 ** min(self._opened, 60))
        self._until = now + wait * self._uniform(1 - JITTER, 1 + JITTER)
        self._opened += 1
        self._change(State.OPEN)

    def _change(self, state: State) -> None:
        self._state = state
        self._epoch += 1
        self._failures = self._successes = self._trials = 0
        self.transitions += 1
