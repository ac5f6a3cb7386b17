"""An engine inside a program: its processes, and the thread whose event loop talks to them.

The program's own threads and loops are left alone: everything that touches the client or an output runs on this loop, and work is handed
over as coroutines. Invariants: a call ends, with a result, an exception of ours, or the caller's own interruption; once the engine is
gone, calls raise `EngineFailed` at once; after `stop` no process, thread or directory is left. A fork of the program may not use it.
Called by `llm`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from radixpd.config.resolve import Resolved, to_json
from radixpd.errors import ConfigError, EngineFailed
from radixpd.runtime.child import Launch, ending
from radixpd.runtime.client import Client
from radixpd.runtime.private_folder import PrivateFolder

__all__ = ["Embedded"]

STOP_SECONDS = 10.0  # for the processes to end
INTERRUPT_SECONDS = 5.0  # for what a call has started to be aborted, when it is interrupted
TICK = 0.25  # seconds between two calls of `tick`
LAST_RESORT = 10.0  # seconds after the supervisor's watchdog: if that one hangs too
STOPPED = "this LLM has been shut down"

Value = TypeVar("Value")

logger = logging.getLogger(__name__)


class _Job(Generic[Value]):
    """One piece of work on the loop. It can be given up at any moment, also before the loop has heard of it. `future` is set in any case,
    when nothing of the work runs any more; a coroutine that waits for it may cancel it before."""

    def __init__(self, work: Coroutine[Any, Any, Value]) -> None:
        self.future: concurrent.futures.Future[Value] = concurrent.futures.Future()
        self._work = work
        self._task: asyncio.Task[Value] | None = None

    def begin(self) -> None:
        """On the loop."""
        if self.future.done():
            self._work.close()
        else:
            self._task = asyncio.get_running_loop().create_task(self._work)
            self._task.add_done_callback(self._ended)

    def give_up(self) -> None:
        """On the loop, or where the work will never begin."""
        if self._task is not None:
            self._task.cancel()
        elif not self.future.done():
            self._work.close()
            self.future.set_exception(EngineFailed(STOPPED))

    def _ended(self, task: asyncio.Task[Value]) -> None:
        if self.future.done():
            return
        if task.cancelled():
            self.future.set_exception(EngineFailed(STOPPED))
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


class Embedded:
    """Its processes start with it; `wait_ready` comes before any work. `folder` is this engine's own and goes with it."""

    client: Client

    def __init__(self, resolved: Resolved, folder: PrivateFolder, entries: Mapping[str, str]) -> None:
        self._resolved = resolved
        self._directory = folder.path
        self._command = [sys.executable, "-m", "radixpd.runtime.embedded_supervisor", entries["scheduler"], entries["runner"]]
        self._owner = os.getpid()
        self._lock = threading.Lock()  # nothing is handed over once `stop` has begun
        self._stopped = False
        self._refusal = ""
        self._cleanup = contextlib.ExitStack()
        # The supervisor does this; here in case it cannot.
        self._cleanup.callback(folder.close)
        # Not the program's policy: it may choose loops that this thread must not run.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="radixpd", daemon=True)
        self._thread.start()
        try:
            self.call(self._start())
        except BaseException:
            self.stop()
            raise

    def wait_ready(self) -> None:
        """Wait until the engine takes work. What it cannot be started with is a `ConfigError`."""
        self.call(self._opened())

    def call(self, work: Coroutine[Any, Any, Value], *, tick: Callable[[], None] | None = None) -> Value:
        """Run `work` on the loop and wait for it, from any other thread. `tick` is called now and then while it runs.

        An interruption of the waiting thread, at whatever line, gives the work up, and waits a little for it to clean up.
        """
        job = _Job(work)
        try:
            self._hand_over(job)
            while concurrent.futures.wait((job.future,), TICK if tick else None).not_done:
                assert tick is not None
                tick()
        except EngineFailed:
            raise
        except BaseException:
            self._give_up(job)
            concurrent.futures.wait((job.future,), INTERRUPT_SECONDS)
            raise
        return job.future.result()

    async def wait_for(self, work: Coroutine[Any, Any, Value]) -> Value:
        """The same for a coroutine of the program's own loop, whose cancellation cancels the work."""
        job = _Job(work)
        self._hand_over(job)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            self._give_up(job)
            raise

    def stop(self) -> None:
        """End everything. Calls that wait raise `EngineFailed`; a second `stop`, or one in a fork of the program, does nothing."""
        if os.getpid() != self._owner:  # before the lock, which a thread that the fork lacks may have held
            return
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))
        # The last reference to an engine may drop anywhere, also on its own loop.
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * STOP_SECONDS)

    def _hand_over(self, job: _Job[Any]) -> None:
        if os.getpid() != self._owner:
            job.give_up()
            raise EngineFailed("this LLM belongs to the process that made it, not to a fork of it")
        with self._lock:
            if not self._stopped:
                self._loop.call_soon_threadsafe(job.begin)
                return
        job.give_up()
        raise EngineFailed(STOPPED)

    def _give_up(self, job: _Job[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: everything has been given up
            self._loop.call_soon_threadsafe(job.give_up)

    def _run(self) -> None:
        # Signals are for the program's threads. The supervisor inherits the mask and drops it once it ignores them.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> None:
        self._refused = asyncio.Event()
        self.client = Client(self._directory, watchdog=self._resolved.settings.server.watchdog_timeout + LAST_RESORT)
        self._cleanup.callback(self.client.close)
        self._spawn()

    async def _opened(self) -> None:
        waits = [self._loop.create_task(event.wait()) for event in (self.client.ready, self.client.failed, self._refused)]
        try:
            # No deadline: weights may take long, and a process that dies before it is ready ends the wait.
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._refused.is_set():
            raise ConfigError(self._refusal)
        if self.client.failed.is_set():
            raise EngineFailed(self.client.failure)

    def _spawn(self) -> None:
        """Start the supervisor. Everything it takes is given back by `_cleanup`, the last first."""
        reports, report_fd = os.pipe()
        self._cleanup.callback(os.close, reports)
        os.set_blocking(reports, False)
        try:
            supervisor = subprocess.Popen(self._command, stdin=subprocess.PIPE, pass_fds=(report_fd,))
        finally:
            os.close(report_fd)
        self._cleanup.callback(_end_process, supervisor)
        launch = Launch(
            resolved=to_json(self._resolved),
            directory=self._directory,
            parent=self._owner,
            log_level=self._resolved.settings.observe.log_level,
            log_format=self._resolved.settings.observe.log_format,
            report_fd=report_fd,
        )
        _write(supervisor, msgspec.json.encode(launch) + b"\n")
        pidfd = os.pidfd_open(supervisor.pid)
        self._cleanup.callback(os.close, pidfd)
        self._loop.add_reader(pidfd, self._on_exit, supervisor, pidfd, reports)
        self._cleanup.callback(self._loop.remove_reader, pidfd)

    def _on_exit(self, supervisor: subprocess.Popen[bytes], pidfd: int, reports: int) -> None:
        """The supervisor has ended; its children are dead or dying. What they had to say is in the pipe."""
        self._loop.remove_reader(pidfd)
        said: dict[str, str] = {}
        with contextlib.suppress(BlockingIOError):
            for line in os.read(reports, 65536).splitlines():
                said = msgspec.json.decode(line, type=dict[str, str]) | said
        if "refused" in said:
            self._refusal = said["refused"]
            self._refused.set()
        else:
            self.client.fail(said.get("failed", f"the supervisor process {ending(supervisor.wait())}"))

    async def _end(self) -> None:
        """End calls, processes and at last this loop."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._cleanup.close()
        self._loop.stop()


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    # One that is gone already is reported by its pidfd.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    # A word, not the end of file: a fork of the program may hold the pipe too.
    _write(process, b"stop\n")
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("the engine did not end within %g s; killing its supervisor", STOP_SECONDS)
        process.kill()
        process.wait()
    with contextlib.suppress(BrokenPipeError):
        assert process.stdin is not None
        process.stdin.close()
