"""Folders of sockets: they go with whoever made them, and the next one to start removes what a killed one left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from radixpd.errors import ConfigError
from radixpd.runtime.private_folder import PrivateFolder, private_directory, sweep

KILLED = """
import os, signal
from radixpd.runtime.private_folder import PrivateFolder
print(PrivateFolder().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def age(path: Path) -> None:
    """As if it had been made an hour ago."""
    os.utime(path, (0, path.stat().st_mtime - 3600))


def test_the_private_directory_goes_on_every_path() -> None:
    seen: list[Path] = []

    def fail_inside() -> None:
        with private_directory() as directory:
            seen.append(Path(directory))
            assert seen[0].stat().st_mode & 0o777 == 0o700
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert not seen[0].exists()


def test_a_long_tmpdir_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 100)
    with pytest.raises(ConfigError, match="TMPDIR"), private_directory():
        pass


def test_what_a_killed_process_has_left_is_removed_by_the_next_one(home: Path) -> None:
    left = Path(subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60, check=False).stdout.strip())
    (left / "to_api").touch()
    assert left.parent == home
    PrivateFolder().close()
    assert left.exists(), "it may have been made just now, by somebody who has no lock yet"
    age(left)
    PrivateFolder().close()
    assert not left.exists()


def test_folders_in_use_and_those_of_others_stay(home: Path) -> None:
    mine = PrivateFolder()
    (home / "radixpd-models").mkdir()
    (home / "radixpd_file").touch()
    (home / "elsewhere").mkdir()
    (home / "radixpd_link").symlink_to(home / "elsewhere")
    for each in home.iterdir():
        age(each)
    sweep(str(home))
    assert {each.name for each in home.iterdir()} == {Path(mine.path).name, "radixpd-models", "radixpd_file", "elsewhere", "radixpd_link"}
    mine.close()
    assert not Path(mine.path).exists()
