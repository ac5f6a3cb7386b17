"""Which pages may be written from outside, and what of them has come: the book that all transports of one mover share.

A room's entry says who writes it and which pages; a transport asks before it writes and reports after. Invariant: when an entry ends
(complete, cancelled, peer lost), whoever is still writing for it is told within the same call and writes no byte more. Rooms that ended
are remembered for a while, so that late frames are refused at once, and early ones (before `expect`) may be given a moment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Arrivals", "Expected"]

REMEMBERED = 4096  # ended rooms


@dataclass(slots=True, eq=False)
class Expected:
    """One room. `pages`: sorted ids; `seen[layer, i]`: whether page i of that layer has come; `writing`: told when the entry ends."""

    room: int
    peer: str
    pages: np.ndarray  # int64 [n]
    seen: np.ndarray  # bool [layers, n]
    left: int
    writing: list[Callable[[], None]] = field(default_factory=list)

    def places(self, pages: np.ndarray) -> np.ndarray | None:
        """Where these pages stand in the entry; None if one of them is not in it."""
        places = np.searchsorted(self.pages, pages)
        places[places == len(self.pages)] = 0
        return places if bool((self.pages[places] == pages).all()) else None

    def came(self, layer: int, places: np.ndarray) -> None:
        """These pages of this layer are there. Coming twice counts once."""
        row = self.seen[layer]
        before = int(row.sum())
        row[places] = True
        self.left -= int(row.sum()) - before


class Arrivals:
    """All rooms that are expected here."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._rooms: dict[int, Expected] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()

    def expect(self, room: int, peer: str, pages: np.ndarray) -> None:
        """From now on `peer` may write these pages."""
        ids = np.unique(np.asarray(pages, dtype=np.int64))
        self._ended.pop(room, None)
        self._rooms[room] = Expected(room, peer, ids, np.zeros((self.layers, len(ids)), dtype=bool), self.layers * len(ids))

    def find(self, room: int) -> Expected | None:
        """The room's entry."""
        return self._rooms.get(room)

    def all(self) -> list[Expected]:
        """Every room's entry."""
        return list(self._rooms.values())

    def has_ended(self, room: int) -> bool:
        """Whether the room was expected and is over."""
        return room in self._ended

    def end(self, room: int) -> bool:
        """The room is over. False if it was not expected."""
        self._ended[room] = None
        self._ended.move_to_end(room)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        entry = self._rooms.pop(room, None)
        if entry is None:
            return False
        for stop in entry.writing:
            stop()
        return True

    def end_peer(self, peer: str) -> None:
        """Every room of this peer is over."""
        for room in [entry.room for entry in self._rooms.values() if entry.peer == peer]:
            self.end(room)
