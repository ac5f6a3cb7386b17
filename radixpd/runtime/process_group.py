"""The children of one server: start, watch, drain, end. Knows processes and signals, nothing of models or requests.

States: running -> draining (a signal arrived: the API finishes its requests, then all exit) or failing (a child died or is stuck, or a
later signal forces the end: the API tells its clients, then all are killed). Invariants: `watch` waits only in one `select` (exits by
pidfd, signals by wake-up fd, signs of life by pipe, one deadline), and after `close` no child is left. Called by the supervisor, in the
main thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from types import TracebackType

import msgspec

from radixpd.runtime.child import EXIT_CONFIG, EXIT_FAILED, EXIT_START, Launch, ending
from radixpd.runtime.watchdog import TICK, Watchdog

__all__ = ["API", "ProcessGroup"]

API = "api"  # the child that is told first, in draining and in failing
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FAIL_GRACE = 3.0  # seconds for the API to answer open requests with an error
FORCED_GRACE = 1.0  # the same, when a second signal forces the end
REPEAT = 2.0  # one stop may arrive as several signals (from the terminal or `timeout`, and forwarded): so long they are the same one
DRAIN_GRACE = 10.0  # on top of the drain timeout, for what follows the drain
STACK_GRACE = 2.0  # for the stacks of all children to arrive
LAST_GRACE = 5.0  # for the other children once the API has ended well: nothing is left to lose

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Child:
    """A running child and its pidfd, which becomes readable when it exits."""

    name: str
    process: subprocess.Popen[bytes]
    pidfd: int


class ProcessGroup:
    """A context manager: signals are caught from entry on, children die at exit, and with them the process: signals mean nothing more, so
    that its exit code is its own. `until`: descriptors; once one is readable, `watch`
    returns. The `watchdog` says when a child is stuck; the default one waits for ever."""

    def __init__(self, *, drain_timeout: float, until: tuple[int, ...] = (), watchdog: Watchdog | None = None) -> None:
        self.failure = ""  # what ended the group, if it was not told to end
        self._drain_timeout = drain_timeout
        self._until = until
        self._watchdog = watchdog or Watchdog()
        self._next_tick = time.monotonic() + TICK
        self._not_before = 0.0  # a failing group waits so long for stacks
        self._children: dict[int, Child] = {}  # by pidfd; the ones not reaped yet
        self._state = "running"
        self._deadline: float | None = None
        self._asked = 0.0  # when the drain began
        self._code = EXIT_FAILED  # what watch returns

    def __enter__(self) -> ProcessGroup:
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        for descriptor in (self._woken.fileno(), *self._until):
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._old_wakeup = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        # Under nohup SIGHUP is ignored, and stays so.
        caught = [s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        for number in caught:
            signal.signal(number, lambda *_: None)
        self._caught = caught
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        for number in self._caught:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._old_wakeup)
        self._watchdog.close()
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def spawn(self, name: str, module: str, launch: Launch, *, pass_fds: tuple[int, ...] = ()) -> int:
        """Start `python -m module` and hand it its launch record; returns the process id."""
        # The child inherits the mask: a signal to the process group waits until `child.begin` has decided about it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        signs, watch_fd = self._watchdog.open()
        try:
            process = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=(*pass_fds, watch_fd))
        finally:
            os.close(watch_fd)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._watchdog.watch(signs, name, process.pid)
        self._selector.register(signs, selectors.EVENT_READ)
        child = Child(name, process, os.pidfd_open(process.pid))
        self._children[child.pidfd] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ)
        _write_line(child, msgspec.json.encode(replace(launch, parent=os.getpid(), name=name, watch_fd=watch_fd)))
        return process.pid

    def watch(self) -> int:
        """Wait until all children have exited or the deadline has passed; returns the exit code of the server."""
        while self._children:
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                if self._state == "draining":
                    logger.warning("ending what still runs: %s", ", ".join(child.name for child in self._children.values()))
                break
            for key, _ in self._selector.select(min(self._deadline or math.inf, self._next_tick) - now):
                if key.fd == self._woken.fileno():
                    self._signalled()
                elif key.fd in self._until:
                    return 0
                elif key.fd in self._children:
                    self._exited(key.fd)
                elif key.fd in self._watchdog.descriptors:
                    self._heard(key.fd)
            if time.monotonic() >= self._next_tick:
                # One tick, however late: if this process was paused, the others were too.
                self._next_tick = time.monotonic() + TICK
                self._stuck(self._watchdog.tick())
        return self._code

    def close(self) -> None:
        """Kill and reap every child that is left."""
        for child in self._children.values():
            child.process.kill()
        for pidfd in list(self._children):
            self._reap(pidfd)

    def _signalled(self) -> None:
        if not any(number in STOP_SIGNALS for number in self._woken.recv(4096)):
            return
        if self._state == "failing":
            return  # the end is near anyway, and the API still writes its last answers
        if self._state == "draining":
            if time.monotonic() - self._asked < REPEAT:
                logger.info("a stop signal within %g s of the first: the same one", REPEAT)
                return
            self._state = "failing"
            self._tell_api("the server was told to stop at once", grace=FORCED_GRACE)
            return
        logger.info("draining: running requests get %g s; a signal after %g s ends them", self._drain_timeout, REPEAT)
        self._state = "draining"
        self._asked = time.monotonic()
        self._end_within(self._drain_timeout + DRAIN_GRACE)
        api = self._api()
        if api is not None:
            api.process.terminate()

    def _exited(self, pidfd: int) -> None:
        child = self._reap(pidfd)
        code = child.process.returncode
        # An API process that SIGTERM itself has ended was not up yet: nothing to drain.
        early = child.name == API and code == -signal.SIGTERM
        if self._state == "draining" and (code == 0 or early):
            if child.name == API:
                self._code = 0
                self._end_within(0 if early else LAST_GRACE)
        elif self._state != "failing":
            self._fail(child.name, code)
        elif child.name == API:
            self._end_within(0)

    def _heard(self, fd: int) -> None:
        report = self._watchdog.hear(fd)
        if fd not in self._watchdog.descriptors:
            self._selector.unregister(fd)
        self._stuck(report)

    def _stuck(self, message: str) -> None:
        """A child does not go on: every child shows where it is, then the group ends."""
        if not message or self._state == "failing":
            return
        self._state = "failing"
        self._code = EXIT_FAILED
        self._watchdog.dump(wake=True)
        self._not_before = time.monotonic() + STACK_GRACE
        self._tell_api(message, grace=FAIL_GRACE)

    def _fail(self, name: str, code: int) -> None:
        self._state = "failing"
        if code in (EXIT_CONFIG, EXIT_START):
            # It has said why, in one line, and no request can be open.
            self._code = code
            self._end_within(0)
            return
        message = f"the {name} process {ending(code)}"
        self._code = EXIT_FAILED
        self._tell_api(message, grace=FAIL_GRACE)

    def _tell_api(self, message: str, *, grace: float) -> None:
        """Let the API, if it lives, end its requests with this error; then everything ends."""
        logger.error("%s; ending the server", message)
        self.failure = message
        api = self._api()
        self._end_within(grace if api else 0)
        if api is not None:
            _write_line(api, json.dumps({"failed": message}).encode())

    def _api(self) -> Child | None:
        return next((child for child in self._children.values() if child.name == API), None)

    def _end_within(self, seconds: float) -> None:
        self._deadline = max(time.monotonic() + seconds, self._not_before)

    def _reap(self, pidfd: int) -> Child:
        child = self._children.pop(pidfd)
        child.process.wait()
        if child.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                child.process.stdin.close()
        self._selector.unregister(pidfd)
        os.close(pidfd)
        return child


def _write_line(child: Child, line: bytes) -> None:
    assert child.process.stdin is not None
    # A child that is gone already is reported by its pidfd.
    with contextlib.suppress(BrokenPipeError):
        child.process.stdin.write(line + b"\n")
        child.process.stdin.flush()
