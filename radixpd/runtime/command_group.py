"""Several commands as one: started together, their lines marked with their names, stopped in waves, ended together.

Unlike a `ProcessGroup`, whose children are parts of one server, these are whole programs that drain on SIGTERM. Invariants: signals of the
terminal reach this process alone, which decides who stops when; a command never outlives this process (PR_SET_PDEATHSIG, also on kill -9);
when one ends by itself, all end. Threads only read lines and ask whether everything is ready. Called by `launch_pd`, in the main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from radixpd.runtime.child import EXIT_CONFIG, EXIT_FAILED, EXIT_START, PR_SET_PDEATHSIG, ending

__all__ = ["Command", "CommandGroup"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REPEAT = 2.0  # one stop may arrive as several signals: so long they are the same one
FAIL_GRACE = 5.0  # seconds for the others to end their requests when one has failed
ASK_SECONDS = 0.2  # between two looks at whether all are ready

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """One program. `wave`: those of a lower number stop first."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    wave: int = 0


@dataclass(frozen=True, slots=True)
class _Running:
    command: Command
    process: subprocess.Popen[bytes]
    pidfd: int  # readable when it has exited


class CommandGroup:
    """A context manager: signals are caught from entry on; after exit no command is left, and signals mean nothing more: this process ends,
    with an exit code of its own. `patience`: seconds for a wave to drain."""

    def __init__(self, *, patience: float) -> None:
        self._patience = patience
        self._running: dict[int, _Running] = {}  # by pidfd
        self._state = "running"
        self._wave = 0  # that is being stopped
        self._asked = 0.0
        self._deadline = math.inf
        self._code = 0
        self._over = threading.Event()
        self._readers: list[threading.Thread] = []
        self._lines = threading.Lock()

    def __enter__(self) -> CommandGroup:
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._old_wakeup = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        # Under nohup SIGHUP is ignored, and stays so.
        caught = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in caught:
            signal.signal(number, lambda *_: None)
        self._caught = caught
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each in list(self._running.values()):
            each.process.kill()
            self._reap(each.pidfd)
        self._over.set()
        for reader in self._readers:
            reader.join(FAIL_GRACE)  # the last lines
        for number in self._caught:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._old_wakeup)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def start(self, commands: Sequence[Command], *, ready: Callable[[], bool], on_ready: Callable[[], None]) -> None:
        """Start all. Once `ready` answers True, `on_ready` is called, once; both in a thread."""
        # All before the first thread: what runs between fork and exec must find no lock held.
        for command in commands:
            process = subprocess.Popen(
                command.argv, env=command.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                process_group=0, preexec_fn=_tied_to(os.getpid()),
            )  # fmt: skip
            running = _Running(command, process, os.pidfd_open(process.pid))
            self._running[running.pidfd] = running
            self._selector.register(running.pidfd, selectors.EVENT_READ)
        for running in self._running.values():
            assert running.process.stdout is not None
            reader = threading.Thread(target=self._pass_lines, args=(running.command.name, running.process.stdout), daemon=True)
            reader.start()
            self._readers.append(reader)
        threading.Thread(target=self._until_ready, args=(ready, on_ready), daemon=True).start()

    def watch(self) -> int:
        """Wait until all have ended; 0 if they were told to and ended well."""
        while self._running:
            now = time.monotonic()
            if now >= self._deadline:
                self._late()
                continue
            wait = None if self._deadline == math.inf else self._deadline - now
            for key, _ in self._selector.select(wait):
                if key.fd == self._woken.fileno():
                    self._signalled()
                elif key.fd in self._running:
                    self._exited(self._reap(key.fd))
        return self._code

    # ---- ends -----------------------------------------------------------------------------------------------

    def _signalled(self) -> None:
        if not any(number in STOP_SIGNALS for number in self._woken.recv(4096)) or self._state == "failing":
            return
        if self._state == "running":
            self._state, self._asked = "stopping", time.monotonic()
            self._stop_next_wave()
        elif time.monotonic() - self._asked >= REPEAT:
            logger.warning("told to stop at once")
            self._fail(EXIT_FAILED)

    def _exited(self, ended: _Running) -> None:
        code = ended.process.returncode
        if self._state == "running":
            logger.error("%s %s; ending the others", ended.command.name, ending(code))
            self._fail(code if code in (EXIT_CONFIG, EXIT_START) else EXIT_FAILED)
        elif self._state == "stopping":
            # One that SIGTERM itself has ended was not up yet.
            if code not in (0, -signal.SIGTERM):
                logger.error("%s %s", ended.command.name, ending(code))
                self._code = EXIT_FAILED
            if not any(each.command.wave == self._wave for each in self._running.values()):
                self._stop_next_wave()

    def _stop_next_wave(self) -> None:
        if not self._running:
            return
        self._wave = min(each.command.wave for each in self._running.values())
        self._deadline = time.monotonic() + self._patience
        self._terminate(self._wave)

    def _fail(self, code: int) -> None:
        self._state, self._code = "failing", code
        self._deadline = time.monotonic() + FAIL_GRACE
        self._terminate()

    def _late(self) -> None:
        """The deadline has passed: kill whoever should have ended."""
        for each in list(self._running.values()):
            if self._state == "failing" or each.command.wave == self._wave:
                logger.warning("%s did not end in time", each.command.name)
                each.process.kill()
        self._deadline = math.inf

    def _terminate(self, wave: int | None = None) -> None:
        for each in self._running.values():
            if wave is None or each.command.wave == wave:
                each.process.terminate()

    def _reap(self, pidfd: int) -> _Running:
        ended = self._running.pop(pidfd)
        ended.process.wait()
        self._selector.unregister(pidfd)
        os.close(pidfd)
        return ended

    # ---- threads --------------------------------------------------------------------------------------------

    def _pass_lines(self, name: str, lines: IO[bytes]) -> None:
        """Each line with the name of who wrote it; a JSON line gets it as its first key."""
        with lines, contextlib.suppress(OSError, ValueError):
            for line in lines:
                shown = b'{"server": "%s", %s' % (name.encode(), line[1:]) if line.startswith(b'{"') else b"[%s] %s" % (name.encode(), line)
                with self._lines:
                    sys.stderr.buffer.write(shown)
                    sys.stderr.buffer.flush()

    def _until_ready(self, ready: Callable[[], bool], on_ready: Callable[[], None]) -> None:
        while not self._over.is_set():
            if ready():
                on_ready()
                return
            self._over.wait(ASK_SECONDS)


def _tied_to(parent: int) -> Callable[[], None]:
    """For the new process, before it becomes the command: die with `parent`."""
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here, so that nothing is loaded after the fork

    def tie() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(EXIT_START)  # it died before prctl took hold, so no signal will come

    return tie
