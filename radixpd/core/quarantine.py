"""Rooms of a decode server that are over while their peers may still write into their pages.

The pages lie in the prefix cache's quarantine; here is who may write into them, and since when. Invariant: a room leaves only when its
peer is known to be quiet or gone, never by time; until then the peer is asked again and again. A peer that keeps too many pages too long is
not trusted any more. Called by `decode_role`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from radixpd.core.handoff import HandoffLimits, PeerAbort, Room
from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.roles import Desk
from radixpd.core.whereabouts import Stage

__all__ = ["Quarantine"]

ABANDONED = "the decode server has given this room up"


@dataclass(slots=True)
class Held:
    """One room. `asked`: when the peer was last asked for its `Drained`."""

    since: float
    asked: float = float("-inf")


class Quarantine:
    """All such rooms of one server."""

    def __init__(self, desk: Desk, limits: HandoffLimits) -> None:
        self._desk = desk
        self._limits = limits
        self._rooms: dict[Room, Held] = {}

    def __contains__(self, room: Room) -> bool:
        return room in self._rooms

    @property
    def _cache(self) -> PrefixCache:
        return self._desk.holdings.cache

    def hold(self, room: Room, pages: np.ndarray) -> None:
        """The room is over; its peer may still write into these pages."""
        self._cache.quarantine(room, pages)
        self._rooms[room] = Held(self._desk.now)

    def drained(self, room: Room) -> None:
        """Nothing is written into its pages any more."""
        if room in self._rooms:
            del self._rooms[room]
            self._cache.readmit(room)

    def quiet(self, number: int) -> None:
        """The own mover says so, which knows rooms by number alone."""
        for room in [each for each in self._rooms if each.number == number]:
            self.drained(room)

    def lost(self, peer: str) -> None:
        """Nothing is written by this peer any more."""
        for room in [each for each in self._rooms if each.peer == peer]:
            self.drained(room)

    def tick(self, now: float) -> None:
        """Ask peers for their word."""
        for room, held in self._rooms.items():
            if now - held.asked >= self._limits.renew:
                held.asked = now
                self._desk.tell(room.peer, PeerAbort(room.number, ABANDONED, 499))

    def distrusts(self, peer: str) -> bool:
        """A peer whose silence has cost too many pages gets no more. Those of the last moments say nothing: it has hardly heard of them."""
        before = self._desk.now - self._limits.quarantine_patience
        old = sum(self._cache.quarantined_in(room) for room, held in self._rooms.items() if room.peer == peer and held.since < before)
        return old > self._limits.quarantine_share * self._cache.allocator.pages

    def stages(self) -> Iterator[Stage]:
        """One for each room."""
        for room, held in self._rooms.items():
            pages = self._cache.quarantined_in(room)
            yield Stage(part="quarantine", since=held.since, waits_for=room.peer, room=room.number, peer=room.peer, pages=pages)
