"""Workers from a file (`--workers-file`), which is read again when it changes and on SIGHUP.

The file holds the flags' own words, as YAML or JSON: `worker-urls`, `prefill`, `decode`. Its workers join, those that it no longer names
drain; workers of flags and of POST /workers are none of its business. Invariant: a file that cannot be read, or that names nobody, changes
nothing: the fleet stays, the fault is logged once and shown in `/workers`. Only at the start it is fatal. Called by `parts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from radixpd.config.cli import parse_as
from radixpd.config.settings import flag
from radixpd.errors import ConfigError
from radixpd.mini_lb.fleet import Fleet
from radixpd.mini_lb.settings import WorkerSpec, check_fleet, named

__all__ = ["WorkersFile", "read_workers"]

logger = logging.getLogger(__name__)

Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Words:
    """Which workers."""

    worker_urls: tuple[str, ...] = flag((), "servers that answer whole requests", many=True)
    prefill: tuple[str, ...] = flag((), "prefill servers", many=True)
    decode: tuple[str, ...] = flag((), "decode servers", many=True)


@dataclass(frozen=True, slots=True)
class _File:
    """The file's one group."""

    workers: _Words = _Words()


def read_workers(path: str, others: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """The workers of a file, checked together with the `others`; `ConfigError` without the file's name if they cannot be."""
    try:
        if (file := Path(path)).exists() and not (file.is_file() or file.is_dir()):
            raise ConfigError("it is no regular file: a pipe or a device may never end")
        words = parse_as(_File, ["--config", path], program="radixpd.mini_lb", usage="", about="").workers
        found = named(worker_urls=words.worker_urls, prefill=words.prefill, decode=words.decode)
        if not found:
            raise ConfigError("it names no worker: give worker-urls, or prefill and decode")
        check_fleet([*others, *found])
    except (ConfigError, ValueError) as error:  # YAML makes numbers that are too long to be written
        raise ConfigError(str(error).removeprefix(f"--config {path}: ")) from None
    return found


class WorkersFile:
    """One file, looked at every `seconds`. `others`: workers that the flags name.

    It is made before anything runs: a fault in the file is a `ConfigError` then.
    """

    def __init__(self, path: str, others: Sequence[WorkerSpec], *, seconds: float) -> None:
        self._path = path
        self._others = list(others)
        self._seconds = seconds
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._fleet: Fleet
        self._named: dict[str, WorkerSpec] = {}  # what the file said last
        self._late: dict[str, WorkerSpec] = {}  # of them, those whose name is still taken by a worker that drains
        self._stamp = _stamp(path)
        self._first = _first(path, others)
        self.error = ""  # why the file does not count

    def start(self, fleet: Fleet) -> None:
        """Its workers join; from now on it is looked at."""
        self._fleet = fleet
        self._apply(self._first)
        self._task = asyncio.create_task(self._watch())
        self._task.add_done_callback(_watched)

    def reread(self) -> None:
        """Now, whether it has changed or not."""
        self._asked.set()

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await self._asked.wait()
            self._join(dict(self._late))
            stamp = _stamp(self._path)
            if stamp == self._stamp and not self._asked.is_set():
                continue
            self._asked.clear()
            self._stamp = stamp
            try:
                specs = await asyncio.to_thread(read_workers, self._path, self._others)
            except ConfigError as error:
                self.error = str(error)
                logger.error("--workers-file %s: %s; the workers stay as they are", self._path, error)
            else:
                self.error = ""
                self._apply(specs)

    def _apply(self, specs: Sequence[WorkerSpec]) -> None:
        """Add and drain, so that the fleet has what the file says."""
        wanted = {spec.url: spec for spec in specs}
        gone = [url for url, spec in self._named.items() if wanted.get(url) != spec]
        for url in gone:
            if self._fleet.find(url) is not None:
                self._fleet.drain(url)
        new = {url: spec for url, spec in wanted.items() if url in gone or url not in self._named}
        self._named, self._late = wanted, {}
        if new or gone:
            logger.info("--workers-file %s: %d workers join, %d leave", self._path, len(new), len(gone))
        self._join(new)

    def _join(self, specs: dict[str, WorkerSpec]) -> None:
        for url, spec in specs.items():
            there = self._fleet.find(url)
            if there is not None and there.spec != spec:
                self._late[url] = spec  # it drains, or somebody added it otherwise
                continue
            self._late.pop(url, None)
            if there is None or there.draining:
                self._fleet.add(spec)


def _first(path: str, others: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    try:
        return read_workers(path, others)
    except ConfigError as error:
        raise ConfigError(f"--workers-file {path}: {error}") from None


def _stamp(path: str) -> Stamp | None:
    """What changes when the file does; None if it is not there."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _watched(task: asyncio.Task[None]) -> None:
    """Nobody waits for this task: a bug in it must show."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the workers file is no longer looked at", exc_info=error)
