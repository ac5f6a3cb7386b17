"""The model runner's grammars: those in use, a bounded cache of those that were, and the compiler's process behind them.

`want` and `forget` come from the scheduler, which counts who uses what; a grammar is ready before a request that has it starts, and stays
until the last one has ended. Nothing here waits: a thread speaks with the compiler (`workshop`), and `fd` becomes readable when `take` has
answers. Invariants: every `want` gets one answer; a compiler that breaks or falls silent is replaced for the next grammar; idle grammars
take at most `IDLE_BYTES`. Owned by the runner process; one thread calls the methods.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from radixpd.core.request import Grammar
from radixpd.grammar.base import Backend, Compiled, Vocabulary, open_backend
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.frames import Frames, frame, write_all
from radixpd.grammar.jump import Encode, Guide

__all__ = ["Answer", "CompileLimits", "Library"]

IDLE_BYTES = 64 * 2**20
IDLE_MOST = 1024
START_SECONDS = 120.0  # for the compiler to load, on a busy machine
GRACE_SECONDS = 30.0
CLOSE_SECONDS = 5.0  # it dies with this process anyway

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Of one grammar."""

    seconds: float = 10.0
    megabytes: int = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """To one `want`. `error` is empty if the grammar is ready; `status` is what a client is told with it."""

    id: int
    error: str = ""
    status: int = 400


@dataclass(slots=True)
class _Pending:
    """A grammar in work, and who waits for it."""

    ids: list[int] = field(default_factory=list)
    forgotten: bool = False


