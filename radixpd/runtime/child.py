"""What every child process does at its start, and how it ends when it cannot go on.

The supervisor starts `python -m module` and writes one JSON line, the `Launch` record, to the child's standard input. Standard input
stays open as the control pipe: end of file means the supervisor is gone. Invariant: a child never outlives its supervisor
(PR_SET_PDEATHSIG, also on kill -9). Called first thing by the mains of scheduler, runner and API process, so nothing heavy is
imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from radixpd.errors import ConfigError
from radixpd.runtime.logs import log_to_stderr
from radixpd.runtime.watchdog import Pulse

__all__ = [
    "EXIT_CONFIG", "EXIT_FAILED", "EXIT_START", "Launch", "begin", "ending", "fail", "name_process", "parent_is_gone", "read_launch",
    "report", "run",
]  # fmt: skip

EXIT_FAILED = 1  # something broke; the trace is in the log
EXIT_CONFIG = 2  # a ConfigError; one line on stderr
EXIT_START = 3  # the process cannot start for another reason that one line explains

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
CONTROL_FD = 0
LONGEST_REPORT = 2000  # characters: a line of a pipe is written whole up to 4096 bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """The first line on a child's standard input. `resolved` is the text that `config.resolve.from_json` reads."""

    resolved: str
    directory: str  # of `links.Addresses`
    parent: int  # process id of the supervisor
    log_level: str = "info"
    log_format: str = "text"
    rank: int = 0
    listen_fd: int = -1  # the bound and listening TCP socket; API process only
    began: float = 0.0  # time.monotonic() when the command did
    name: str = ""  # api, scheduler or runner
    watch_fd: int = -1  # where it shows that it is alive, see `watchdog`; -1: nobody watches
    report_fd: int = -1  # where the program that holds this engine reads why it ended; -1: standard error is read by people


def begin(name: str, *, keep_sigterm: bool = False) -> Launch:
    """Tie this process to its parent, read the launch record, set up signals and logging.

    SIGINT and SIGTERM are ignored: they reach the whole process group, and the supervisor alone decides who stops when. The API
    process keeps SIGTERM (`keep_sigterm`), which is the supervisor's order to drain, and handles it itself.
    """
    _die_with_parent()
    launch = read_launch()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not keep_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The supervisor starts children with both blocked, so that none is lost or fatal before this line.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, file=launch.watch_fd if launch.watch_fd >= 0 else sys.stderr, all_threads=True)
    log_to_stderr(name, launch.log_level, launch.log_format)
    name_process(f"radixpd-{name}")
    Pulse(launch.watch_fd).begun()
    return launch


def name_process(name: str) -> None:
    """The name that `ps -o comm`, `top` and `pgrep` show; the kernel keeps 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def read_launch() -> Launch:
    """The record on standard input; ends this process when whoever should have written it is gone."""
    # Unbuffered: what follows the line belongs to whoever reads the control pipe next.
    with open(CONTROL_FD, "rb", buffering=0, closefd=False) as pipe:
        line = pipe.readline()
    if not line:
        sys.exit(EXIT_START)
    launch = msgspec.json.decode(line, type=Launch)
    if os.getppid() != launch.parent:
        # The parent died before prctl took hold, so no signal will come.
        sys.exit(EXIT_START)
    return launch


def parent_is_gone() -> bool:
    """Call when the control pipe is readable and only end of file is expected there."""
    return not os.read(CONTROL_FD, 4096)


def ending(code: int) -> str:
    """How a process with this return code has ended, for a message about it."""
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by signal {-code} ({signal.strsignal(-code)})"


def report(fd: int, kind: str, message: str) -> None:
    """Tell the program that holds this engine why it ends: `refused` (a ConfigError) or `failed`. One line, for the last to read."""
    with contextlib.suppress(OSError):  # it is gone itself
        os.write(fd, msgspec.json.encode({kind: message[:LONGEST_REPORT]}) + b"\n")


def fail(message: str, *, code: int = EXIT_START) -> NoReturn:
    """End this process with one line on stderr; the supervisor ends the group with the same code."""
    print(" ".join(message.split()), file=sys.stderr, flush=True)
    sys.exit(code)


def run(name: str, body: Callable[[Launch], int], *, keep_sigterm: bool = False) -> NoReturn:
    """The main of a child process: begin, run `body`, turn its result or exception into an exit code."""
    launch = begin(name, keep_sigterm=keep_sigterm)
    try:
        code = body(launch)
    except ConfigError as error:
        if launch.report_fd >= 0:
            report(launch.report_fd, "refused", str(error))
            sys.exit(EXIT_CONFIG)
        fail(f"radixpd: error: {error}", code=EXIT_CONFIG)
    except Exception:
        logger.exception("%s failed", name)
        code = EXIT_FAILED
    sys.exit(code)
