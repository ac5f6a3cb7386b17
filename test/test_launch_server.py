"""The entry point alone: exit codes, one line on standard error, and no torch for `--help`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def launch(*argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", "radixpd.launch_server", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


def split(standard_error: str) -> tuple[str, list[str]]:
    """The names of imported modules, and every other line."""
    lines = standard_error.splitlines()
    return "\n".join(line for line in lines if line.startswith("import time:")), [
        line for line in lines if not line.startswith("import time:")
    ]


def test_help_is_light() -> None:
    done = launch("--help")
    imported, other = split(done.stderr)
    assert done.returncode == 0
    assert "--model-path" in done.stdout
    assert other == []
    assert "radixpd.config.cli" in imported
    assert not [name for name in ("torch", "transformers", "aiohttp", "numpy", "zmq") if f"| {name}\n" in imported.replace("|   ", "| ")]


@pytest.mark.parametrize("argv", [(), ("--prot", "1"), ("--model", "demo", "--enable-lora"), ("--model", "demo", "--port", "x")])
def test_a_fault_is_one_line_and_exit_code_2(argv: tuple[str, ...]) -> None:
    done = launch(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    _, other = split(done.stderr)
    assert len(other) == 1
    assert other[0].startswith("radixpd: error: ")