class Library:
    """See above. `vocabulary` is called once, in the thread: reading a vocabulary takes a while."""

    def __init__(self, backend: str, vocabulary: Callable[[], Vocabulary], encode: Encode, limits: CompileLimits = CompileLimits()) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._encode = encode
        self._live: dict[Grammar, Compiled] = {}
        self._idle: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._pending: dict[Grammar, _Pending] = {}
        self._answers: list[Answer] = []
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._line = _CompilerLine(backend, vocabulary, limits, self._arrived)

    def want(self, id: int, grammar: Grammar) -> None:
        """Make it ready; answered by `take`."""
        if grammar in self._idle:
            self._live[grammar] = self._idle.pop(grammar)
        if grammar in self._live:
            self._answer([Answer(id)])
            return
        pending = self._pending.get(grammar)
        if pending is None:
            pending = self._pending[grammar] = _Pending()
            self._line.ask(grammar)
        pending.ids.append(id)
        pending.forgotten = False

    def forget(self, grammar: Grammar) -> None:
        """Nobody uses it any more."""
        if grammar in self._pending:
            self._pending[grammar].forgotten = True
        elif (compiled := self._live.pop(grammar, None)) is not None:
            self._keep(grammar, compiled)

    def take(self) -> list[Answer]:
        """Answers since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        with contextlib.suppress(queue.Empty):
            while True:
                self._settle(self._results.get_nowait())
        answers, self._answers = self._answers, []
        return answers

    def guide(self, grammar: Grammar) -> Guide:
        """An output of a grammar that is ready. Raises `GrammarError` if it is not."""
        compiled = self._live.get(grammar)
        if compiled is None:
            raise GrammarError("the grammar is not ready")
        return Guide(compiled.matcher(), self._encode)

    @property
    def idle_bytes(self) -> int:
        """Memory of grammars that nobody uses."""
        return sum(compiled.size for compiled in self._idle.values())

    def close(self) -> None:
        """End the compiler."""
        self._line.close()
        os.close(self.fd)

    # ---- inner ----------------------------------------------------------------------------------------------------------------

    def _arrived(self, result: _Result) -> None:
        """In the thread."""
        self._results.put(result)
        os.eventfd_write(self.fd, 1)

    def _settle(self, result: _Result) -> None:
        pending = self._pending.pop(result.grammar)
        if result.compiled is not None:
            if pending.forgotten:
                self._keep(result.grammar, result.compiled)
            else:
                self._live[result.grammar] = result.compiled
        error = f"the request's grammar is refused: {result.error}" if result.error and result.status == 400 else result.error
        self._answers += [Answer(id, error, result.status) for id in pending.ids]

    def _answer(self, answers: list[Answer]) -> None:
        self._answers += answers
        os.eventfd_write(self.fd, 1)

    def _keep(self, grammar: Grammar, compiled: Compiled) -> None:
        self._idle[grammar] = compiled
        total = self.idle_bytes
        while total > IDLE_BYTES or len(self._idle) > IDLE_MOST:
            total -= self._idle.popitem(last=False)[1].size


@dataclass(frozen=True, slots=True)
class _Result:
    grammar: Grammar
    compiled: Compiled | None = None
    error: str = ""
    status: int = 400


class _CompilerLine:
    """The thread and the process that it speaks with. Only `ask` and `close` are called from outside."""

    def __init__(
        self, backend: str, vocabulary: Callable[[], Vocabulary], limits: CompileLimits, arrived: Callable[[_Result], None]
    ) -> None:
        self._name = backend
        self._read_vocabulary = vocabulary
        self._limits = limits
        self._arrived = arrived
        self._asked: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None  # from the first grammar on
        self._vocabulary: Vocabulary | None = None
        self._backend: Backend | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._frames = Frames()
        self._open: dict[int, Grammar] = {}
        self._jobs = 0
        self._heard = 0.0
        self._ready = False

    def ask(self, grammar: Grammar) -> None:
        """Compile it; the answer comes through `arrived`."""
        self._asked.put(grammar)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End thread and process."""
        if self._thread is not None:
            self._asked.put(None)
            os.eventfd_write(self._wake, 1)
            self._thread.join(CLOSE_SECONDS)
        os.close(self._wake)

    # ---- in the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            fds, process = [self._wake], self._process
            if process is not None and process.stdout is not None:
                fds.append(process.stdout.fileno())
            ready, _, _ = select.select(fds, [], [], 1.0 if self._open else None)
            if self._wake in ready:
                os.eventfd_read(self._wake)
                if not self._take_asked():
                    self._stop("")
                    return
            # To send may have found the process dead, and closed its pipes.
            if process is self._process and len(fds) > 1 and fds[1] in ready:
                self._hear(os.read(fds[1], 2**20))
            patience = self._limits.seconds + GRACE_SECONDS if self._ready else START_SECONDS
            if self._open and time.monotonic() - self._heard > patience:
                self._stop("the grammar compiler does not answer")

    def _take_asked(self) -> bool:
        """False when there is nothing more to do for ever."""
        with contextlib.suppress(queue.Empty):
            while True:
                grammar = self._asked.get_nowait()
                if grammar is None:
                    return False
                self._send(grammar)
        return True

    def _send(self, grammar: Grammar) -> None:
        self._jobs += 1
        self._open[self._jobs] = grammar
        job = {
            "id": self._jobs,
            "kind": grammar.kind,
            "text": grammar.text,
            "seconds": self._limits.seconds,
            "megabytes": self._limits.megabytes,
        }
        try:
            if self._process is None:
                self._start()
            if len(self._open) == 1:
                self._heard = time.monotonic()
            self._write(frame(job))
        except (OSError, RuntimeError, ImportError, ValueError) as error:
            logger.warning("the grammar compiler cannot be used: %s", error)
            self._stop("the grammar compiler cannot be started")

    def _start(self) -> None:
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        vocabulary = self._vocabulary
        self._frames, self._ready = Frames(), False
        self._process = subprocess.Popen([sys.executable, "-m", "radixpd.grammar.workshop"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        setup = {"backend": self._name, "tokens": tokens, "size": vocabulary.size, "eos_ids": vocabulary.eos_ids}
        self._write(frame(setup))
        if self._backend is None:  # while the process loads its own
            self._backend = open_backend(self._name, vocabulary)
        self._heard = time.monotonic()

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        write_all(self._process.stdin.fileno(), data)

    def _hear(self, data: bytes) -> None:
        if not data:
            self._stop("the grammar compiler has ended")
            return
        try:
            for message, packed in self._frames.feed(data):
                self._heard = time.monotonic()
                if "ready" in message:
                    self._ready = bool(message["ready"])
                    if not self._ready:
                        self._stop(str(message["error"]))
                        return
                    continue
                self._answer(self._open.pop(message["id"]), str(message["error"]), packed)
        except (ValueError, KeyError, RuntimeError) as error:
            logger.warning("the grammar compiler answers nonsense: %s", error)
            self._stop("the grammar compiler is broken")

    def _answer(self, grammar: Grammar, error: str, packed: bytes) -> None:
        assert self._backend is not None
        self._arrived(_Result(grammar, error=error) if error else _Result(grammar, self._backend.unpack(packed)))

    def _stop(self, reason: str) -> None:
        """End the process; whoever waits for it is told."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        waiting, self._open = self._open, {}
        if reason and waiting:
            logger.warning("%s; %d grammars fail", reason, len(waiting))
        for grammar in waiting.values():
            self._arrived(_Result(grammar, error=reason or "the server ends", status=500))
