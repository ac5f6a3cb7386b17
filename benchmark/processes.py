"""Processes that a benchmark starts on this machine: one thread each, ended with the block that started them, waited for with a deadline.

Used by `pd_servers`, `bench_fleet` and `router_fleet`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from radixpd.errors import ConfigError

__all__ = ["environment", "free_port", "healthy", "knows_all", "running", "wait_until"]

STOP = 60.0  # seconds to end after SIGTERM
LOOK = 0.1  # between two looks


def environment() -> dict[str, str]:
    """Of a process that computes with one thread, the same way each time."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


@contextmanager
def running(
    command: Sequence[str], *, stdout: int | IO[bytes] | None = None, stderr: int | IO[bytes] = subprocess.DEVNULL, stop: float = STOP
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own: Ctrl-C reaches the benchmark alone, which ends it. `stop`: seconds until that is by force."""
    process = subprocess.Popen(command, env=environment(), stdout=stdout, stderr=stderr, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(stop)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_until(
    condition: Callable[[], bool], name: str, process: subprocess.Popen[bytes], *, seconds: float, why: Callable[[], str] = str
) -> None:
    """Until the condition holds. ConfigError when the process has ended before, or the time has; `why` is put behind the message."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"{name} ended with code {process.returncode} before it was ready{why()}")
        if condition():
            return
        time.sleep(LOOK)
    raise ConfigError(f"{name} was not ready within {seconds:g} s{why()}")


def healthy(url: str) -> bool:
    """Whether the server at `url` answers well when its health is asked for."""
    try:
        with urllib.request.urlopen(url + "/health", timeout=5):
            return True
    except OSError:
        return False


def knows_all(url: str, *, exact: bool) -> bool:
    """Whether every worker of the balancer at `url` gets requests and, where the policy wants that, its cache is followed."""
    try:
        with urllib.request.urlopen(url + "/workers", timeout=5) as answer:
            return all(each["state"] == "up" and (each["cache_known"] or not exact) for each in json.load(answer)["workers"])
    except OSError:
        return False


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
