"""When requests go out: an open loop on a schedule, or conversations whose next question waits for the answer.

Invariant of the open loop: the moment a request is due depends on the schedule alone, never on how the server does. What delays it after
that is told apart in its record: the client's own lateness (`lag`) and --max-concurrency (`held`). The clock is an object, so that tests
run without time. Called by `bench_serving`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import msgspec

from benchmark.backends import Ask, Backend, Prompt
from benchmark.timeline import Failure, Record
from benchmark.workloads import Request

__all__ = ["Clock", "Driver", "LoopWatch", "WallClock"]

BEAT = 0.05  # seconds between two looks at the event loop
EARLIER = Failure("an earlier round failed")

Post = Callable[[bytes, Record], Awaitable[None]]
Gate = contextlib.AbstractAsyncContextManager[object]


class Clock(Protocol):
    """Seconds since some moment, and waiting for one."""

    def now(self) -> float: ...

    async def sleep_until(self, moment: float) -> None: ...


class WallClock:
    """Real time, from 0 when it is made."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    async def sleep_until(self, moment: float) -> None:
        # Also when the moment has passed the loop gets a turn: what was started goes out before more is made ready.
        await asyncio.sleep(max(moment - self.now(), 0.0))


@dataclass(slots=True)
class _Conversation:
    """What one session has said."""

    said: list[tuple[Prompt, Prompt]] = field(default_factory=list)
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Driver:
    """Sends a workload with `post`, which fills a record and raises nothing. `done` hears of every finished request."""

    backend: Backend
    ask: Ask
    post: Post
    clock: Clock
    max_concurrency: int | None = None
    done: Callable[[Record], None] = lambda record: None

    async def run(self, requests: Sequence[Request], arrivals: Sequence[float], *, barrier: bool = False) -> list[Record]:
        """Records in the order of the requests. `arrivals`: seconds from now; of conversations, one for each and for its first round.
        `barrier`: a round begins when every conversation is through with the one before."""
        gate: Gate = contextlib.nullcontext() if self.max_concurrency is None else asyncio.Semaphore(self.max_concurrency)
        if any(request.session is not None for request in requests):
            return await self._conversations(requests, arrivals, gate, barrier)
        zero = self.clock.now()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request, arrival in zip(requests, arrivals, strict=True):
                body = self._encode(request, ())  # made before it is due: encoding costs the schedule nothing
                await self.clock.sleep_until(zero + arrival)
                tasks.append(group.create_task(self._one(request, body, zero + arrival, gate)))
        return [task.result() for task in tasks]

    async def _conversations(self, requests: Sequence[Request], arrivals: Sequence[float], gate: Gate, barrier: bool) -> list[Record]:
        zero = self.clock.now()
        talks = {request.session: _Conversation() for request in requests}
        starts = dict(zip(talks, [zero + arrival for arrival in arrivals], strict=True))
        records: dict[int, Record] = {}
        indexed = sorted(enumerate(requests), key=lambda pair: pair[1].turn)

        async def talk(turns: Sequence[tuple[int, Request]], due: float) -> None:
            await self.clock.sleep_until(due)
            for index, request in turns:
                records[index] = await self._turn(request, talks[request.session], due, gate)
                due = records[index].end

        def side_by_side(turns: Sequence[tuple[int, Request]], dues: dict[int | None, float]) -> list[Awaitable[None]]:
            lists = {session: [pair for pair in turns if pair[1].session == session] for session in talks}
            return [talk(own, dues[session]) for session, own in lists.items()]

        if not barrier:
            await asyncio.gather(*side_by_side(indexed, starts))
        else:
            for _, turns in groupby(indexed, key=lambda pair: pair[1].turn):
                await asyncio.gather(*side_by_side(list(turns), starts))
                starts = dict.fromkeys(talks, self.clock.now())
        return [records[index] for index in range(len(requests))]

    async def _turn(self, request: Request, talk: _Conversation, due: float, gate: Gate) -> Record:
        if talk.broken:
            return self._new(request, due, failure=EARLIER)
        record = await self._one(request, self._encode(request, talk.said), due, gate)
        talk.broken = record.failure is not None
        talk.said.append((request.prompt, record.text if isinstance(request.prompt, str) else record.output_ids))
        return record

    async def _one(self, request: Request, body: bytes, due: float, gate: Gate) -> Record:
        record = self._new(request, due)
        async with gate:
            record.sent = self.clock.now()
            await self.post(body, record)
        self.done(record)
        return record

    def _new(self, request: Request, due: float, failure: Failure | None = None) -> Record:
        now = self.clock.now()
        return Record(
            session=request.session,
            turn=request.turn,
            planned_input=request.input_len,
            asked_output=request.output_len,
            due=due,
            started=now,
            sent=now,
            end=now,
            streamed=self.ask.stream,
            failure=failure,
        )

    def _encode(self, request: Request, said: Sequence[tuple[Prompt, Prompt]]) -> bytes:
        return msgspec.json.encode(self.backend.body(self.ask, said, request.prompt, request.output_len))


class LoopWatch:
    """How late the event loop wakes a task that sleeps a little: what the client adds to every time that it measures."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.late: list[float] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            moment = self._clock.now() + BEAT
            await self._clock.sleep_until(moment)
            self.late.append(self._clock.now() - moment)
