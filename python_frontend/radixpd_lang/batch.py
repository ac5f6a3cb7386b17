"""`run_batch`: one program for many arguments, in threads, and the prefix that all of them share computed first.

States come in the order of the batch. A failure stays in its own state. Leaving early, by an error, Ctrl-C or because nobody takes more
states, cancels what runs and starts nothing more. Called by `program`.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

from radixpd_lang import loop
from radixpd_lang.errors import BackendError
from radixpd_lang.interpreter import WORTH_WARMING
from radixpd_lang.progress import Progress
from radixpd_lang.run import Options, Run
from radixpd_lang.state import ProgramState
from radixpd_lang.trace import first_prompt
from radixpd_lang.transcript import Prompt, common_prompt

if TYPE_CHECKING:
    from radixpd_lang.program import Function

__all__ = ["Batch", "constant_prefix"]

SAMPLES = 4  # programs that are traced for the prefix
LOOK_AHEAD = 64  # of a batch without a length, so many are looked at first
MAX_THREADS = 4096

log = logging.getLogger("radixpd_lang")


class Batch:
    """One call of `run_batch`."""

    def __init__(
        self, program: Function, options: Options, batch: Iterable[Mapping[str, Any]], threads: int | Literal["auto"], progress_bar: bool
    ) -> None:
        if threads != "auto" and not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"num_threads must be between 1 and {MAX_THREADS} or 'auto', got {threads}")
        self._threads = max(96, 16 * (os.cpu_count() or 1)) if threads == "auto" else threads
        self._program = program
        self._options = options
        rest = iter(batch)
        self._head = list(batch) if isinstance(batch, Sequence) else list(itertools.islice(rest, LOOK_AHEAD))
        self._calls = iter(self._head) if isinstance(batch, Sequence) else itertools.chain(self._head, rest)
        for index, call in enumerate(self._head):
            program.check((), call, where=f"batch[{index}]: ")
        self._progress = Progress(program.name, len(self._head) if isinstance(batch, Sequence) else None) if progress_bar else None
        self._running: set[Run] = set()
        self._lock = threading.Lock()
        self._over = False

    def states(self, *, lazily: bool) -> Iterator[ProgramState]:
        """All states; `lazily` starts only some more programs than were taken."""
        if self._options.hints and len(self._head) > 1:
            self._warm()
        failures: list[BaseException] = []
        waiting: deque[Future[ProgramState]] = deque()
        ahead = 2 * self._threads if lazily else None
        with ThreadPoolExecutor(self._threads, thread_name_prefix=self._program.name) as pool:
            try:
                for index, call in enumerate(self._calls):
                    waiting.append(pool.submit(self._one, index, call))
                    if len(waiting) == ahead:
                        yield self._taken(waiting, failures)
                while waiting:
                    yield self._taken(waiting, failures)
            finally:
                self._end(waiting)
        if failures:
            warnings.warn(f"{len(failures)} of the programs failed; the first error: {failures[0]}", stacklevel=3)

    def _taken(self, waiting: deque[Future[ProgramState]], failures: list[BaseException]) -> ProgramState:
        state = waiting[0].result()  # a program ends at its own deadline
        waiting.popleft()
        error = state.error_so_far()
        failures += [error] if error else []
        return state

    def _one(self, index: int, call: Mapping[str, Any]) -> ProgramState:
        seed = self._options.seed
        options = self._options if seed is None else replace(self._options, seed=seed + index)
        execution = self._program.prepare(options, (), call)
        with self._lock:
            self._running.add(execution.run)
            if self._over:
                execution.run.cancel()
        try:
            execution.execute_quietly()
        finally:
            with self._lock:
                self._running.discard(execution.run)
        if self._progress:
            self._progress.advance(failed=execution.run.error is not None)
        return execution.state

    def _end(self, waiting: Iterable[Future[ProgramState]]) -> None:
        for future in waiting:
            future.cancel()
        with self._lock:
            self._over = True
            for run in self._running:
                run.cancel()
        if self._progress:
            self._progress.close()

    def _warm(self) -> None:
        prefix = constant_prefix(self._program, self._head, self._options)
        if prefix.size < WORTH_WARMING:
            return
        try:
            loop.call(self._options.backend.warm(prefix), self._options.timeout)
        except (BackendError, TimeoutError) as error:
            log.warning("the common prefix of a batch was not computed in advance: %s", error)
            return
        self._options = replace(self._options, warmed=prefix)


def constant_prefix(program: Function, calls: Sequence[Mapping[str, Any]], options: Options) -> Prompt:
    """What the first prompts of some of these programs, spread over the batch, begin with."""
    count = min(SAMPLES, len(calls))
    chosen = [calls[index * (len(calls) - 1) // max(count - 1, 1)] for index in range(count)]
    prompts = [first_prompt(program, call, options) for call in chosen]
    if not prompts or None in prompts:
        return Prompt()
    return reduce(common_prompt, [prompt for prompt in prompts if prompt is not None])
