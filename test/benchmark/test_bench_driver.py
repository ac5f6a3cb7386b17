"""When requests go out, in made-up time: the schedule does not follow the server, conversations do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from bench_fakes import FakeClock, run_until_done

from benchmark.backends import BACKENDS, Ask
from benchmark.driver import Driver, LoopWatch
from benchmark.timeline import Failure, Record
from benchmark.workloads import Request

Serve = Callable[[Any], float]


class FakeServer:
    """Answers after `seconds(body)`; keeps what it was sent. An answer's text names its question."""

    def __init__(self, clock: FakeClock, seconds: Serve, *, fails: Callable[[Any], bool] = lambda body: False) -> None:
        self.bodies: list[Any] = []
        self.most = 0
        self._open = 0
        self._clock, self._seconds, self._fails = clock, seconds, fails

    async def post(self, body: bytes, record: Record) -> None:
        asked = msgspec.json.decode(body)
        self.bodies.append(asked)
        self._open += 1
        self.most = max(self.most, self._open)
        await self._clock.sleep_until(self._clock.now() + self._seconds(asked))
        self._open -= 1
        record.end = self._clock.now()
        if self._fails(asked):
            record.failure = Failure("HTTP 500")
        record.text, record.output_ids = f"<{len(self.bodies)}>", [len(self.bodies)]


class LateClock:
    """Wakes everyone so many seconds late."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def now(self) -> float:
        return self._clock.now()

    async def sleep_until(self, moment: float) -> None:
        await self._clock.sleep_until(moment + self._seconds)


def single(count: int) -> list[Request]:
    return [Request(f"prompt {index}", 4, 2) for index in range(count)]


def talks(sessions: int, rounds: int, *, ids: bool = False) -> list[Request]:
    return [
        Request([session, turn] if ids else f"q{session}{turn}", 4, 2, session=session, turn=turn)
        for turn in range(rounds)
        for session in range(sessions)
    ]


def driver(clock: FakeClock, server: FakeServer, backend: str = "radixpd", **fields: Any) -> Driver:
    return Driver(BACKENDS[backend], Ask(), server.post, clock, **fields)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1000.0])
async def test_requests_go_out_on_schedule_however_slow_the_server_is(seconds: float) -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda body: seconds)
    records = await run_until_done(clock, driver(clock, server).run(single(4), [0.0, 1.0, 1.5, 4.0]))
    assert [record.sent for record in records] == [0.0, 1.0, 1.5, 4.0]
    assert [record.lag for record in records] == [0.0] * 4
    assert [record.e2e for record in records] == pytest.approx([seconds] * 4)


async def test_records_come_in_the_order_of_requests() -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda body: 10.0 if body["text"] == "prompt 0" else 1.0)
    records = await run_until_done(clock, driver(clock, server).run(single(3), [0.0, 0.0, 0.0]))
    assert [record.end for record in records] == [10.0, 1.0, 1.0]


async def test_concurrency_holds_requests_back_and_says_how_long() -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda body: 10.0)
    records = await run_until_done(clock, driver(clock, server, max_concurrency=2).run(single(4), [0.0, 1.0, 2.0, 3.0]))
    assert server.most == 2
    assert [record.due for record in records] == [0.0, 1.0, 2.0, 3.0]
    assert [record.held for record in records] == [0.0, 0.0, 8.0, 8.0]
    assert [record.e2e for record in records] == [10.0] * 4  # the wait is not the server's


async def test_a_client_that_is_late_says_so() -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda body: 1.0)
    late = Driver(BACKENDS["radixpd"], Ask(), server.post, LateClock(clock, 0.5))
    records = await run_until_done(clock, late.run(single(2), [0.0, 3.0]))
    assert [record.lag for record in records] == [0.5, 0.5]


async def test_every_finished_request_is_told() -> None:
    clock, told = FakeClock(), list[float]()
    server = FakeServer(clock, lambda body: 1.0)
    await run_until_done(clock, driver(clock, server, done=lambda record: told.append(record.end)).run(single(3), [0.0, 2.0, 2.0]))
    assert told == [1.0, 3.0, 3.0]


async def test_a_question_waits_for_the_answer_and_brings_the_history() -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda body: 1.0)
    records = await run_until_done(clock, driver(clock, server).run(talks(1, 3), [2.0]))
    assert [body["text"] for body in server.bodies] == ["q00", "q00<1>q01", "q00<1>q01<2>q02"]
    assert [record.sent for record in records] == [2.0, 3.0, 4.0]
    assert [record.due for record in records] == [2.0, 3.0, 4.0]


async def test_history_in_ids_and_in_messages() -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda body: 1.0)
    await run_until_done(clock, driver(clock, server).run(talks(1, 2, ids=True), [0.0]))
    assert server.bodies[1]["input_ids"] == [0, 0, 1, 0, 1]
    chat = FakeServer(clock, lambda body: 1.0)
    await run_until_done(clock, driver(clock, chat, "radixpd-oai-chat").run(talks(1, 2), [0.0]))
    assert [(m["role"], m["content"]) for m in chat.bodies[1]["messages"]] == [("user", "q00"), ("assistant", "<1>"), ("user", "q01")]


@pytest.mark.parametrize(("barrier", "sent"), [(False, [0.0, 0.0, 1.0, 5.0]), (True, [0.0, 0.0, 5.0, 5.0])])
async def test_conversations_run_on_their_own_unless_rounds_are_kept(barrier: bool, sent: list[float]) -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda body: 5.0 if body["text"].startswith("q1") else 1.0)
    records = await run_until_done(clock, driver(clock, server).run(talks(2, 2), [0.0, 0.0], barrier=barrier))
    assert [(record.session, record.turn) for record in records] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [record.sent for record in records] == sent
    assert [record.due for record in records] == sent  # waiting for a round is no lateness of the client


@pytest.mark.parametrize("barrier", [False, True])
async def test_a_failed_round_ends_its_conversation_alone(barrier: bool) -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda body: 1.0, fails=lambda body: body["text"] == "q00")
    records = await run_until_done(clock, driver(clock, server).run(talks(2, 3), [0.0, 0.0], barrier=barrier))
    kinds = {(record.session, record.turn): record.failure and record.failure.kind for record in records}
    assert kinds == {
        (0, 0): "HTTP 500", (0, 1): "an earlier round failed", (0, 2): "an earlier round failed",
        (1, 0): None, (1, 1): None, (1, 2): None,
    }  # fmt: skip
    assert len(server.bodies) == 4


async def test_conversations_start_on_the_schedule() -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda body: 10.0)
    records = await run_until_done(clock, driver(clock, server).run(talks(3, 1), [0.0, 1.0, 7.0]))
    assert [record.sent for record in records] == [0.0, 1.0, 7.0]


async def test_the_loop_watch_sees_how_late_it_wakes() -> None:
    clock = FakeClock()
    watch = LoopWatch(LateClock(clock, 0.02))

    async def three_beats() -> None:
        beat = asyncio.ensure_future(watch.run())
        await clock.sleep_until(0.22)
        beat.cancel()

    await run_until_done(clock, three_beats())
    assert watch.late == pytest.approx([0.02, 0.02, 0.02])
