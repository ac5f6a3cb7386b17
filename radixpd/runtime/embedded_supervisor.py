"""The supervisor of an engine inside somebody's program: starts scheduler and runner, and ends them when the program is done with them.

`ProcessGroup` wants signals, the main thread and a loop of its own, which a library may not take from the program that uses it, so it
runs in a process of its own. Invariant: this process ends, with its children and their directory, when the program says so, when the
program dies in whatever way, and when a child dies, which it reports. Signals for the program's process group are the program's alone.
Started by `embedded` as `python -m radixpd.runtime.embedded_supervisor SCHEDULER_MODULE RUNNER_MODULE`.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys

from radixpd.config.resolve import from_json
from radixpd.runtime import child
from radixpd.runtime.logs import log_to_stderr
from radixpd.runtime.process_group import ProcessGroup
from radixpd.runtime.supervisor import start_engine
from radixpd.runtime.watchdog import Watchdog

__all__ = ["main"]

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

logger = logging.getLogger(__name__)


def main() -> None:
    """Entry point of the process."""
    # Opened before the check in `read_launch` that the parent is still the program: a process id cannot change hands in between.
    program = os.pidfd_open(os.getppid())
    launch = child.read_launch()
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    log_to_stderr("supervisor", launch.log_level, launch.log_format)
    child.name_process("radixpd")
    entries = {"scheduler": sys.argv[1], "runner": sys.argv[2]}
    settings = from_json(launch.resolved).settings
    watchdog = Watchdog(settings.server.watchdog_timeout, settings.observe.soft_watchdog_timeout)
    try:
        with ProcessGroup(drain_timeout=0, until=(program, child.CONTROL_FD), watchdog=watchdog) as group:
            start_engine(group, entries, launch, pass_fds=(launch.report_fd,))
            code = group.watch()
            if group.failure:
                child.report(launch.report_fd, "failed", group.failure)
    finally:
        shutil.rmtree(launch.directory, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
