"""Stands in for the API process: drains on SIGTERM, prints what it is told on the control pipe."""

import json
import os
import select
import signal
import socket
import sys

from radixpd.runtime import child
from radixpd.runtime.watchdog import Pulse


def say(line: str) -> None:
    """One write: lines of several processes do not mix."""
    os.write(1, f"{line}\n".encode())


FAKE = os.environ.get("FAKE", "")


def body(launch: child.Launch) -> int:
    if FAKE == "early api":
        say(f"api {os.getpid()}")
        signal.pause()
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    listening = socket.socket(fileno=launch.listen_fd)
    pulse = Pulse(launch.watch_fd)
    pulse.beat()
    say(f"api {os.getpid()} {listening.getsockname()[1]}")
    told_to_stop = 0
    while True:
        ready, _, _ = select.select([woken, child.CONTROL_FD], [], [], 0.1)
        pulse.beat()
        if not ready:
            continue
        if woken in ready:
            woken.recv(100)
            say("draining")
            told_to_stop += 1
            if "stuck" in FAKE or ("twice" in FAKE and told_to_stop == 1):
                continue
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"shutdown", f"{launch.directory}/scheduler")
            signal.set_wakeup_fd(-1)  # a second signal may come after this function has closed its sockets
            return 0
        line = os.read(child.CONTROL_FD, 65536)
        if not line:
            return 1
        say("told " + json.loads(line)["failed"])
        if "deaf" not in FAKE:
            return 1


if __name__ == "__main__":
    assert "torch" not in sys.modules
    child.run("api", body, keep_sigterm=True)
