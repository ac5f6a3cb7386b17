"""Directories that are expensive to make, made once: `$XDG_CACHE_HOME/radixpd/<name>` (or below ~/.cache).

Invariant: an entry under its final name is complete and on disk. It is built beside it under a lock, flushed, and renamed; the kernel drops
the lock of a builder that dies, and the next one removes what it left. Called by `model_files`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from radixpd.errors import ConfigError

__all__ = ["cached", "fingerprint"]


def fingerprint(files: Iterable[Path], version: str) -> str:
    """Changes when a file, its place, or the builder's version changes; reads no contents."""
    digest = hashlib.sha256(version.encode())
    for file in files:
        path = file.resolve()
        state = path.stat()
        digest.update(f"\0{path}\0{state.st_size}\0{state.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The entry `name`; `build(directory)` fills a new one. Of two callers at once one builds and the other waits."""
    final = _root() / name
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with (final.parent / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not final.is_dir():
                _build(final, build)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write the cache directory {final.parent} ({reason}); set XDG_CACHE_HOME to another") from error
    return final


def _build(final: Path, build: Callable[[Path], None]) -> None:
    working = final.with_name(final.name + ".part")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir()
    try:
        build(working)
        for path in [*working.iterdir(), working]:
            _flush(path)
        working.rename(final)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    _flush(final.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "radixpd"
