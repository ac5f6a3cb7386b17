"""Processes seen from outside: who is left of a session, and how a command line that must fail ends. Used by tests of start and death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ended", "run_to_end", "session_members"]


def session_members(session: int) -> dict[int, str]:
    """Living processes of a session: id -> command line. Zombies do not count."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _, _, member_of = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(member_of) == session and state != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
    return found


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    stderr: str
    seconds: float
    left: dict[int, str]  # processes that it left behind

    @property
    def error(self) -> str:
        """The one error line."""
        lines = [line for line in self.stderr.splitlines() if "error" in line.lower()]
        assert len(lines) == 1, self.stderr
        assert "Traceback" not in self.stderr
        return lines[0]


def run_to_end(*arguments: str, deadline: float = 60, **environment: str) -> Ended:
    """`python -m radixpd.launch_server` with these arguments, which must end by itself."""
    started = time.monotonic()
    command = [sys.executable, "-m", "radixpd.launch_server", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}, start_new_session=True
    )
    try:
        _, stderr = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"still running after {deadline} s: {arguments}") from None
    return Ended(process.returncode, stderr, time.monotonic() - started, session_members(process.pid))
