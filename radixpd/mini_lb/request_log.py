"""The request log (`--request-log FILE`): one JSON line for each request, when it has been answered.

Invariants: no line holds a prompt, an answer or a key; nothing here fails a request or makes it wait: a thread writes, lines that find no
room or no disk are counted as lost and told once in a while. `reopen` (SIGHUP) begins a new file where the old one was moved away. Called
by the application, which sees how every request ended.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from radixpd.errors import ConfigError
from radixpd.mini_lb.decisions import Decision

__all__ = ["RequestLog", "line"]

MOST_LINES = 20_000  # that wait for the disk
BATCH = 500
COMPLAIN_SECONDS = 60.0
CLOSE_SECONDS = 5.0  # for the disk to take the last lines
REOPEN = b""

logger = logging.getLogger(__name__)


def line(decision: Decision | None, *, rid: str, method: str, route: str, status: int, seconds: float) -> dict[str, Any]:
    """What is told of one request. `decision` is there if it was one to generate."""
    told: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "rid": rid,
        "method": method,
        "route": route,
        "status": status,
        "duration_s": _rounded(seconds),
    }
    if decision is None:
        return told
    told |= {
        "outcome": decision.outcome,
        "stream": decision.stream,
        "waited_s": _rounded(decision.waited_s),
        "prompt_tokens": decision.prompt_tokens,
        "cached_tokens": decision.figures.cached,
        "output_tokens": decision.figures.output_tokens,
        "ttft_s": _rounded(decision.ttft_s),
        "tries": len(decision.tries),
    }
    if decision.tries:
        last = decision.tries[-1]
        told |= {
            "worker": last.chosen.worker,
            "decode": last.chosen.decode or None,
            "expected_hit_tokens": last.chosen.hits.tokens,
            "estimated_ttft_s": _rounded(last.chosen.ttft_s),
            "reason": last.reason,
        }
    if decision.error:
        told["error"] = decision.error
    return told


class RequestLog:
    """One file. Without a path it is off."""

    def __init__(self, path: str | None) -> None:
        self.enabled = path is not None
        self.lost = 0
        self._path = Path(path or "")
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._complained = -COMPLAIN_SECONDS
        self._file: BinaryIO | None = None
        self._torn = False  # the file ends in half a line
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        if self.enabled:
            try:
                self._file = _open(self._path)
            except OSError as error:
                raise ConfigError(f"--request-log {path}: {error.strerror}") from None
            self._thread.start()

    def write(self, told: dict[str, Any]) -> None:
        """Add a line, soon."""
        if self._lines.qsize() >= MOST_LINES:
            self._lose(1, "the disk is too slow")
        else:
            self._lines.put_nowait(msgspec.json.encode(told) + b"\n")

    def reopen(self) -> None:
        """From here on write to whatever file has the name now, a new one if none has."""
        if self.enabled:
            self._lines.put_nowait(REOPEN)

    def close(self) -> None:
        """Write what is left; waits for the disk, but not for ever."""
        if self.enabled and self._thread.is_alive():
            self._lines.put_nowait(None)
            self._thread.join(CLOSE_SECONDS)

    # ---- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            self._put(batch)
            if batch[-1:] == [REOPEN]:
                self._close_file()
        self._close_file()

    def _next(self) -> list[bytes] | None:
        """Some lines, up to an order to reopen; None at the end."""
        first = self._lines.get()
        if first is None:
            return None
        batch = [first]
        while batch[-1] != REOPEN and len(batch) < BATCH:
            try:
                more = self._lines.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._lines.put_nowait(None)
                break
            batch.append(more)
        return batch

    def _put(self, batch: list[bytes]) -> None:
        data = memoryview((b"\n" if self._torn else b"") + b"".join(batch))
        count = sum(each != REOPEN for each in batch)
        if not count:
            return
        written = 0
        try:
            if self._file is None:
                self._file = _open(self._path)
            while written < len(data):
                written += self._file.write(data[written:])
            self._torn = False
        except OSError as error:
            self._torn = self._torn if not written else data[written - 1] != ord("\n")
            self._lose(count - bytes(data[:written]).count(b"\n"), error.strerror or type(error).__name__)
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                logger.warning("the request log could not be closed: %s", error.strerror)
            self._file = None

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        now = time.monotonic()
        if now - self._complained >= COMPLAIN_SECONDS:
            self._complained = now
            logger.warning("the request log has lost %d lines so far: %s (%s)", self.lost, why, self._path)


def _open(path: Path) -> BinaryIO:
    """Without a buffer: what has been written is there, whatever becomes of this process."""
    return path.open("ab", buffering=0)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
