"""How fast the way to a peer is, by what it has carried lately. Pure: the time is an argument.

Bytes confirmed over the time that it took, while something was always under way: for each piece from the last confirmation before it was
taken (or from its own start, if nothing was under way) to its own. Samples of little data and little time are dropped: they show latency,
not speed. So are those in which the codec may have been the slower part: they say no more than "at least so fast". Used by the mover, one
object a peer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["LinkSpeed", "Mark"]

ENOUGH_BYTES = 256 << 10
ENOUGH_SECONDS = 0.02
KEPT = 8  # samples
UNPROVEN = 30.0  # seconds in which samples showed the codec's speed only: what was known of the link before is forgotten


@dataclass(frozen=True, slots=True)
class Mark:
    """What had been confirmed, and when last, as a piece was taken."""

    bytes: int
    since: float


class LinkSpeed:
    """Of one peer."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=KEPT)
        self._confirmed = 0
        self._last = 0.0
        self._proven = 0.0

    @property
    def now(self) -> float | None:
        """Bytes a second: the best of the last samples, since all that disturbs one makes it slower. None: not known."""
        return max(self._samples, default=None)

    def taken(self, now: float, *, alone: bool) -> Mark:
        """A piece begins its way; `alone`: nothing else is under way."""
        if alone:
            self._last = now  # the time before was idle
        return Mark(self._confirmed, self._last)

    def confirmed(self, mark: Mark, size: int, now: float, *, limit: float) -> None:
        """It has come, as `size` bytes. `limit`: bytes a second from which on its codec may have been what was slow."""
        self._confirmed += size
        self._last = now
        moved, seconds = self._confirmed - mark.bytes, now - mark.since
        if seconds <= 0 or (moved < ENOUGH_BYTES and seconds < ENOUGH_SECONDS):
            return
        if moved / seconds < limit:
            self._samples.append(moved / seconds)
            self._proven = now
        elif now - self._proven > UNPROVEN:
            self._samples.clear()
