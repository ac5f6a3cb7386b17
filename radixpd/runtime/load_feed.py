"""When the API process hears how busy the scheduler is: soon after a change, but not with every step, and at least every second.

Invariant: a load is at most `HEARTBEAT` seconds old, so that it is a sign of life as well. Called by the scheduler's loop, once a turn.
"""

from __future__ import annotations

from radixpd.core.load import LoadSnapshot
from radixpd.core.scheduler import Scheduler
from radixpd.runtime.links import Sender
from radixpd.runtime.messages import Load

__all__ = ["LoadFeed"]

INTERVAL = 0.05  # seconds between two loads while steps follow each other
HEARTBEAT = 1.0  # seconds after which a load is sent that has not changed


class LoadFeed:
    """Of one scheduler, to one API process."""

    def __init__(self, scheduler: Scheduler, to_api: Sender) -> None:
        self._scheduler = scheduler
        self._to_api = to_api
        self._load: LoadSnapshot | None = None  # as last sent
        self._sent = 0.0
        self._stale = False

    def turn(self, now: float, *, moved: bool) -> None:
        """Send what is due. `moved`: the turn has changed something."""
        self._stale |= moved
        age = now - self._sent
        due = self._stale and (self._scheduler.in_flight == 0 or age >= INTERVAL)
        if not due and age < HEARTBEAT:
            return
        self._stale = False
        load = self._scheduler.load()
        if load != self._load or age >= HEARTBEAT:
            self._to_api.send(Load(load))
            self._load, self._sent = load, now

    @property
    def next(self) -> float:
        """When something is due."""
        return self._sent + (INTERVAL if self._stale else HEARTBEAT)
