"""docs/frontend.md tells the truth: its blocks are one program, which runs as it stands and prints what stands below each line.

With the tiny model only what does not depend on the model's mind is compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.servers import Server

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ASCII = "import builtins\ndef print(*words): builtins.print(ascii(' '.join(map(str, words))))\n"  # one line for each call


def program() -> tuple[str, list[str]]:
    """The code, and the lines that it prints."""
    blocks = BLOCK.findall((ROOT / "docs" / "frontend.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 8
    code = "".join(blocks)
    return code, [line[4:] for line in code.splitlines() if line.startswith("# > ")]


def run(code: str, url: str, folder: Path) -> list[str]:
    """What the program prints."""
    script = folder / "program.py"
    script.write_text(code.replace("http://127.0.0.1:30000", url))
    command = [sys.executable, "-W", "error", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python_frontend")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no connection left open, no task lost
    return done.stdout.splitlines()


def test_the_program_of_frontend_md_runs(server: Server, tmp_path: Path) -> None:
    code, expected = program()
    printed = run(ASCII + code, server.url, tmp_path)
    assert len([line for line in printed if "temperature must be between 0 and 100" in line]) == 1
    assert len([line for line in printed if "gen speech" in line]) == 1  # the trace is one line now
    assert len(printed) == len([line for line in code.splitlines() if re.match(r" *print\(", line)])
    assert len(expected) > len(printed)


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    server = Server("demo", "--max-total-tokens", "16384")
    yield server
    assert server.close() == 0


@pytest.mark.full
def test_the_program_of_frontend_md_prints_what_is_promised(demo: Server, tmp_path: Path) -> None:
    code, expected = program()
    assert run(code, demo.url, tmp_path) == expected
