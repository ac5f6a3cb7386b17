"""Who is let in: limits that refuse early, and a waiting line in which tenants take turns."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from aiohttp import web
from mini_lb.lb_stubs import event, stream, until

from radixpd.errors import ConfigError, Overloaded
from radixpd.mini_lb.gate import Gate
from radixpd.mini_lb.settings import parse

TEXT, DONE = event({"text": "x", "meta_info": {"completion_tokens": 1}}), b"data: [DONE]\n\n"
LONG = {"text": "x" * 400_000, "stream": True}  # 10 s by the model that an unknown worker is taken to have


async def start(stubs, balance, *names, flags, **options):
    workers = await stubs(*names, **options)
    lb = await balance("--worker-urls", *(worker.url for worker in workers), *flags)
    await lb.up(len(workers))
    return lb, *workers


def holding(go: asyncio.Event, *, first: bytes = b""):
    """A script that answers short prompts at once and holds long ones until told; `first` comes before that."""

    async def script(request, visit):
        if len(visit.raw) > 1000:
            return await stream(request, *((first,) if first else ()), go, TEXT, DONE)
        return web.json_response({"text": "short", "meta_info": {"completion_tokens": 1}})

    return script


# ---- early rejection -------------------------------------------------------------------------------------------------


async def test_a_first_token_that_would_come_too_late_is_refused_and_nobody_computes_for_it(stubs, balance) -> None:
    go = asyncio.Event()
    lb, worker = await start(stubs, balance, "a", flags=("--slo-ttft-ms", "2000"), script=holding(go))
    long = asyncio.create_task(lb.events(body=LONG))  # idle: let in, though it breaks the limit itself
    await until(lambda: worker.visits, "the long prompt is there")
    async with lb.http.post("/generate", json={"text": "short"}) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) in range(6, 10)  # when as much of it is through as there is too much
        message = (await response.json())["error"]["message"]
    assert message.startswith("the first token would take ")
    assert message.endswith(" s, more than 0.9 of the limit of 2.000 s (--slo-ttft-ms)")
    assert len(worker.visits) == 1
    assert await lb.metric("rejected_total", reason="slo_ttft") == 1
    go.set()
    await long
    assert (await lb.post(body={"text": "short"}))["text"] == "short"
    await until(lb.idle, "all is over")


async def test_a_full_decode_batch_is_refused_by_the_time_per_token(stubs, balance) -> None:
    go = asyncio.Event()
    lb, worker = await start(stubs, balance, "a", flags=("--slo-tpot-ms", "0.01"), script=holding(go, first=TEXT))
    long = asyncio.create_task(lb.events(body=LONG))
    await until(lambda: worker.visits, "somebody decodes")
    answer = await lb.post(body={"text": "short"}, status=429)
    assert "ms, more than 0.9 of the limit of 0.01 ms (--slo-tpot-ms)" in answer["error"]["message"]
    assert await lb.metric("rejected_total", reason="slo_tpot") == 1
    go.set()
    await long
    await until(lb.idle, "all is over")
    await lb.post(body={"text": "short"})


async def test_an_idle_fleet_refuses_nobody(stubs, balance) -> None:
    """Limits that no worker can keep: whoever comes alone is let in all the same, time after time."""
    lb, _ = await start(stubs, balance, "a", flags=("--slo-ttft-ms", "0.01", "--slo-tpot-ms", "0.01"))
    for _ in range(20):
        await lb.post()
        await until(lb.idle, "it is over")


async def test_a_second_try_is_not_refused(stubs, balance) -> None:
    go = asyncio.Event()
    lb, a, b = await start(stubs, balance, "a", "b", flags=("--slo-ttft-ms", "2000"))
    a.script = b.script = holding(go)
    long = asyncio.create_task(lb.events(body=LONG))
    await until(lambda: a.visits or b.visits, "one of them is busy")
    busy, free = (a, b) if a.visits else (b, a)

    async def failing(request, visit):
        return web.Response(status=502)

    free.script = failing
    assert (await lb.post(body={"text": "short"}))["text"] == "short"
    assert [len(free.visits), len(busy.visits)] == [1, 2]
    go.set()
    await long


async def test_time_in_line_counts_as_time_to_the_first_token(stubs, balance) -> None:
    go = asyncio.Event()
    flags = ("--slo-ttft-ms", "1", "--max-concurrent-requests", "1")
    lb, worker = await start(stubs, balance, "a", flags=flags, script=holding(go))
    long = asyncio.create_task(lb.events(body=LONG))
    await until(lambda: worker.visits, "the place is taken")
    late = asyncio.create_task(lb.post(body={"text": "short"}, status=429))
    await until(lambda: lb.parts.gate.waiting, "it waits")
    await asyncio.sleep(0.005)  # what is tested is a time
    go.set()
    await long
    assert "--slo-ttft-ms" in (await late)["error"]["message"]


# ---- tenants ---------------------------------------------------------------------------------------------------------


class Line:
    """A worker that takes one request at a time, and clients of tenants who wait for it."""

    def __init__(self, lb, worker) -> None:
        self.lb, self.worker = lb, worker
        self.served: list[str] = []
        self.go = asyncio.Semaphore(0)
        self.asked: list[asyncio.Task] = []

    async def answer(self, request, visit):
        self.served.append(visit.body["text"])
        await self.go.acquire()
        return web.json_response({"text": "done"})

    async def ask(self, text: str, *, waiting: int, user: str = "", **headers: str) -> asyncio.Task:
        """One more request; returns when so many wait."""
        task = asyncio.create_task(self._post({"text": text, "user": user}, headers))
        self.asked.append(task)
        await until(lambda: self.lb.parts.gate.waiting == waiting and self.worker.visits, f"{waiting} wait")
        return task

    async def _post(self, body, headers) -> int:
        async with self.lb.http.post("/generate", json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def end(self) -> list[int]:
        for _ in self.asked:
            self.go.release()
        statuses = await asyncio.gather(*self.asked)
        await until(self.lb.idle, "all is over")
        return statuses


@pytest.fixture
def line(stubs, balance):
    async def make(*flags) -> Line:
        lb, worker = await start(stubs, balance, "a", flags=("--max-concurrent-requests", "1", *flags))
        made = Line(lb, worker)
        worker.script = made.answer
        return made

    return make


@pytest.mark.parametrize(
    ("fair_by", "flood", "quiet"),
    [
        ("X-Tenant", {"X-Tenant": "flood"}, {"X-Tenant": "quiet"}),
        ("user", {"user": "flood"}, {"user": "quiet"}),
        ("api_key", {"Authorization": "Bearer flood"}, {"Authorization": "Bearer quiet"}),
    ],
)
async def test_a_flood_does_not_raise_anothers_wait_without_bound(line, fair_by, flood, quiet) -> None:
    all_of_it = await line("--fair-by", fair_by)
    for number in range(12):
        await all_of_it.ask(f"flood {number}", waiting=number, **flood)
    for number in range(3):
        await all_of_it.ask(f"quiet {number}", waiting=12 + number, **quiet)
    assert await all_of_it.end() == [200] * 15
    # At most one request of the other tenant before each of its own, beside the one that is at the worker.
    assert [all_of_it.served.index(f"quiet {number}") for number in range(3)] <= [2, 4, 6]
    assert [text for text in all_of_it.served if text.startswith("flood")] == [f"flood {number}" for number in range(12)]


async def test_without_fair_by_the_line_is_one(line) -> None:
    all_of_it = await line()
    for number in range(6):
        await all_of_it.ask(str(number), waiting=number, **{"X-Tenant": "flood" if number < 5 else "quiet"})
    assert await all_of_it.end() == [200] * 6
    assert all_of_it.served == [str(number) for number in range(6)]


async def test_when_the_queue_is_full_the_longest_line_pays(line) -> None:
    all_of_it = await line("--fair-by", "X-Tenant", "--queue-size", "4")
    for number in range(5):
        await all_of_it.ask(f"flood {number}", waiting=number, **{"X-Tenant": "flood"})
    newest = all_of_it.asked[-1]
    await all_of_it.ask("quiet", waiting=4, **{"X-Tenant": "quiet"})
    await until(newest.done, "the flood's newest request is told")
    assert newest.result() == 429
    more = await all_of_it.ask("flood 5", waiting=4, **{"X-Tenant": "flood"})
    await until(more.done, "the flood gets no more room")
    assert sorted(await all_of_it.end()) == [200] * 5 + [429] * 2
    assert all_of_it.served.index("quiet") <= 2
    assert all_of_it.lb.parts.gate.rejected["queue_full"] == 2


async def test_whoever_has_waited_too_long_leaves_room_for_others() -> None:
    gate = Gate(most=1, queue=1, seconds=0.01)
    async with gate.place("a"):
        for _ in range(3):
            with pytest.raises(Overloaded, match="--queue-timeout-secs"):
                await gate.place("a").__aenter__()
            assert gate.waiting == 0
    assert gate.rejected["queue_full"] == 0


def test_a_header_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="--fair-by X Tenant: give user, api_key or the name of a header"):
        parse(["--fair-by", "X Tenant"])
    with pytest.raises(ConfigError, match="--session-header X Session: give the name of a header"):
        parse(["--session-header", "X Session"])


@pytest.mark.parametrize("seed", range(5))
async def test_every_place_is_given_back_whoever_hangs_up(seed) -> None:
    """Tenants come and go, are pushed out, run out of time, hang up: each has one end, and the gate is empty after."""
    draw = random.Random(seed)
    gate, ends = Gate(most=2, queue=5, seconds=0.02), Counter()
    inside = 0

    async def visit(tenant: str) -> None:
        nonlocal inside
        try:
            async with gate.place(tenant):
                inside += 1
                assert inside <= 2
                try:
                    for _ in range(draw.randrange(5)):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1
            ends["served"] += 1
        except Overloaded:
            ends["refused"] += 1
        except asyncio.CancelledError:
            ends["hung up"] += 1
            raise

    tasks = []
    for _ in range(400):
        tasks.append(asyncio.create_task(visit(draw.choice("aaab"))))
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
        if draw.random() < 0.3:
            draw.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(each) for each in results} <= {type(None), asyncio.CancelledError}
    never_begun = sum(isinstance(each, asyncio.CancelledError) for each in results) - ends["hung up"]
    assert sum(ends.values()) + never_begun == 400
    assert ends["served"]
    assert ends["refused"] == sum(gate.rejected.values()) > 0
    assert (gate.open, gate.waiting, inside) == (0, 0, 0)
    await asyncio.wait_for(gate.idle(), 1)
