"""The API process's end of the links: sends requests to the scheduler and routes what comes back to `Output` objects.

Invariant: an output stays in `outputs` until the brain has ended it (or the engine has failed), so a rid is never used twice at a time.
A ZMQ descriptor signals edges: the callback drains until nothing is left. A ready scheduler that stays silent for too many ticks of a
timer (ticks, not clock time: a paused API process that wakes up has seen one) counts as failed. Everything runs on one asyncio loop.
Called by the tokenizer manager and by the API process's main.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from typing import Any, Literal

import zmq

from radixpd.core.handoff import Room
from radixpd.core.load import LoadSnapshot
from radixpd.errors import BadRequest, EngineFailed, Overloaded, RadixpdError
from radixpd.runtime.journeys import Ended, Journeys
from radixpd.runtime.links import Addresses, Receiver, Sender
from radixpd.runtime.messages import Abort, Batch, Control, Failed, FromScheduler, Generate, Load, Refused, Reply, RunnerReady, Shutdown
from radixpd.runtime.output import Output

__all__ = ["Client"]

CONTROL_SECONDS = 10.0
TICK = 1.0  # seconds; a ready scheduler says something at least as often
SILENT_TICKS = 5  # without a message: unresponsive. Fewer would blame a busy machine
RATE_WINDOW = 10.0  # seconds over which throughput is measured

logger = logging.getLogger(__name__)


class Client:
    """`directory` is the private directory of the server's sockets; `watchdog` is how long a ready scheduler may be silent, in seconds.

    Build it inside the running loop that will use it.
    """

    def __init__(self, directory: str, *, watchdog: float = 300.0) -> None:
        addresses = Addresses(directory)
        self.outputs: dict[str, Output] = {}
        self.groups: dict[str, set[str]] = {}  # a client's rid -> the rids of its outputs
        self.unstarted: set[str] = set()  # rids whose prompt is not computed yet
        self.journeys = Journeys()
        self.load = LoadSnapshot()
        self.ready = asyncio.Event()
        self.weights_seconds: float | None = None  # that the runner took to load
        self.fingerprint = ""  # of weights and precision, once the runner is ready
        self.failed = asyncio.Event()
        self.failure = ""
        self._idle = asyncio.Event()
        self._idle.set()
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._rates: deque[tuple[float, int]] = deque()
        self._context: zmq.Context[Any] = zmq.Context()
        self._sender = Sender(self._context, addresses.to_scheduler)
        self._receiver: Receiver[FromScheduler] = Receiver(self._context, addresses.to_api, FromScheduler, bind=True)
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._receiver.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._on_readable)
        # Edges before this line are not signalled again.
        self._loop.call_soon(self._on_readable)
        self._open = True
        self._watchdog = max(SILENT_TICKS, math.ceil(watchdog / TICK))  # in ticks
        self._silent = 0  # ticks since the last message
        self._timer = self._loop.call_later(TICK, self._tick)

    @property
    def unresponsive(self) -> bool:
        """Whether a ready scheduler has been silent for longer than a busy machine explains."""
        return self._silent >= SILENT_TICKS

    def submit(self, message: Generate, outputs: tuple[Output, ...]) -> None:
        """Send one prompt; its effects go to `outputs`, one per rid of the message."""
        if self.failed.is_set():
            raise EngineFailed(self.failure)
        for output in outputs:
            assert output.rid not in self.outputs
            self.outputs[output.rid] = output
            self.journeys.begin(output.group)
            self.groups.setdefault(output.group, set()).add(output.rid)
            self.unstarted.add(output.rid)
        self._idle.clear()
        self._sender.send(message)

    def refuse(self, room: Room, error: RadixpdError) -> None:
        """A prompt with this room was turned away: its other half need not wait for it."""
        if not self.failed.is_set():
            self._sender.send(Refused(room, str(error), error.status))

    def abort(self, rid: str, message: str = "aborted by the client", status: int = 499) -> None:
        """Ask the brain to end a request; the output ends when the brain says so."""
        if rid in self.outputs:
            self._sender.send(Abort(rid, message, status))

    async def control(
        self,
        action: str,
        args: dict[str, Any] | None = None,
        *,
        to: Literal["scheduler", "runner"] = "scheduler",
        seconds: float = CONTROL_SECONDS,
    ) -> dict[str, Any]:
        """Ask the scheduler (or, through it, the runner) something outside the request stream."""
        if self.failed.is_set():
            raise EngineFailed(self.failure)
        number = next(self._numbers)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._replies[number] = future
        self._sender.send(Control(number, action, args or {}, to))
        try:
            reply = await asyncio.wait_for(future, seconds)
        except TimeoutError:
            raise Overloaded(f"the {to} did not answer {action} within {seconds:g} s") from None
        finally:
            self._replies.pop(number, None)
        if reply.error:
            raise BadRequest(reply.error)
        return reply.body

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def shutdown(self) -> None:
        """Tell the scheduler to finish what is queued and exit."""
        self._sender.send(Shutdown())

    def fail(self, message: str) -> None:
        """The engine is gone: every open request ends with an error, and so does every later one."""
        if self.failed.is_set():
            return
        logger.error("engine failed: %s", message)
        self.failure = message
        self.failed.set()
        outputs = list(self.outputs.values())
        self.outputs.clear()
        self.groups.clear()
        self.unstarted.clear()
        for output in outputs:
            output.fail(message)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineFailed(message))
        self._idle.set()

    def throughput(self) -> float:
        """Generated tokens a second over the last seconds."""
        now = time.monotonic()
        while self._rates and now - self._rates[0][0] > RATE_WINDOW:
            self._rates.popleft()
        if len(self._rates) < 2:
            return 0.0
        (since, before), (_, after) = self._rates[0], self._rates[-1]
        return (after - before) / (now - since)

    def close(self) -> None:
        """Close the sockets; queued messages get a moment to leave."""
        if not self._open:
            return
        self._open = False
        self._timer.cancel()
        self._loop.remove_reader(self._descriptor)
        self._receiver.close()
        self._sender.close(linger_ms=500)
        self._context.term()

    def _tick(self) -> None:
        # Before it is ready the scheduler has nothing to say: weights may take long.
        if self.ready.is_set():
            self._silent += 1
        if self._silent >= self._watchdog:
            self.fail(f"the scheduler process has not answered for {self._watchdog * TICK:g} s (--watchdog-timeout)")
        else:
            self._timer = self._loop.call_later(TICK, self._tick)

    def _on_readable(self) -> None:
        if not self._open:
            return
        sound = False
        try:
            for message in self._receiver.drain():
                self._silent = 0
                self._route(message)
            sound = True
        finally:
            # An exception here would leave its requests without an end: it ends them all, and the loop logs it.
            if not sound:
                self.fail("the API process could not handle a message of the scheduler")

    def _route(self, message: FromScheduler) -> None:
        if isinstance(message, Batch):
            self._on_batch(message)
        elif isinstance(message, Load):
            self.load = message.load
            self._rates.append((time.monotonic(), message.load.generated_tokens_total))
            self.throughput()
            self.ready.set()
        elif isinstance(message, Reply):
            future = self._replies.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, RunnerReady):
            self.weights_seconds = message.load_seconds
            self.fingerprint = message.fingerprint
        elif isinstance(message, Failed):
            self.fail(message.message)

    def _on_batch(self, batch: Batch) -> None:
        outputs = self.outputs
        changed: dict[str, Output] = {}
        left: list[Output] = []
        for prefilled in batch.prefilled:
            self.unstarted.discard(prefilled.rid)
            if (output := outputs.get(prefilled.rid)) is not None:
                output.start(prefilled)
        for scored in batch.scored:
            if (output := outputs.get(scored.rid)) is not None:
                output.scores.append(scored.scores)
        for step in batch.tokens:
            logprobs = step.logprobs or itertools.repeat(None)
            for rid, token, logprob in zip(step.rids, step.ids.tolist(), logprobs):
                if (output := outputs.get(rid)) is not None:
                    output.receive(token, logprob)
                    changed[rid] = output
        for finished in batch.finished:
            self.unstarted.discard(finished.rid)
            if (output := outputs.pop(finished.rid, None)) is not None:
                self._leave_group(output)
                output.end(finished)
                changed[finished.rid] = output
                left.append(output)
        for output in changed.values():
            if (stop := output.settle()) is not None:
                self._sender.send(stop)
        for output in left:
            if output.kept and (ended := Ended.of(output)) is not None:
                self.journeys.add(output.group, ended)
        if not outputs:
            self._idle.set()

    def _leave_group(self, output: Output) -> None:
        group = self.groups[output.group]
        group.discard(output.rid)
        if not group:
            del self.groups[output.group]
