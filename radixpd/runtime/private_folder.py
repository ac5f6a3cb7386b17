"""The folder in which the sockets of one group of processes lie, and the removal of those that were left behind.

Whoever makes a folder holds a lock on it as long as he lives, however he dies: one without a lock belongs to nobody. Invariant: only
folders of this user, with our name, that are older than any start and that nobody holds, are removed. Called by `supervisor`,
`launch_pd` and `llm`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from radixpd.errors import ConfigError

__all__ = ["PrivateFolder", "private_directory", "sweep"]

LONGEST = 80  # a socket's path may have 107 bytes in all
PREFIX = "radixpd_"
FRESH_SECONDS = 60.0  # between its making and its lock


class PrivateFolder:
    """A 0700 folder whose path leaves room for the names of sockets. `close` removes it."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(base) > LONGEST:
            raise ConfigError(f"TMPDIR is too long for a socket's path: {len(base)} characters, at most {LONGEST}")
        sweep(base)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=base)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


@contextmanager
def private_directory() -> Iterator[str]:
    """A folder for the links, removed at the end."""
    folder = PrivateFolder()
    try:
        yield folder.path
    finally:
        folder.close()


def sweep(base: str) -> None:
    """Remove what processes that were killed have left in `base`."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):  # somebody else's, in use, or just gone
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    found = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or time.time() - found.st_mtime < FRESH_SECONDS:
        return
    fd = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(fd)
