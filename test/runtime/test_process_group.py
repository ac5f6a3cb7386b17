"""The group of processes, with real processes that stand in for the real ones: who dies, who is told, what is left."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]
FAKES = Path(__file__).parent / "fake_children"
CHILDREN = ("runner", "scheduler", "api")
SECONDS = 20


@dataclass
class Host:
    """A running group: its process, its private directory, and per child a pidfd and what it said."""

    process: subprocess.Popen[str]
    directory: Path
    pidfds: dict[str, int]
    pids: dict[str, int]
    port: int

    def end(self, seconds: float = SECONDS) -> tuple[int, str, str]:
        """Exit code, standard output and error, once the host has exited."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def children_are_gone(self, seconds: float = SECONDS) -> bool:
        """Whether every child exits in time (a pidfd is readable once its process has)."""
        return all(select.select([pidfd], [], [], seconds)[0] for pidfd in self.pidfds.values())


Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a group with short graces; whatever a test leaves is killed."""
    hosts: list[Host] = []

    def launch(
        fake: str = "",
        *,
        drain: float = 60,
        fail_grace: float = 3,
        drain_grace: float = 10,
        repeat: float = 60,
        watchdog: int = 0,
        soft: int = 0,
        wait: bool = True,
    ) -> Host:
        process = subprocess.Popen(
            [sys.executable, "-m", "host", *map(str, (drain, fail_grace, drain_grace, repeat, watchdog, soft))],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{FAKES}", "FAKE": fake, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        host = Host(process, Path(read_line(process).split()[1]), {}, {}, 0)
        hosts.append(host)
        while wait and set(host.pids) != set(CHILDREN):
            name, pid, *port = read_line(process).split()
            host.pids[name] = int(pid)
            host.pidfds[name] = os.pidfd_open(int(pid))
            host.port = int(port[0]) if port else host.port
        return host

    yield launch
    for host in hosts:
        host.process.kill()
        host.process.wait(SECONDS)
        for pidfd in host.pidfds.values():
            os.close(pidfd)


def read_line(process: subprocess.Popen[str], stream: IO[str] | None = None) -> str:
    """One line (of standard output), byte by byte: what follows stays readable for `select` and `communicate`."""
    stream = stream or process.stdout
    assert stream is not None
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([stream], [], [], SECONDS)[0], "the group said nothing"
        byte = os.read(stream.fileno(), 1)
        assert byte, "the group ended"
        line += byte
    return line.decode().rstrip("\n")


@pytest.mark.parametrize("name", CHILDREN)
def test_the_death_of_one_child_ends_the_group(start: Start, name: str) -> None:
    host = start()
    os.kill(host.pids[name], signal.SIGKILL)
    code, out, err = host.end()
    assert code == 1
    assert host.children_are_gone(0)
    assert not host.directory.exists()
    assert f"the {name} process was killed by signal 9" in err
    assert (f"told the {name} process was killed by signal 9" in out) == (name != "api")


def test_an_api_that_does_not_react_to_a_failure_is_killed_too(start: Start) -> None:
    host = start("deaf api", fail_grace=0.3)
    os.kill(host.pids["runner"], signal.SIGKILL)
    code, out, _ = host.end()
    assert code == 1
    assert "told the runner" in out
    assert host.children_are_gone(0)


def test_children_die_with_a_killed_parent(start: Start) -> None:
    host = start()
    host.process.kill()
    assert host.children_are_gone(5)


def test_sigterm_drains_and_exits_0(start: Start) -> None:
    host = start()
    host.process.terminate()
    code, out, _ = host.end()
    assert code == 0
    assert "draining" in out
    assert host.children_are_gone(0)
    assert not host.directory.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_process_group_is_one_drain(start: Start, number: signal.Signals) -> None:
    host = start()
    os.killpg(host.process.pid, number)
    code, out, err = host.end()
    assert code == 0, err
    assert "draining" in out
    assert "Traceback" not in err


def test_a_second_signal_soon_after_the_first_is_the_same_one(start: Start) -> None:
    host = start("api that drains when told twice")
    host.process.terminate()
    assert read_line(host.process) == "draining"
    host.process.terminate()
    assert host.process.stderr is not None
    while "the same one" not in read_line(host.process, host.process.stderr):
        pass
    assert host.process.poll() is None
    os.kill(host.pids["api"], signal.SIGTERM)
    code, out, _ = host.end()
    assert code == 0
    assert "told" not in out


@pytest.mark.parametrize("fake", ["stuck api", "stuck deaf api"])
def test_a_later_signal_ends_the_group_and_the_api_is_told(start: Start, fake: str) -> None:
    host = start(fake, repeat=0)
    host.process.terminate()
    assert read_line(host.process) == "draining"
    host.process.terminate()
    assert read_line(host.process) == "told the server was told to stop at once"
    host.process.terminate()  # no effect: the API has its second
    assert host.end(5)[0] == 1
    assert host.children_are_gone(0)
    assert not host.directory.exists()


def test_a_drain_that_takes_too_long_ends(start: Start) -> None:
    host = start("stuck api", drain=0.2, drain_grace=0.2)
    host.process.terminate()
    assert host.end()[0] == 1
    assert host.children_are_gone(0)


def test_an_api_that_is_not_up_yet_has_nothing_to_drain(start: Start) -> None:
    host = start("early api")
    host.process.terminate()
    assert host.end(5)[0] == 0
    assert host.children_are_gone(0)


@pytest.mark.parametrize("name", ["runner", "scheduler"])
@pytest.mark.parametrize(
    ("fake", "code", "line"), [("config", 2, "radixpd: error: --dtype does not fit this machine\n"), ("fail", 3, "no such device\n")]
)
def test_a_child_that_cannot_start_ends_the_group_with_its_line(start: Start, name: str, fake: str, code: int, line: str) -> None:
    host = start(f"{fake} {name}", wait=False)
    got, _, err = host.end()
    assert (got, err) == (code, line)
    assert not host.directory.exists()


def test_a_child_that_crashes_leaves_its_trace(start: Start) -> None:
    host = start("crash runner", wait=False, fail_grace=0.3)
    code, _, err = host.end()
    assert code == 1
    assert "RuntimeError: a bug" in err
    assert "the runner process exited with code 1" in err


def test_a_child_that_exits_0_unasked_is_a_failure(start: Start) -> None:
    host = start()
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    inbox.sendto(b"shutdown", str(host.directory / "runner"))
    inbox.close()
    code, out, _ = host.end()
    assert code == 1
    assert "told the runner process exited with code 0" in out


def test_sigusr2_dumps_the_stack_and_kills_nobody(start: Start) -> None:
    host = start()
    os.kill(host.pids["runner"], signal.SIGUSR2)
    host.process.terminate()
    code, _, err = host.end()
    assert code == 0
    assert f"stack of the runner process (pid {host.pids['runner']})" in err
    assert "fake_worker.py" in err


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_that_stands_still_shows_every_stack_and_ends_the_group(start: Start, name: str) -> None:
    host = start(watchdog=8)
    os.kill(host.pids[name], signal.SIGSTOP)
    code, out, err = host.end()
    assert code == 1
    assert host.children_are_gone(0)
    assert f"the {name} process has not answered for 2 s (--watchdog-timeout); ending the server" in err
    for each in CHILDREN:
        state = "stopped" if each == name else "(sleeping|running)"  # it wakes ten times a second
        assert re.search(rf"stack of the {each} process \(pid {host.pids[each]}, {state} when asked\):", err), err
    assert err.count("most recent call first") >= len(CHILDREN)
    # The API too: woken to dump its stack, it reads what it is told.
    assert f"told the {name} process has not answered for 2 s (--watchdog-timeout)" in out


def test_a_child_may_report_that_another_one_is_stuck(start: Start) -> None:
    host = start()
    (host.directory / "report").touch()
    code, out, err = host.end()
    assert code == 1
    assert "told the runner process does nothing" in out
    for each in CHILDREN:
        assert f"stack of the {each} process" in err, err


def test_the_soft_watchdog_shows_stacks_and_ends_nothing(start: Start) -> None:
    host = start(watchdog=60, soft=6)
    assert host.process.stderr is not None
    os.kill(host.pids["scheduler"], signal.SIGSTOP)
    seen = ""
    while "fake_api.py" not in seen or "fake_worker.py" not in seen:
        seen += read_line(host.process, host.process.stderr)
    assert "the scheduler process has not answered for 1.5 s (--soft-watchdog-timeout); stacks follow" in seen
    assert f"stack of the scheduler process (pid {host.pids['scheduler']}" not in seen  # it stays as it was put
    os.kill(host.pids["scheduler"], signal.SIGCONT)
    while f"stack of the scheduler process (pid {host.pids['scheduler']}, stopped when asked)" not in seen:
        seen += read_line(host.process, host.process.stderr)
    host.process.terminate()
    assert host.end()[0] == 0


def test_a_pause_of_the_whole_group_is_nobodys_silence(start: Start) -> None:
    """A container that is paused, a machine that sleeps: everything stands still for longer than the watchdog allows."""
    host = start(watchdog=8)
    for pid in (host.process.pid, *host.pids.values()):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5)  # the pause itself
    for pid in (host.process.pid, *host.pids.values()):
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)  # what a supervisor needs to be wrong
    assert host.process.poll() is None
    host.process.terminate()
    code, _, err = host.end()
    assert code == 0
    assert "has not answered" not in err


def test_the_api_alone_holds_the_port(start: Start) -> None:
    host = start()
    socket.create_connection(("127.0.0.1", host.port), timeout=SECONDS).close()
    os.kill(host.pids["api"], signal.SIGKILL)
    host.end()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", host.port), timeout=SECONDS)


def test_the_private_directory_is_private(start: Start) -> None:
    assert start().directory.stat().st_mode & 0o777 == 0o700


LATE = """
import signal, sys
from radixpd.runtime.{module} import {group}
with {group}({seconds}=1):
    pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.raise_signal(number)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("module", "group", "seconds"), [("process_group", "ProcessGroup", "drain_timeout"), ("command_group", "CommandGroup", "patience")]
)
def test_op_01_a_signal_after_the_last_child_has_ended_changes_no_exit_code(module: str, group: str, seconds: str) -> None:
    code = LATE.format(module=module, group=group, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=SECONDS, check=False)
    assert done.returncode == 7
