"""One running program: what all its branches share, and how it ends.

`Run` counts the branches that have work, gives all of it one deadline, and can cancel it. Invariant: when `finish` or `abandon` is done
nothing of the program runs any more, and an error that no reader has been told is raised by `finish`. Made by `program`; branches report
to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixpd_lang.backends.base import Backend
from radixpd_lang.clock import Deadline
from radixpd_lang.errors import ProgramCancelled, ProgramError
from radixpd_lang.loop import event_loop
from radixpd_lang.place import here, place_of
from radixpd_lang.sampling import Sampling
from radixpd_lang.transcript import Prompt

if TYPE_CHECKING:
    from radixpd_lang.branch import Branch

__all__ = ["Options", "Run"]

WEDGED_SECONDS = 5.0  # for cancelled tasks to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a program runs. `hints`: tell the backend which prefixes will be shared; `warmed`: the one that a batch has told it; `seed`:
    every `gen` without one draws its own from it; `recording`: keep the nodes, for a trace."""

    backend: Backend
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stream: bool = False
    hints: bool = True
    warmed: Prompt = field(default_factory=Prompt)
    timeout: float = 600.0
    recording: bool = False


class Run:
    """The branches of one program while they work. `error`: what ended the program, known once `ended` is set."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.backend = options.backend
        self.deadline = Deadline.after(options.timeout)
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._loop = event_loop()
        self._branches: list[Branch] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = threading.Condition()
        self._working = 0
        self._cancelled: ProgramError | None = None
        self._thread = 0

    def enter(self) -> None:
        """The calling thread is the program's."""
        self._thread = threading.get_ident()

    def is_inside(self) -> bool:
        """Whether the program itself asks."""
        return not self.ended.is_set() and threading.get_ident() == self._thread

    def seed_of(self, path: tuple[int, ...], count: int) -> int | None:
        """The seed of the `count`-th generation of a branch: the same in every run with the same seed, another one for each."""
        if self.options.seed is None:
            return None
        words = f"{self.options.seed}/{path}/{count}".encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "little")

    def add(self, branch: Branch) -> None:
        """One more branch."""
        with self._changed:
            self._branches.append(branch)

    def launch(self, branch: Branch) -> None:
        """Let a branch that has been idle work."""
        with self._changed:
            self._working += 1
        self._loop.call_soon_threadsafe(self._spawn, branch)

    def cancel(self, why: ProgramError | None = None) -> None:
        """End everything: open requests are given up, whoever waits gets an error. Does nothing to a program that has ended."""
        if not self.ended.is_set():
            self._cancelled = self._cancelled or why or ProgramCancelled("cancelled", here())
            self._loop.call_soon_threadsafe(self._cancel)

    def why_cancelled(self) -> ProgramError:
        """The error of those who are cancelled. A task may also be cancelled by the end of the process."""
        return self._cancelled or ProgramCancelled("cancelled, since the process ends", self._branches[0].place)

    def finish(self) -> None:
        """Wait until every branch is idle, and raise the first error that nobody has been told."""
        try:
            self._settle()
            failures = [branch.failure for branch in self._branches if branch.failure is not None]
            self.error = next((failure for failure in failures if not failure.seen), self._cancelled)
        except ProgramError as error:
            self.error = error
        self._end()
        if isinstance(self.error, ProgramError):
            raise self.error.again() from self.error.__cause__

    def abandon(self, error: BaseException) -> None:
        """The program itself raised: end the rest. Readers get this error."""
        told = error if isinstance(error, ProgramError) else ProgramError(f"{type(error).__name__}: {error}", place_of(error), error)
        self.cancel(told)
        try:
            self._settle()
        finally:
            self.error = error
            for branch in self._branches:
                branch.feed.close(told)
            self._end()

    def _end(self) -> None:
        for branch in self._branches:
            branch.feed.close(branch.failure)
            branch.names.close()
        self.ended.set()

    def _settle(self) -> None:
        """Until nothing works. Tasks end by themselves at the deadline; a backend that blocks the loop is not waited for."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._working, self.deadline.patience):
                return
        self.cancel()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._working, WEDGED_SECONDS):
                raise self.deadline.missed()

    # On the event loop

    def _spawn(self, branch: Branch) -> None:
        task = self._loop.create_task(branch.work())
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._done(task, branch))
        if self._cancelled is not None:
            task.cancel()

    def _done(self, task: asyncio.Task[None], branch: Branch) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before it began
            branch.fail(self.why_cancelled())
        with self._changed:
            self._working -= 1
            self._changed.notify_all()

    def _cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()
