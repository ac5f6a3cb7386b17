"""The requests of the last five minutes, written into a folder when the engine fails: what a developer needs to see it happen again.

Kept are ids, parameters and times, as JSON lines; requests that asked for `no_logs` are not told to this recorder. Invariants: bounded in
time, memory and file size; the file is the owner's alone (0600) and never replaces another; salts and keys are not in it; writing never
raises, since the server is ending anyway. Called by outputs when they end and by the API process's main.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from radixpd.core.request import Finish, SamplingParams
from radixpd.errors import EngineFailed
from radixpd.runtime.output import Output

__all__ = ["Recorder"]

KEEP_SECONDS = 300.0
KEEP_BYTES = 32 * 2**20  # of ids in memory
FILE_BYTES = 64 * 2**20
RECORD_BYTES = 1024  # a record's size without its ids, for the sum

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Record:
    """One output that has ended, in any way."""

    rid: str
    group: str
    arrived: float  # seconds since the epoch
    seconds: dict[str, float]
    prompt: np.ndarray
    output: np.ndarray
    cached: int
    params: SamplingParams
    priority: int
    salted: bool
    finish: Finish

    @property
    def size(self) -> int:
        return RECORD_BYTES + self.prompt.nbytes + self.output.nbytes

    def shown(self) -> dict[str, Any]:
        """As it is written. `open`: the engine's failure ended it."""
        return {
            "rid": self.rid,
            "group": self.group,
            "arrived": round(self.arrived, 3),
            "open": self.finish.kind == "abort" and self.finish.status == EngineFailed.status,
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "input_ids": self.prompt.tolist(),
            "output_ids": self.output.tolist(),
            "cached_tokens": self.cached,
            "sampling_params": dataclasses.asdict(self.params),
            "priority": self.priority,
            "salted": self.salted,
            "finish": dataclasses.asdict(self.finish),
        }


class Recorder:
    """Remembers outputs. `head` goes into every dump: what the server is."""

    def __init__(self, folder: str, head: dict[str, Any]) -> None:
        self._folder = os.path.abspath(folder)
        self._head = head
        self._records: deque[tuple[float, _Record]] = deque()  # in order of their ends
        self._bytes = 0

    def ended(self, output: Output) -> None:
        """One of the outputs' `on_end`."""
        now = time.monotonic()
        record = _record(output, now)
        self._records.append((now, record))
        self._bytes += record.size
        while self._records and (self._bytes > KEEP_BYTES or now - self._records[0][0] > KEEP_SECONDS):
            self._bytes -= self._records.popleft()[1].size

    def dump(self, reason: str) -> str:
        """Write what is remembered; the path of the file, or nothing when there is nothing to write or the folder does not take it."""
        oldest = time.monotonic() - KEEP_SECONDS
        records = [record for ended, record in self._records if ended >= oldest]
        if not records:
            return ""
        name = f"radixpd-crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        path = os.path.join(self._folder, name)
        try:
            with open(path, "xb", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
                file.writelines(self._lines(reason, records))
        except OSError as error:
            logger.error("the crash dump could not be written: %s", error)
            return ""
        logger.error("crash dump: %s", path)
        return path

    def _lines(self, reason: str, records: list[_Record]) -> Iterator[bytes]:
        """The head, then requests in the order of their ends; where the file would grow too long, the earliest are left out."""
        lines, size = [], 0
        for record in reversed(records):
            line = msgspec.json.encode(record.shown()) + b"\n"
            size += len(line)
            if size > FILE_BYTES:
                break
            lines.append(line)
        head = {"reason": reason, "time": round(time.time(), 3), "requests": len(lines), "left_out": len(records) - len(lines)}
        yield msgspec.json.encode({**head, **self._head}) + b"\n"
        yield from reversed(lines)


def _record(output: Output, now: float) -> _Record:
    assert output.finish is not None
    arrived = time.time() - (now - output.arrived)
    seconds = {"tokenized": output.sent - output.arrived, "ended": output.ended - output.arrived}
    if output.queued is not None:
        seconds["planned"] = output.queued
    if output.first:
        seconds |= {"first_token": output.first - output.arrived, "last_token": output.last - output.arrived}
    return _Record(
        rid=output.rid,
        group=output.group,
        arrived=arrived,
        seconds=seconds,
        prompt=np.array(output.prompt, dtype=np.int32),  # not a view of something larger
        output=np.asarray(output.ids, dtype=np.int32),
        cached=output.cached,
        params=output.params,
        priority=output.priority,
        salted=output.salted,
        finish=output.finish,
    )
