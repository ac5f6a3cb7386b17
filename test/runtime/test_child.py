"""How a child starts: what it reads, whom it obeys, when it refuses to live."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 20
RECORD = {"resolved": "{}", "directory": "", "parent": os.getpid(), "log_level": "warning"}


def child(code: str, *, record: str | None = None) -> subprocess.Popen[bytes]:
    """A process that runs `code` after `begin`; its standard input holds the record and stays open."""
    source = f"import logging, os, signal, sys\nfrom radixpd.errors import ConfigError\nfrom radixpd.runtime import child\n{code}"
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write((json.dumps(RECORD) + "\n" if record is None else record).encode())
    process.stdin.flush()
    return process


def run(code: str, *, record: str | None = None) -> tuple[int, str, str]:
    process = child(code, record=record)
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out.decode(), err.decode()


def test_the_record_is_read_and_what_follows_is_left_on_the_pipe() -> None:
    code = "launch = child.begin('x')\nprint(launch.log_level, launch.rank, os.read(0, 100))"
    assert run(code, record=json.dumps(RECORD | {"rank": 3}) + "\nfailed\n") == (0, "warning 3 b'failed\\n'\n", "")


def test_it_does_not_start_without_a_parent() -> None:
    code = "child.begin('x')\nprint('alive')"
    assert run(code, record="")[:2] == (3, "")
    assert run(code, record=json.dumps(RECORD | {"parent": 1}) + "\n")[:2] == (3, "")


@pytest.mark.parametrize(("keep", "ends"), [(False, 0), (True, -signal.SIGTERM)])
def test_group_signals_are_ignored_unless_the_child_keeps_sigterm(keep: bool, ends: int) -> None:
    code = f"child.begin('x', keep_sigterm={keep})\nos.kill(os.getpid(), signal.SIGINT)\nos.kill(os.getpid(), signal.SIGTERM)"
    assert run(code)[0] == ends


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("0", 0, ""),
        ("child.fail('two\\nlines')", 3, "two lines\n"),
        ("(_ for _ in ()).throw(ConfigError('--dtype'))", 2, "radixpd: error: --dtype\n"),
    ],
)
def test_the_end_of_the_body_is_the_exit_code(body: str, code: int, words: str) -> None:
    assert run(f"child.run('x', lambda launch: {body})") == (code, "", words)


def test_an_unexpected_exception_leaves_its_trace_and_code_1() -> None:
    code, _, err = run("child.run('x', lambda launch: 1 / 0)")
    assert code == 1
    assert "ERROR x failed" in err
    assert "ZeroDivisionError" in err


def test_the_log_names_the_process_and_keeps_to_its_level() -> None:
    _, _, err = run("child.begin('x')\nlogging.warning('seen')\nlogging.info('not seen')")
    (line,) = err.splitlines()
    assert line.startswith("[")
    assert line.endswith(" x] WARNING seen")


def test_a_warning_of_a_library_has_the_format_too() -> None:
    _, _, err = run(
        "import warnings\nchild.begin('x')\nwarnings.warn('careful')", record=json.dumps(RECORD | {"log_format": "json"}) + "\n"
    )
    (line,) = err.splitlines()
    assert json.loads(line)["process"] == "x"
    assert "UserWarning: careful" in json.loads(line)["message"]


def test_a_process_is_named_and_a_crash_of_native_code_shows_where_it_was() -> None:
    code, out, err = run("child.begin('x')\nprint(open('/proc/self/comm').read(), flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert code == -signal.SIGSEGV
    assert out.strip() == "radixpd-x"
    assert "Fatal Python error: Segmentation fault" in err
