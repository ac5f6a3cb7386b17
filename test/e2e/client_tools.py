"""What the tests of public clients need: each client's environment, and the examples of docs/clients.md.

An environment is made once, out of 3rdparty/clients/NAME.txt, beside the one that runs the tests, and kept until its pins change. Where no
package index is reachable the test is skipped. An example is a command, or a Python script, with the output printed below it. Used by
test_clients.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["ROOT", "Example", "client_path", "comparable", "examples", "expected"]

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/clients.md"
DIGITS = 12
INSTALL_SECONDS = 600
UNREACHABLE = ("connection broken", "(from versions: none)", "Temporary failure in name resolution")
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
# What is measured changes from run to run: numbers in a line that has a unit of time or rate.
MEASURED = re.compile(r"\((ms|s)\)|/s(ec)?\b|\bsec\b|elapsed")
NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?\*?")
PADDING = re.compile(r"([ ━─=-])\1+")


def client_path(name: str) -> Path:
    """The folder of a client's programs."""
    pins = ROOT / "3rdparty/clients" / f"{name}.txt"
    home = Path(sys.prefix) / "clients"
    place = home / f"{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:DIGITS]}"
    home.mkdir(exist_ok=True)
    with (home / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            _install(place, pins)
            (place / "done").touch()
    return place / "bin"


def _install(place: Path, pins: Path) -> None:
    """Everything is pinned, so pip has nothing to work out. Environments of older pins go."""
    for old in place.parent.glob(place.name[:-DIGITS] + "?" * DIGITS):
        shutil.rmtree(old)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [place / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    try:
        done = subprocess.run([*pip, "--no-deps", "-r", pins], capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{pins.name} was not installed within {INSTALL_SECONDS} s")
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip(f"no package index is reachable for {pins.name}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Example:
    """One command or script and what it prints."""

    command: list[str]
    output: str

    def run(self, environment: dict[str, str], *, seconds: float = 300) -> str:
        """The output of a run that must succeed."""
        done = subprocess.run(self.command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{self.command[-1]}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout


def examples(section: str, *, url: str) -> Iterator[Example]:
    """The examples of the section with this title, against the server at `url`."""
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(f". {section}\n")
    assert rest, f"docs/clients.md has no section {section}"
    for kind, body, output in BLOCK.findall(rest.partition("\n## ")[0]):
        if kind == "python":
            yield Example(["python", "-c", body.replace("http://127.0.0.1:30000", url)], output)
            continue
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            lines = part.splitlines(keepends=True)
            end = next(n for n, line in enumerate(lines, 1) if not line.endswith("\\\n"))
            yield Example(["bash", "-c", "".join(lines[:end])], "".join(lines[end:]))


def expected(output: str) -> re.Pattern[str]:
    """What matches a run's `comparable` output: `...` is anything, on a line of its own any lines."""
    pieces = [r"(?:.*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n" for line in comparable(output)]
    return re.compile("".join(pieces) + r"\Z")


def comparable(output: str) -> list[str]:
    """The lines of an output without padding, empty lines, and measured numbers."""
    lines = (PADDING.sub(r"\1", line).strip() for line in output.splitlines())
    return [NUMBER.sub("#", line) if MEASURED.search(line) else line for line in lines if line]
