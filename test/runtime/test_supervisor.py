"""The supervisor's refusals: what does not fit is one line and exit code 2, before anything heavy happens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from radixpd.errors import ConfigError
from radixpd.runtime.supervisor import bind

ROOT = Path(__file__).parents[2]


def launch(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "radixpd.launch_server", *argv]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **env}, timeout=60, check=False
    )


def test_a_busy_port_is_refused_before_the_model_is_looked_at(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launch("--model-path", "/no/such/model", "--port", str(port), TMPDIR=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"radixpd: error: port {port} on 127.0.0.1 is in use: stop what listens there or choose another with --port"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_model_path_is_one_line(tmp_path: Path) -> None:
    done = launch("--model-path", "/no/such/model", "--port", "0", TMPDIR=str(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "/no/such/model" in line
    assert "--model-path" in line
    assert list(tmp_path.iterdir()) == []


def test_bind_listens_at_once_and_refuses_in_no_time() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        began = time.monotonic()
        with pytest.raises(ConfigError, match=f"port {port} .*--port"):
            bind("127.0.0.1", port)
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_a_wrong_host_names_its_flag(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind(host, 0)


@pytest.mark.parametrize("flag", ["--crash-dump-folder", "--profile-folder"])
def test_a_folder_that_cannot_be_is_refused_by_name(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "folder")
    done = launch("--model-path", "/no/such/model", "--port", "0", flag, folder)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"radixpd: error: {flag} {folder}: Not a directory"]


def test_folders_are_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "crashes"
    assert launch("--model-path", "/no/such/model", "--port", "0", "--crash-dump-folder", str(folder)).returncode == 2
    assert folder.stat().st_mode & 0o777 == 0o700
