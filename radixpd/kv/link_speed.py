"""How fast the way to a peer is, by what it has carried lately. Pure: the time is an argument.

Measured between confirmations: the bytes of a piece over the time since the piece before it was confirmed, if it was under way by then
(else that time shows how long it had to come about). Such times are added up until there is enough of them for a sample. A sample in
which small pieces followed each other at once shows what a frame costs, not the link; one in which the codec may have been what was slow
says "at least so fast": neither counts. Used by the mover, one object a peer.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["LinkSpeed"]

ENOUGH_BYTES, ENOUGH_SECONDS = 256 << 10, 0.02  # in a sample: either
FRAME_BYTES, FRAME_SECONDS = 256 << 10, 0.00075  # of a piece, on average: either, or it is the frames that cost
KEPT = 8  # samples
DOUBTED = 512  # pieces without a sample that counts: what was known before is forgotten


class LinkSpeed:
    """Of one peer."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=KEPT)
        self._last = -math.inf  # confirmation
        self._doubted = 0
        # Of the sample that is being taken.
        self._bytes, self._pieces = 0, 0
        self._seconds, self._limit = 0.0, math.inf

    @property
    def now(self) -> float | None:
        """Bytes a second: the best of the last samples, since all that disturbs one makes it slower. None: not known."""
        return max(self._samples, default=None)

    def confirmed(self, size: int, now: float, *, taken: float, limit: float = math.inf) -> None:
        """A piece has come, as `size` bytes; it was under way since `taken`. `limit`: bytes a second from which on its codec may have been
        what was slow."""
        last, self._last = self._last, now
        if taken > last:
            return
        self._bytes += size
        self._pieces += 1
        self._seconds += now - last
        self._limit = min(self._limit, limit)
        if self._bytes >= ENOUGH_BYTES or self._seconds >= ENOUGH_SECONDS:
            self._sample()

    def _sample(self) -> None:
        large, slow = self._bytes >= self._pieces * FRAME_BYTES, self._seconds >= self._pieces * FRAME_SECONDS
        if self._seconds > 0 and (large or slow) and self._bytes / self._seconds < self._limit:
            self._samples.append(self._bytes / self._seconds)
            self._doubted = 0
        else:
            self._doubted += self._pieces
            if self._doubted >= DOUBTED:
                self._samples.clear()
        self._bytes, self._pieces = 0, 0
        self._seconds, self._limit = 0.0, math.inf
