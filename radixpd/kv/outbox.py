"""What is still to be sent, in order: first layer first over all open sends to one peer. Pure bookkeeping of the mover.

A `Job` is one `Send` of a plan on its way. A layer of some of its pages becomes *due* when it is computed; due work is cut into pieces that
the transport carries. Invariant: a job's ticket is settled once: when every page of every layer has been taken, or at its first error.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np

from radixpd.core.step import Send

__all__ = ["Job", "Lane", "Piece"]


@dataclass(slots=True, eq=False)
class Job:
    """`left`: pages, over all layers, that the receiver has not confirmed; `codec`: how they go."""

    send: Send
    left: int
    codec: str = "none"
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages `start .. end` of a job's list, in one layer."""

    job: Job
    layer: int
    start: int
    end: int

    @property
    def source(self) -> np.ndarray:
        """Own page ids."""
        return self.job.send.source[self.start : self.end]

    @property
    def target(self) -> np.ndarray:
        """The peer's page ids."""
        return self.job.send.target[self.start : self.end]


@dataclass(slots=True, eq=False)
class Lane:
    """All work for one peer. `moved`: when something last went on; `flying`: bytes that the transport has and that are not
    confirmed yet."""

    peer: str
    moved: float
    flying: int = 0
    jobs: list[Job] = field(default_factory=list)
    _due: list[tuple[int, int, Piece]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def has_due(self) -> bool:
        """Whether anything could be sent now. Drops what need not be sent any more."""
        while self._due and self._due[0][2].job.settled:
            heapq.heappop(self._due)
        return bool(self._due)

    def add(self, piece: Piece) -> None:
        """This can be sent."""
        if piece.end > piece.start:
            heapq.heappush(self._due, (piece.layer, next(self._order), piece))

    @property
    def codec(self) -> str:
        """Of the next piece."""
        return self._due[0][2].job.codec

    def take(self, pages: int, least: int = 1) -> Piece:
        """The next piece, of at most so many pages; what is left of it for later is `least` pages or more (of which `pages` are two or
        more times as many)."""
        layer, order, piece = self._due[0]
        end = min(piece.end, piece.start + pages)
        if 0 < piece.end - end < least:
            end = piece.end - least
        if end == piece.end:
            heapq.heappop(self._due)
        else:
            self._due[0] = layer, order, Piece(piece.job, layer, end, piece.end)
        return Piece(piece.job, layer, piece.start, end)
