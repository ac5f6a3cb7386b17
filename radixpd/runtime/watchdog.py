"""Signs of life of the children, and their stacks when one gives none.

Each child has a pipe to its supervisor. The main loop of the child writes a short line at least twice a second (`Pulse.beat`), so a loop
that hangs or a process that is stopped falls silent. Another kind of line reports that a process is stuck; what is neither is part of a
stack dump, which SIGUSR2 makes in every child without the help of its main loop. Invariants: silence is counted in ticks of the
supervisor, so that a machine that was paused as a whole has lost nothing; a child is watched from its first beat on, since weights may
take long to load. `Pulse` is called by the children, `Watchdog` by the process group.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["BEAT", "TICK", "Pulse", "Watchdog"]

BEAT = 0.5  # seconds between two signs of life
TICK = 1.0  # seconds; silence is counted in these
LEAST_TICKS = 5  # fewer would blame a busy machine
PIPE_BYTES = 2**20  # the stacks of many threads; more is lost, never waited for
BEGUN = b"+"  # the child can dump its stack
ALIVE = b"."
STUCK = b"!"
LONGEST_LINE = 4096
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "traced", "Z": "dead"}

logger = logging.getLogger(__name__)


class Pulse:
    """The child's end; `fd` is the launch record's `watch_fd`. Never waits."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._last = 0.0
        if fd >= 0:
            os.set_blocking(fd, False)

    def begun(self) -> None:
        """SIGUSR2 is safe from now on."""
        self._write(BEGUN)

    def beat(self) -> None:
        """Called by every turn of the main loop."""
        now = time.monotonic()
        if now - self._last >= BEAT:
            self._last = now
            self._write(ALIVE)

    def stuck(self, message: str) -> bool:
        """Tell the supervisor that the group must end, and why; False if nobody listens."""
        return self._write(STUCK + " ".join(message.split()).encode()[: LONGEST_LINE - 2])

    def _write(self, line: bytes) -> bool:
        if self._fd < 0:
            return False
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            return os.write(self._fd, line + b"\n") > 0
        return False


@dataclass(slots=True)
class _Ward:
    """One child as its supervisor sees it."""

    name: str
    pid: int
    begun: bool = False
    silent: int | None = None  # ticks since the last sign of life; None before the first
    rest: bytes = b""
    state: str = ""  # when its stack was asked for
    stack: list[str] = field(default_factory=list)
    fresh: bool = False  # lines of the stack came since the last tick


class Watchdog:
    """The supervisor's end. A child silent for `timeout` seconds is stuck; after `soft_timeout` every stack is logged, once. None: never.

    `descriptors` are for the group's `select`; it calls `hear` when one is readable and `tick` every `TICK` seconds.
    """

    def __init__(self, timeout: float | None = None, soft_timeout: float | None = None) -> None:
        self._timeout = _ticks(timeout)
        self._soft = _ticks(soft_timeout)
        self._wards: dict[int, _Ward] = {}  # by descriptor
        self._softly: set[str] = set()  # whose silence has been logged

    def open(self) -> tuple[int, int]:
        """A pipe for a child that is about to start: (the supervisor's end, the child's end)."""
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        with contextlib.suppress(OSError):  # the machine may allow less
            fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return ours, theirs

    def watch(self, fd: int, name: str, pid: int) -> None:
        """The child has started."""
        self._wards[fd] = _Ward(name, pid)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Of children that still hold their end."""
        return tuple(self._wards)

    def hear(self, fd: int) -> str:
        """Take in what has come; a report that a process is stuck, or nothing. At the end of file the descriptor is closed."""
        ward = self._wards[fd]
        report, ended = self._take_in(fd, ward)
        if ended:
            self._log_stack(ward)
            del self._wards[fd]
            os.close(fd)
        return report

    def tick(self) -> str:
        """A tick has passed: log stacks that have come, count silence; who is stuck, or nothing."""
        for ward in self._wards.values():
            if not ward.fresh:
                self._log_stack(ward)
            ward.fresh = False
            if ward.silent is not None:
                ward.silent += 1
        for ward in self._wards.values():
            silent = ward.silent or 0
            if silent >= self._timeout:
                return f"the {ward.name} process has not answered for {self._timeout * TICK:g} s (--watchdog-timeout)"
            if silent >= self._soft and ward.name not in self._softly:
                self._softly.add(ward.name)
                seconds = self._soft * TICK
                logger.warning("the %s process has not answered for %g s (--soft-watchdog-timeout); stacks follow", ward.name, seconds)
                if report := self.dump():
                    return report
        return ""

    def dump(self, *, wake: bool = False) -> str:
        """Ask every child for its stack. One that is stopped answers only when it is woken, which nobody but its end may do.

        Returns a report that is heard on the way, as `hear` does.
        """
        report = ""
        for fd, ward in self._wards.items():
            # What it said last may not have been heard yet, and matters: that it can dump at all.
            report = self._take_in(fd, ward)[0] or report
            if ward.begun:
                ward.state = _state(ward.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ward.pid, signal.SIGUSR2)
                    if wake:
                        os.kill(ward.pid, signal.SIGCONT)
        return report

    def close(self) -> None:
        """Log what has come and let go; the children are gone or about to be."""
        for fd in self.descriptors:
            self.hear(fd)
            if fd in self._wards:
                self._log_stack(self._wards.pop(fd))
                os.close(fd)

    def _take_in(self, fd: int, ward: _Ward) -> tuple[str, bool]:
        """What has come: a report or nothing, and whether the child has let go of its end."""
        report = ""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(fd, 65536):
                *lines, ward.rest = (ward.rest + data).split(b"\n")
                for line in lines:
                    report = report or self._line(ward, line)
                if len(ward.rest) > LONGEST_LINE:
                    ward.rest = b""
            return report, True
        return report, False

    def _line(self, ward: _Ward, line: bytes) -> str:
        if line.startswith(STUCK):
            return line[1:].decode(errors="replace")
        if line == BEGUN:
            ward.begun = True
        elif line == ALIVE:
            ward.silent = 0
            self._softly.discard(ward.name)
        else:
            ward.stack.append(line.decode(errors="replace"))
            ward.fresh = True
        return ""

    def _log_stack(self, ward: _Ward) -> None:
        if ward.stack:
            state = f", {ward.state} when asked" if ward.state else ""
            logger.warning("stack of the %s process (pid %d%s):\n%s", ward.name, ward.pid, state, "\n".join(ward.stack))
            ward.stack.clear()
            ward.state = ""


def _ticks(seconds: float | None) -> float:
    return math.inf if seconds is None else max(LEAST_TICKS, math.ceil(seconds / TICK))


def _state(pid: int) -> str:
    """What the kernel says a process is doing: this tells one that is stopped from one that computes."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""
    return STATES.get(letter, letter)
