"""Stands in for scheduler and runner: says its name, waits for `shutdown` on a socket, hands it on. `FAKE` names a way to misbehave."""

import os
import socket
import sys

from radixpd.errors import ConfigError
from radixpd.runtime import child
from radixpd.runtime.watchdog import Pulse


def say(line: str) -> None:
    """One write: lines of several processes do not mix."""
    os.write(1, f"{line}\n".encode())


def body(launch: child.Launch) -> int:
    name = launch.name
    if os.environ.get("FAKE") == f"config {name}":
        raise ConfigError("--dtype does not fit\nthis machine")
    if os.environ.get("FAKE") == f"fail {name}":
        child.fail("no such device")
    if os.environ.get("FAKE") == f"crash {name}":
        raise RuntimeError("a bug")
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    inbox.bind(f"{launch.directory}/{name}")
    inbox.settimeout(0.1)
    pulse = Pulse(launch.watch_fd)
    pulse.beat()
    say(f"{name} {os.getpid()}")
    while True:
        try:
            assert inbox.recv(100) == b"shutdown"
            break
        except TimeoutError:
            pulse.beat()
        if os.path.exists(f"{launch.directory}/report"):
            pulse.stuck("the runner process does nothing")
    if name == "scheduler":
        inbox.sendto(b"shutdown", f"{launch.directory}/runner")
    return 0


if __name__ == "__main__":
    assert "torch" not in sys.modules
    child.run("worker", body)
