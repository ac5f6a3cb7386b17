"""A supervisor without a model: the real group, the fake children, a watchdog whose seconds are short. Arguments: drain timeout, fail
grace, drain grace, repeat, and the ticks of silence that the watchdog and the soft watchdog allow (0: for ever)."""

import socket
import sys

from radixpd.config.settings import ServerSettings, Settings
from radixpd.runtime import private_folder, process_group, supervisor, watchdog
from radixpd.runtime.logs import log_to_stderr

TICK = 0.25
ENTRIES = {"api": "fake_api", "scheduler": "fake_worker", "runner": "fake_worker"}


def main() -> int:
    drain, process_group.FAIL_GRACE, process_group.DRAIN_GRACE, process_group.REPEAT = map(float, sys.argv[1:5])
    watchdog.TICK = process_group.TICK = TICK
    dog = watchdog.Watchdog(*(float(ticks) * TICK or None for ticks in sys.argv[5:7]))
    settings = Settings(server=ServerSettings(drain_timeout=drain))
    log_to_stderr("supervisor", "info")
    listener: socket.socket = supervisor.bind("127.0.0.1", 0)
    with private_folder.private_directory() as directory, process_group.ProcessGroup(drain_timeout=drain, watchdog=dog) as group:
        print("directory", directory, flush=True)
        supervisor.start(group, ENTRIES, resolved="{}", directory=directory, listener=listener, settings=settings, began=0.0)
        return group.watch()


if __name__ == "__main__":
    sys.exit(main())
