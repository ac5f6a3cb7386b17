"""A progress bar on standard error: programs that are done, how many a second, and how long it may still take.

Drawn by the threads that finish programs, at most ten times a second. Called by `batch`.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

__all__ = ["Progress"]

WIDTH = 24
INTERVAL = 0.1  # seconds


class Progress:
    """`total` programs; None where nobody knows how many."""

    def __init__(self, name: str, total: int | None, out: TextIO | None = None) -> None:
        self._name = name
        self._total = total
        self._out = out or sys.stderr
        self._done = self._failed = 0
        self._began = time.monotonic()
        self._drawn = 0.0
        self._lock = threading.Lock()

    def advance(self, *, failed: bool = False) -> None:
        """One more program is done."""
        with self._lock:
            self._done += 1
            self._failed += failed
            if time.monotonic() - self._drawn >= INTERVAL:
                self._draw()

    def close(self) -> None:
        """Draw the last state and leave the line."""
        with self._lock:
            self._draw()
            self._out.write("\n")

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        seconds = max(self._drawn - self._began, 1e-3)
        rate = self._done / seconds
        parts = [f"{self._name}:"]
        if self._total is None:
            parts.append(str(self._done))
        else:
            filled = WIDTH * self._done // max(self._total, 1)
            parts.append(f"[{'#' * filled}{'.' * (WIDTH - filled)}] {self._done}/{self._total}")
        parts.append(f"{rate:.1f}/s")
        if self._total is not None and 0 < self._done < self._total:
            parts.append(f"{(self._total - self._done) / rate:.0f} s left")
        if self._failed:
            parts.append(f"{self._failed} failed")
        self._out.write("\r" + "  ".join(parts).ljust(78))
        self._out.flush()
