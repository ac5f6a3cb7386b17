"""The grammar compiler's process: it forks a child for each grammar, so that one that hangs or explodes can be killed alone.

The parent loads the backend once, has one thread, and compiles nothing itself. Invariants: every job gets one answer; a child lives for
`seconds` at most and with `megabytes` of memory beyond what it began with; jobs that have run for a while no longer keep new ones from
starting, so slow grammars do not hold up quick ones. Started by `library` as `python -m radixpd.grammar.workshop`; it ends when its
standard input does.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import select
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixpd.core.request import Grammar
from radixpd.grammar.base import Backend, Compiled, Vocabulary, mask_words, open_backend
from radixpd.grammar.errors import GrammarError, first_line
from radixpd.grammar.frames import Frames, frame, write_all

__all__ = ["MAX_PACKED", "main"]

FRESH = 2  # jobs that may start while as many are younger than FRESH_SECONDS
FRESH_SECONDS = 0.5
MOST = 12  # children at a time
MAX_PACKED = 32 * 2**20
TOO_LARGE = "the grammar takes too much memory to compile"
NICE = 10  # steps of the model come first
TRIAL_TOKENS = 64
TRIAL_SECONDS = 1.0
SLOWEST_MASK = 0.3  # seconds of processor time: everybody in the batch would wait for it at each token
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
NAME = b"radixpd-grammar"


@dataclass(slots=True, eq=False)
class Job:
    """One grammar in work. `pid` 0: not yet started."""

    id: int
    grammar: Grammar
    seconds: float
    megabytes: int
    pid: int = 0
    pipe: int = -1
    began: float = 0.0
    data: bytearray = field(default_factory=bytearray)


class Workshop:
    """All jobs of one process."""

    def __init__(self, backend: Backend, vocabulary: Vocabulary) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []

    def run(self, first: Iterator[tuple[dict[str, Any], bytes]], frames: Frames) -> None:
        """Serve until standard input ends. `first`: jobs that came together with the set-up."""
        self._take(first)
        while True:
            self._start()
            ready, _, _ = select.select([0, *(job.pipe for job in self._running)], [], [], self._patience())
            if 0 in ready:
                data = os.read(0, 2**16)
                if not data:
                    break
                self._take(frames.feed(data))
            now = time.monotonic()
            for job in list(self._running):
                if job.pipe in ready:
                    self._read(job)
                elif now - job.began > job.seconds:
                    self._end(job, error=f"the grammar took longer than {job.seconds:g} s to compile")
        for job in self._running:
            os.kill(job.pid, signal.SIGKILL)

    def _take(self, messages: Iterator[tuple[dict[str, Any], bytes]]) -> None:
        for message, _ in messages:
            grammar = Grammar(message["kind"], message["text"])
            self._waiting.append(Job(message["id"], grammar, message["seconds"], message["megabytes"]))

    def _patience(self) -> float | None:
        now = time.monotonic()
        waits = [job.began + job.seconds - now for job in self._running]
        if self._waiting:
            waits += [job.began + FRESH_SECONDS - now for job in self._running if now - job.began < FRESH_SECONDS]
        return max(0.0, min(waits)) + 0.001 if waits else None

    def _start(self) -> None:
        while self._waiting and len(self._running) < MOST:
            now = time.monotonic()
            if sum(now - job.began < FRESH_SECONDS for job in self._running) >= FRESH:
                return
            job = self._waiting.popleft()
            reading, writing = os.pipe()
            job.pid, job.began = os.fork(), now
            if not job.pid:
                os.close(reading)
                self._child(job, writing)
            os.close(writing)
            job.pipe = reading
            self._running.append(job)

    def _child(self, job: Job, writing: int) -> None:
        """The life of a child."""
        code = 1
        try:
            _die_with_parent()
            os.nice(NICE)
            _limit(job)
            message, packed = _compile(self._backend, self._vocabulary, job.grammar)
            write_all(writing, frame(message, packed))
            code = 0
        finally:
            os._exit(code)

    def _read(self, job: Job) -> None:
        data = os.read(job.pipe, 2**20)
        job.data += data
        if len(job.data) > MAX_PACKED + 2**16:
            self._end(job, error="the compiled grammar is too large")
        elif not data:
            self._end(job)

    def _end(self, job: Job, *, error: str = "") -> None:
        self._running.remove(job)
        os.close(job.pipe)
        os.kill(job.pid, signal.SIGKILL)  # a zombie does not mind
        os.waitpid(job.pid, 0)
        answers = [] if error else list(Frames().feed(bytes(job.data)))
        if answers:
            message, packed = answers[0]
            write_all(1, frame({"id": job.id, "error": str(message["error"])}, packed))
            return
        error = error or f"the grammar took more than {job.megabytes} MB of memory to compile, or broke its compiler"
        write_all(1, frame({"id": job.id, "error": error}))


def _limit(job: Job) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    most = used + job.megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # Should whoever kills it be gone.
    seconds = int(job.seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _compile(backend: Backend, vocabulary: Vocabulary, grammar: Grammar) -> tuple[dict[str, Any], bytes]:
    try:
        compiled = backend.compile(grammar)
        _try(compiled, vocabulary)
        packed = backend.pack(compiled)
    except MemoryError:
        return {"error": TOO_LARGE}, b""
    except Exception as error:  # whatever a backend raises is the end of this grammar alone
        line = first_line(error)
        return {"error": TOO_LARGE if "bad_alloc" in line else line}, b""  # as C++ says it
    if len(packed) > MAX_PACKED:
        return {"error": "the compiled grammar is too large"}, b""
    return {"error": ""}, packed


def _try(compiled: Compiled, vocabulary: Vocabulary) -> None:
    """Write something: a grammar whose masks take long would hold up everybody else's tokens."""
    matcher, row, chance = compiled.matcher(), np.zeros(mask_words(vocabulary.size), dtype=np.int32), random.Random(0)
    until = time.monotonic() + TRIAL_SECONDS
    for _ in range(TRIAL_TOKENS):
        began = time.process_time()
        matcher.mask(row)
        matcher.forced()
        if time.process_time() - began > SLOWEST_MASK:
            raise GrammarError("the grammar is too slow: what may come next takes too long to find out")
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.size])
        if not len(allowed):
            raise GrammarError("the grammar allows nothing: no text fits it")
        matcher.accept(int(chance.choice(allowed)))
        if matcher.ended or time.monotonic() > until:
            return


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NAME, NAME, 0, 0, 0)


def main() -> None:
    """Entry point of the process."""
    _die_with_parent()
    # They reach the whole process group; the runner decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    frames, setup = Frames(), None
    messages: Iterator[tuple[dict[str, Any], bytes]] = iter(())
    while setup is None:
        data = os.read(0, 2**16)
        if not data:
            return
        messages = frames.feed(data)
        setup = next(messages, None)
    message, _ = setup
    vocabulary = Vocabulary([token.encode("latin-1") for token in message["tokens"]], message["size"], tuple(message["eos_ids"]))
    try:
        backend = open_backend(message["backend"], vocabulary)
    except Exception as error:  # of this process, whose starter gets the reason
        write_all(1, frame({"ready": False, "error": f"--grammar-backend {message['backend']} cannot be loaded: {first_line(error)}"}))
        return
    write_all(1, frame({"ready": True}))
    Workshop(backend, vocabulary).run(messages, frames)


if __name__ == "__main__":
    main()
