"""A torch profile of some steps of a runner, written as one Chrome trace into the folder that the settings fixed.

Bounded by a number of steps, so that a forgotten profile ends by itself. Invariant: nothing a client says becomes part of a path. While
the trace is written no step runs: requests wait, none is lost. Called by the runner process between steps.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch

from radixpd.errors import BadRequest

__all__ = ["Profiler"]

logger = logging.getLogger(__name__)


class Profiler:
    """At most one profile at a time. `folder` None: every profile is refused."""

    def __init__(self, folder: str | None, *, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._left = 0  # steps to go
        self._running: torch.profiler.profile | None = None
        self._written = ""  # the latest trace that nobody has asked for

    def start(self, *, steps: int, record_shapes: bool, with_stack: bool) -> None:
        """Record the next `steps` steps."""
        if self._folder is None:
            raise BadRequest("this server writes no profiles: start it with --profile-folder")
        if self._running is not None:
            raise BadRequest("a profile is running; /stop_profile ends it")
        self._written = ""
        self._left = steps
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._running = torch.profiler.profile(activities=activities, record_shapes=record_shapes, with_stack=with_stack)
        self._running.start()
        logger.info("profiling %d steps", steps)

    def stepped(self) -> None:
        """A step has run."""
        if self._running is not None:
            self._left -= 1
            if self._left <= 0:
                self._write()

    def stop(self) -> str:
        """End the profile, if it has not ended by itself; the path of the trace."""
        if self._running is not None:
            self._write()
        if not self._written:
            raise BadRequest("no profile was started, or it could not be written (the log says so)")
        path, self._written = self._written, ""
        return path

    def _write(self) -> None:
        running, self._running = self._running, None
        assert running is not None
        assert self._folder is not None
        began = time.monotonic()
        name = f"radixpd-profile-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank{self._rank}-{time.monotonic_ns() % 10**6:06}.json"
        path = Path(self._folder).absolute() / name
        before = os.umask(0o077)
        try:
            running.stop()
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.error("the profile failed: %s", error)
        finally:
            os.umask(before)
        if not path.is_file():  # torch does not raise for that
            logger.error("the profile could not be written: %s", path)
            return
        self._written = str(path)
        logger.info("profile: %s, written in %.1f s", path, time.monotonic() - began)
