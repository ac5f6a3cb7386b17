"""Deadlines: the moment at which a program must be done. Every wait of this package is bounded by one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from radixpd_lang.errors import ProgramTimeout
from radixpd_lang.place import here

__all__ = ["Deadline"]

GRACE = 5.0  # seconds that a reader waits longer than the program may take, so that the program's own error comes first


@dataclass(frozen=True, slots=True)
class Deadline:
    """`seconds` were given; `at` is when they are over, on the monotonic clock (which is the event loop's own)."""

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        if not 0 < seconds < math.inf:
            raise ValueError(f"timeout must be a number of seconds above 0, got {seconds}")
        return cls(seconds, time.monotonic() + seconds)

    @property
    def patience(self) -> float:
        """Seconds for which a reader may still wait."""
        return max(0.0, self.at + GRACE - time.monotonic())

    def missed(self) -> ProgramTimeout:
        """The error of a reader whose patience is over."""
        return ProgramTimeout(f"not finished within {self.seconds:g} s", here())
