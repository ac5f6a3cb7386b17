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

from radixpd.core.handoff import Landed

__all__ = ["Arrivals", "Expected"]

REMEMBERED = 4096  # ended rooms


@dataclass(slots=True, eq=False)
class Expected:
    """One room. `pages`: sorted ids; `seen[layer, i]`: whether page i of that layer has come; `writing`: told when the entry ends. `raw`,
    `wire`, `exact`: as in `Landed`."""

    room: int
    peer: str
    pages: np.ndarray  # int64 [n]
    seen: np.ndarray  # bool [layers, n]
    left: int
    page_bytes: int
    writing: list[Callable[[], None]] = field(default_factory=list)
    raw: int = 0
    wire: int = 0
    exact: bool = True

    @property
    def landed(self) -> Landed:
        """What is reported when nothing is left."""
        return Landed(self.room, self.raw, self.wire, self.exact)

    def places(self, pages: np.ndarray) -> np.ndarray | None:
        """Where these pages stand in the entry; None if one of them is not in it."""
        places = np.searchsorted(self.pages, pages)
        places[places == len(self.pages)] = 0
        return places if bool((self.pages[places] == pages).all()) else None

    def came(self, layer: int, places: np.ndarray, coded: int | None = None) -> None:
        """These pages of this layer are there, `coded`: out of so many bytes. Coming twice counts once, but for the bytes."""
        size = len(places) * self.page_bytes
        self.raw += size
        self.wire += size if coded is None else coded
        self.exact = self.exact and coded is None
        row = self.seen[layer]
        before = int(row.sum())
        row[places] = True
        self.left -= int(row.sum()) - before


class Arrivals:
    """All rooms that are expected here. `page_bytes`: of one page in one layer."""

    def __init__(self, layers: int, page_bytes: int) -> None:
        self.layers, self.page_bytes = layers, page_bytes
        self._rooms: dict[int, Expected] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()  # and who was expected

    def expect(self, room: int, peer: str, pages: np.ndarray) -> None:
        """From now on `peer` may write these pages."""
        ids = np.unique(np.asarray(pages, dtype=np.int64))
        self._ended.pop(room, None)
        seen = np.zeros((self.layers, len(ids)), dtype=bool)
        self._rooms[room] = Expected(room, peer, ids, seen, seen.size, self.page_bytes)

    def find(self, room: int) -> Expected | None:
        """The room's entry."""
        return self._rooms.get(room)

    def all(self) -> list[Expected]:
        """Every room's entry."""
        return list(self._rooms.values())

    def writer(self, room: int) -> str | None:
        """Who is, or was, expected in the room; None if nobody ever was, as far as is remembered."""
        entry = self._rooms.get(room)
        return (entry.peer if entry else self._ended.get(room)) or None

    def has_ended(self, room: int) -> bool:
        """Whether the room was expected and is over."""
        return room in self._ended

    def end(self, room: int) -> bool:
        """The room is over. False if it was not expected."""
        entry = self._rooms.pop(room, None)
        self._ended[room] = entry.peer if entry else self._ended.get(room, "")
        self._ended.move_to_end(room)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        if entry is None:
            return False
        for stop in entry.writing:
            stop()
        return True

    def end_peer(self, peer: str) -> None:
        """Every room of this peer is over."""
        for room in [entry.room for entry in self._rooms.values() if entry.peer == peer]:
            self.end(room)
