"""A link as fast as one says: paces what a mover hands to its transports, so that slow networks can be studied on one machine.

The rule is a pipe's: a piece has crossed the link `bytes / rate` after the piece before it, and only then it is handed over. A caller that
comes late (a timer has its grain) may catch up on what the link could have carried meanwhile, but an idle link saves nothing up.
Invariant: over any stretch of work, no more than the rate times its length, plus one piece, goes out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["Link"]

GRAIN = 0.001  # seconds of link time in one piece: what a timer can still tell apart
LATE = 0.05  # seconds that a late caller may catch up on


class Link:
    """`gbps` (10^9 bits a second) of 0: no limit."""

    def __init__(self, gbps: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        if not (math.isfinite(gbps) and gbps >= 0):
            raise ValueError(f"--disaggregation-link-gbps is 0 (no limit) or more, not {gbps}")
        self.rate = gbps * 1e9 / 8  # bytes a second
        self._clock = clock
        self._free = -math.inf  # when the link has carried all it was given
        self._resting = True

    def piece(self, most: int) -> int:
        """How many bytes to hand over at once, at most; at least 1."""
        return most if not self.rate else max(1, min(most, int(self.rate * GRAIN)))

    def carry(self, size: int) -> float:
        """Put `size` bytes on the link; when they have crossed it."""
        now = self._clock()
        if not self.rate:
            return now
        start = max(self._free, now if self._resting else now - LATE)
        self._resting = False
        self._free = start + size / self.rate
        return self._free

    def rest(self) -> None:
        """There is nothing to carry now."""
        self._resting = True
