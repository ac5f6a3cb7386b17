"""Rooms of a prefill server that are over: a late word about one is answered, and brings nothing back to life.

Invariant: a room stays dead for `HandoffLimits.tombstone` seconds, unless `tombstones` others have died since. Called by `prefill_role`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from radixpd.core.handoff import HandoffLimits

__all__ = ["Tombstone", "Tombstones"]


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A room that is over. `reason`: why it was not delivered, empty if it was."""

    until: float
    reason: str
    status: int


class Tombstones:
    """All of one server, the oldest first."""

    def __init__(self, limits: HandoffLimits) -> None:
        self._limits = limits
        self._stones: OrderedDict[int, Tombstone] = OrderedDict()

    def __contains__(self, room: int) -> bool:
        return room in self._stones

    def bury(self, room: int, now: float, reason: str = "", status: int = 200) -> None:
        """The room is over."""
        self._stones.pop(room, None)
        self._stones[room] = Tombstone(now + self._limits.tombstone, reason, status)
        while len(self._stones) > self._limits.tombstones:
            self._stones.popitem(last=False)

    def failure(self, room: int) -> Tombstone | None:
        """Why the room was not delivered; None if it was, or is not dead."""
        stone = self._stones.get(room)
        return stone if stone is not None and stone.reason else None

    def tick(self, now: float) -> None:
        """Forget what is long over."""
        while self._stones and next(iter(self._stones.values())).until < now:
            self._stones.popitem(last=False)
