"""Several commands as one: real processes that do nothing but wait, and say what happens to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from e2e.processes import session_members

ROOT = Path(__file__).parents[2]
DEADLINE = 20.0

# A command that says who it is, then waits for SIGTERM and ends with a code; `stubborn` ignores it.
CHILD = """
import os, signal, sys, time
name, code, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def say(line):
    os.write(1, (line + "\\n").encode())  # not print: a signal may come in the middle of another line, and print may not be entered twice
def end(*_):
    say(name + " told")
    if kind != "stubborn":
        sys.exit(code)
signal.signal(signal.SIGTERM, end)
say(name + " up")
say('{"message": "json of ' + name + '"}')
if kind == "dies":
    sys.stdin.read()
    sys.exit(code)
while True:
    time.sleep(60)
"""
PARENT = """
import sys
from radixpd.runtime.command_group import Command, CommandGroup
from radixpd.runtime.logs import log_to_stderr
log_to_stderr("group", "info")
commands = [Command(name, [sys.executable, "-c", {child!r}, name, code, kind], {{}}, wave=int(wave))
            for name, code, kind, wave in (each.split(":") for each in sys.argv[2:])]
with CommandGroup(patience=float(sys.argv[1])) as group:
    seen = []
    def ready():
        seen.append(1)
        return len(seen) > 1
    group.start(commands, ready=ready, on_ready=lambda: print("all ready", flush=True))
    sys.exit(group.watch())
"""


class Group:
    """A parent process with its commands; `wait_for` reads its output up to a line."""

    def __init__(self, *commands: str, patience: float = 10.0) -> None:
        code = textwrap.dedent(PARENT).format(child=CHILD)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(patience), *commands],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        self.lines: list[str] = []

    def wait_for(self, *wanted: str) -> None:
        """Until each of these has been in some line. The test's own deadline bounds it."""
        missing = [word for word in wanted if not any(word in line for line in self.lines)]
        assert self.process.stdout is not None
        while missing:
            line = self.process.stdout.readline()
            assert line, f"ended without {missing}: {self.lines}"
            self.lines.append(line)
            missing = [word for word in missing if word not in line]

    def end(self) -> int:
        out, _ = self.process.communicate(timeout=DEADLINE)
        self.lines += out.splitlines(keepends=True)
        return self.process.returncode

    def gone(self) -> bool:
        deadline = time.monotonic() + DEADLINE
        while session_members(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)  # bounded by the deadline above
        return not session_members(self.process.pid)


@pytest.fixture
def start():
    made = []

    def make(*commands: str, **options) -> Group:
        made.append(Group(*commands, **options))
        return made[-1]

    yield make
    for group in made:
        if group.process.poll() is None:
            os.killpg(group.process.pid, signal.SIGKILL)
            group.process.wait()


def test_lines_carry_names_and_readiness_is_told_once(start) -> None:
    group = start("a:0:waits:0", "b:0:waits:1")
    group.wait_for(
        "[a] a up", "[b] b up", '{"server": "a", "message": "json of a"}', '{"server": "b", "message": "json of b"}', "all ready"
    )
    group.process.terminate()
    assert group.end() == 0
    assert sum("all ready" in line for line in group.lines) == 1
    assert group.gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_waves_stop_in_order(start, number) -> None:
    group = start("late:0:waits:1", "first:0:waits:0", "late2:0:waits:1")
    group.wait_for("late up", "first up", "late2 up")
    group.process.send_signal(number)
    assert group.end() == 0
    told = [line.split()[1] for line in group.lines if line.endswith("told\n")]
    assert told[0] == "first"
    assert sorted(told) == ["first", "late", "late2"]


def test_signals_of_the_terminal_do_not_reach_the_commands(start) -> None:
    """Ctrl-C goes to the foreground process group; only the parent is in it."""
    group = start("first:0:waits:0", "late:0:waits:1")
    group.wait_for("first up", "late up")
    os.killpg(group.process.pid, signal.SIGINT)
    assert group.end() == 0
    assert [line.split()[1] for line in group.lines if line.endswith("told\n")] == ["first", "late"]


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (1, 1), (2, 2), (3, 3), (7, 1)])
def test_one_that_ends_by_itself_ends_all(start, code, expected) -> None:
    group = start(f"quits:{code}:dies:1", "other:0:waits:0")
    assert group.end() == expected
    assert any(f"quits exited with code {code}; ending the others" in line for line in group.lines)
    assert group.gone()


def test_one_that_is_killed_ends_all(start) -> None:
    group = start("a:0:waits:0", "b:0:waits:0")
    group.wait_for("a up", "b up")
    victim = next(pid for pid, line in session_members(group.process.pid).items() if " b 0 waits" in line)
    os.kill(victim, signal.SIGKILL)
    assert group.end() == 1
    assert any("b was killed by signal 9" in line for line in group.lines)
    assert group.gone()


def test_a_bad_end_while_stopping_is_told(start) -> None:
    group = start("a:5:waits:0", "b:0:waits:1")
    group.wait_for("a up", "b up")
    group.process.terminate()
    assert group.end() == 1
    assert any("[b] b told" in line for line in group.lines)


def test_one_that_does_not_stop_is_killed_after_its_patience(start) -> None:
    group = start("deaf:0:stubborn:0", "b:0:waits:1", patience=0.3)
    group.wait_for("deaf up", "b up")
    group.process.terminate()
    assert group.end() == 1
    assert any("deaf did not end in time" in line for line in group.lines)
    assert any("[b] b told" in line for line in group.lines)
    assert group.gone()


def test_kill_minus_nine_of_the_parent_leaves_nobody(start) -> None:
    group = start("a:0:stubborn:0", "b:0:waits:1")
    group.wait_for("a up", "b up")
    group.process.kill()
    group.process.wait()
    assert group.gone()
