"""The fleet: who gets requests, how that changes while the balancer runs, and what it shows of it."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import pytest
from aiohttp import web
from mini_lb.lb_stubs import DEADLINE, broken, stream, until

DONE = b"data: [DONE]\n\n"
LOAD = {
    "running": 2, "waiting": 1, "parked": 1, "max_running": 8, "pages": 100, "free_pages": 10, "tree_pages": 60, "locked_pages": 20,
    "page_size": 16, "steps_total": 500,
}  # fmt: skip


async def shown(lb, url) -> dict:
    async with lb.http.get("/workers") as response:
        return next((each for each in (await response.json())["workers"] if each["url"] == url), {})


async def test_rt_11_it_starts_with_any_worker_up(stubs, balance) -> None:
    a, b = await stubs("a", "b")
    await b.stop()
    lb = await balance("--worker-urls", a.url, b.url)
    await lb.up(1)
    assert [(await lb.post())["text"] for _ in range(4)] == ["a"] * 4
    await b.start()
    await lb.up(2)
    assert {(await lb.post())["text"] for _ in range(4)} == {"a", "b"}


async def test_it_starts_with_none(stubs, balance) -> None:
    (a,) = await stubs("a")
    await a.stop()
    lb = await balance("--worker-urls", a.url)
    async with lb.http.get("/health") as response:
        assert response.status == 503
    async with lb.http.post("/generate", json={"text": "a"}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["message"] == "no worker is available"
    await a.start()
    await lb.up(1)
    assert (await lb.post())["text"] == "a"
    async with lb.http.get("/health") as response:
        assert response.status == 200


async def test_rt_07_models_come_from_a_worker_that_lives(stubs, balance) -> None:
    a, b = await stubs("a", "b")
    lb = await balance("--worker-urls", a.url, b.url, "--health-failure-threshold", "1000")
    await lb.up(2)
    await a.stop()
    for _ in range(10):
        async with lb.http.get("/v1/models") as response:
            assert response.status == 200
            assert (await response.json())["text"] == "b"


async def test_any_route_goes_on_to_a_worker(stubs, balance) -> None:
    (a,) = await stubs("a")
    lb = await balance("--worker-urls", a.url)
    await lb.up(1)
    for path in ("/v1/models/org/name", "/health_generate", "/server_info", "/get_model_info", "/tokenizer_info"):
        async with lb.http.get(path + "?x=1") as response:
            assert response.status == 200
        assert a.visits[-1].path == path + "?x=1"
    for path in ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"):
        await lb.post(path, {"text": path})
        assert (a.visits[-1].path, a.visits[-1].body) == (path, {"text": path})


async def test_a_worker_that_is_not_healthy_gets_nothing(stubs, balance) -> None:
    a, b = await stubs("a", "b")
    lb = await balance("--worker-urls", a.url, b.url, "--health-failure-threshold", "2")
    await lb.up(2)
    a.healthy = False
    await lb.up(1)
    assert (await shown(lb, a.url))["state"] == "down"
    assert {(await lb.post())["text"] for _ in range(6)} == {"b"}
    a.healthy = True
    await lb.up(2)
    assert {(await lb.post())["text"] for _ in range(6)} == {"a", "b"}


async def test_a_circuit_opens_and_closes_again(stubs, balance) -> None:
    a, b = await stubs("a", "b")
    flags = ("--cb-failure-threshold", "2", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "0.2")
    lb = await balance("--worker-urls", a.url, b.url, *flags)
    await lb.up(2)

    async def fails(request, visit):
        return web.json_response({"error": {"message": "broken"}}, status=500)

    a.script = fails
    statuses = []
    for _ in range(10):
        async with lb.http.post("/generate", json={"text": "a"}) as response:
            statuses.append(response.status)
    assert statuses.count(500) == 2
    assert (await shown(lb, a.url))["state"] == "circuit open"
    assert await lb.metric("worker_circuit", worker=a.url) > 0
    a.script = None
    await until(lambda: len(lb.parts.fleet.usable()) == 2, "the wait is over")
    assert {(await lb.post())["text"] for _ in range(6)} == {"a", "b"}
    assert (await shown(lb, a.url))["state"] == "up"


async def test_load_is_read_and_shown(stubs, balance) -> None:
    (a,) = await stubs("a", load=LOAD)
    lb = await balance("--worker-urls", a.url)
    await lb.up(1)
    await until(lambda: next(iter(lb.parts.fleet)).load.running == 2, "the load was read")
    assert (await shown(lb, a.url))["load"] == {"running": 2, "waiting": 2, "kv_tokens": 1600, "free_tokens": 800}


async def test_a_restarted_worker_is_another_one(stubs, balance, monkeypatch) -> None:
    (a,) = await stubs("a", load=LOAD)
    lb = await balance("--worker-urls", a.url)
    forgotten = []
    monkeypatch.setattr(lb.parts.fleet._dispatcher, "forget", lambda name, now: forgotten.append(name))
    await until(lambda: next(iter(lb.parts.fleet)).load.steps == 500, "the load was read")
    a.load = {**LOAD, "steps_total": 3}
    await until(lambda: forgotten, "the restart was seen")
    assert forgotten == [a.url]
    assert (await shown(lb, a.url))["incarnation"] == 2
    assert await lb.metric("worker_restarts_total", worker=a.url) == 1


INFO = {
    "incarnation": "one", "role": "prefill", "model_fingerprint": "f", "text_identity": "t", "tokenizer_directory": "/d", "page_size": 16,
    "max_request_tokens": 100, "disaggregation_bootstrap_port": 7001,
}  # fmt: skip


async def test_the_name_of_a_process_says_more_than_its_steps(stubs, balance) -> None:
    (a,) = await stubs("a", load={**LOAD, "incarnation": "one", "role": "regular"})
    lb = await balance("--worker-urls", a.url)
    await until(lambda: next(iter(lb.parts.fleet)).load.steps == 500, "the load was read")
    a.load = {**a.load, "steps_total": 3}  # an old report
    await until(lambda: next(iter(lb.parts.fleet)).load.steps == 3, "the load was read")
    assert (await shown(lb, a.url))["incarnation"] == 1
    a.load = {**a.load, "steps_total": 900, "incarnation": "two"}
    await until(lambda: next(iter(lb.parts.fleet)).load.steps == 900, "the load was read")
    assert (await shown(lb, a.url))["incarnation"] == 2


async def test_a_worker_that_switches_its_role_gets_other_requests(stubs, balance) -> None:
    """Nobody tells the balancer; where the new prefill server is met, it says itself."""
    load = {**LOAD, "incarnation": "one"}
    p, d = await stubs("p", "d", load={**load, "role": "prefill"}, info=INFO)
    d.load, d.info = {**load, "role": "decode"}, {**INFO, "role": "decode", "disaggregation_bootstrap_port": 7002}
    lb = await balance("--prefill", p.url, "7001", "--decode", d.url)
    await lb.up(2)
    await lb.post()
    assert p.visits[-1].body["bootstrap_port"] == 7001
    p.load, p.info = {**p.load, "role": "decode"}, {**p.info, "role": "decode"}
    d.load, d.info = {**d.load, "role": "prefill"}, {**d.info, "role": "prefill"}
    roles = {p.url: "decode", d.url: "prefill"}
    await until(lambda: {each.name: each.spec.role for each in lb.parts.fleet} == roles, "the switch was seen")
    assert (await lb.post())["text"] == "p"
    assert d.visits[-1].body["bootstrap_port"] == 7002
    assert (await shown(lb, d.url))["incarnation"] == 1


async def test_what_met_a_worker_after_it_had_switched_is_tried_elsewhere(stubs, balance) -> None:
    """Before the balancer sees it, the new prefill server gets a leg that was meant for a decode server: both halves wait for another."""
    load = {**LOAD, "incarnation": "one"}
    p, d, other = await stubs("p", "d", "other", load={**load, "role": "prefill"}, info=INFO)
    for stub in (d, other):
        stub.load, stub.info = {**load, "role": "decode"}, {**INFO, "role": "decode"}

    async def waits(request, visit):
        if not other.visits:
            await asyncio.Future()
        return web.json_response({"text": "", "meta_info": {"completion_tokens": 0}})

    p.script = d.script = waits
    other.healthy = False
    lb = await balance("--prefill", p.url, "--decode", d.url, other.url)
    await lb.up(2)
    asked = asyncio.create_task(lb.post())
    await until(lambda: p.visits and d.visits, "both legs have arrived")
    other.healthy = True
    await lb.up(3)
    d.load, d.info = {**d.load, "role": "prefill"}, {**d.info, "role": "prefill"}
    async with asyncio.timeout(DEADLINE):
        assert (await asked)["text"] == "other"
    assert [visit.end for visit in d.visits] == ["gone"]


async def test_a_worker_that_does_not_say_who_it_is_is_asked_again(stubs, balance) -> None:
    (a,) = await stubs("a", load={**LOAD, "incarnation": "one", "role": "regular"}, info={"odd": 1})
    lb = await balance("--worker-urls", a.url)
    await until(lambda: sum(look.path == "/server_info" for look in a.looks) > 2, "it is asked again and again")
    assert (await lb.post())["text"] == "a"
    a.info = {**INFO, "role": "regular"}
    await until(lambda: next(iter(lb.parts.fleet)).card, "it has said who it is")


async def test_looking_ends_whatever_happens_at_that_moment(stubs, balance) -> None:
    """A request that fails just when the balancer ends, or a worker leaves, must not keep its look-out alive."""
    (a,) = await stubs("a")
    lb = await balance("--worker-urls", a.url, "--health-check-interval-secs", "1000")
    await lb.up(1)
    (task,) = lb.parts.fleet._tasks.values()
    worker = next(iter(lb.parts.fleet))
    await until(lambda: worker.suspect._waiters, "it waits for the next look")
    worker.suspect.set()
    async with asyncio.timeout(5):
        await lb.parts.fleet.close()
    assert task.cancelled()


# ---- /workers ---------------------------------------------------------------------------------------------------


async def test_workers_join_and_leave(stubs, balance) -> None:
    a, b = await stubs("a", "b")
    lb = await balance("--worker-urls", a.url)
    await lb.up(1)
    joined = await lb.post("/workers", {"url": b.url + "/"}, status=201)
    assert (joined["url"], joined["role"], joined["state"]) == (b.url, "regular", "down")
    await lb.up(2)
    assert {(await lb.post())["text"] for _ in range(4)} == {"a", "b"}
    async with lb.http.delete("/workers/" + quote(a.url, safe="")) as response:
        assert response.status == 200
        assert (await response.json())["state"] == "draining"
    assert {(await lb.post())["text"] for _ in range(4)} == {"b"}
    assert await shown(lb, a.url) == {}


async def test_a_worker_that_drains_leaves_with_its_last_request(stubs, balance) -> None:
    a, b = await stubs("a", "b")
    go = asyncio.Event()

    async def script(request, visit):
        return await stream(request, b"data: {}\n\n", go, DONE)

    a.script = script
    lb = await balance("--worker-urls", a.url)
    await lb.up(1)
    await lb.post("/workers", {"url": b.url}, status=201)
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        await lb.up(2)
        async with lb.http.delete("/workers/" + a.url) as answer:
            assert (await answer.json())["open_requests"] == 1
        assert {(await lb.post())["text"] for _ in range(4)} == {"b"}
        assert (await shown(lb, a.url))["state"] == "draining"
        go.set()
        assert await response.read() == DONE
    await until(lambda: len(list(lb.parts.fleet)) == 1, "it has left")


async def test_a_worker_that_was_leaving_may_stay(stubs, balance) -> None:
    (a,) = await stubs("a")
    go = asyncio.Event()

    async def script(request, visit):
        return await stream(request, b"data: {}\n\n", go, DONE)

    a.script = script
    lb = await balance("--worker-urls", a.url)
    await lb.up(1)
    async with lb.http.post("/generate", json={"text": "a"}) as response:
        await response.content.readuntil(b"\n\n")
        async with lb.http.delete("/workers/" + a.url):
            pass
        assert (await lb.post("/workers", {"url": a.url}, status=201))["state"] == "up"
        go.set()
        await response.read()
    a.script = None
    assert (await lb.post())["text"] == "a"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"url": "ftp://x"}, 400, "url"),
        ({"url": "http://x/path"}, 400, "url"),
        ({"url": "http://user:pw@x"}, 400, "url"),
        ({"url": 5}, 400, None),
        ({}, 400, None),
        ({"url": "http://x", "role": "king"}, 400, None),
        ({"url": "http://x", "role": "prefill", "bootstrap_port": 0}, 400, "bootstrap_port"),
        ({"url": "http://x", "weight": 3}, 400, None),
    ],
)
async def test_what_cannot_be_a_worker_is_refused(balance, body, status, param) -> None:
    lb = await balance()
    assert (await lb.post("/workers", body, status=status))["error"]["param"] == param
    assert list(lb.parts.fleet) == []


async def test_a_role_that_is_none_is_told_which_there_are(balance) -> None:
    lb = await balance()
    answer = await lb.post("/workers", {"url": "http://x", "role": "king"}, status=400)
    assert "role (regular, prefill, decode)" in answer["error"]["message"]


async def test_workers_are_named_once(stubs, balance) -> None:
    (a,) = await stubs("a")
    lb = await balance("--worker-urls", a.url)
    assert (await lb.post("/workers", {"url": a.url}, status=409))["error"]["param"] == "url"
    async with lb.http.delete("/workers/http://other:1") as response:
        assert response.status == 404


async def test_a_web_page_cannot_add_a_worker(balance) -> None:
    """A browser sends text/plain to other origins without asking, and nothing else with a body."""
    lb = await balance()
    async with lb.http.post("/workers", data='{"url": "http://evil"}', headers={"content-type": "text/plain"}) as response:
        assert response.status == 415
    assert list(lb.parts.fleet) == []


async def test_the_fleet_is_an_administrators(stubs, balance) -> None:
    (a,) = await stubs("a")
    lb = await balance("--worker-urls", a.url, "--api-key", "user", "--admin-api-key", "admin")
    await lb.up(1)
    user, admin = {"Authorization": "Bearer user"}, {"Authorization": "Bearer admin"}
    await lb.post("/workers", {"url": "http://x:1"}, status=403, headers=user)
    await lb.post("/flush_cache", {}, status=403, headers=user)
    async with lb.http.delete("/workers/" + a.url, headers=user) as response:
        assert response.status == 403
    assert a.visits == []
    await lb.post("/flush_cache", {}, headers=admin)
    await lb.post("/workers", {"url": "http://x:1"}, status=201, headers=admin)
    async with lb.http.get("/workers") as response:
        assert response.status == 401
    await lb.post(headers=user)


async def test_orders_reach_every_worker(stubs, balance) -> None:
    a, b = await stubs("a", "b")
    lb = await balance("--worker-urls", a.url, b.url)
    await lb.up(2)
    answer = await lb.post("/abort_request", {"rid": "x"})
    assert [(each["url"], each["status"]) for each in answer["workers"]] == [(a.url, 200), (b.url, 200)]
    assert [worker.visits[-1].body for worker in (a, b)] == [{"rid": "x"}] * 2
    await b.stop()
    answer = await lb.post("/pause_generation", {}, status=502)
    assert [each["status"] for each in answer["workers"]] == [200, 502]


async def test_pc_07_a_flush_tells_of_each_worker(stubs, balance) -> None:
    a, b = await stubs("a", "b")
    lb = await balance("--worker-urls", a.url, b.url)
    await lb.up(2)
    assert [each["status"] for each in (await lb.post("/flush_cache", {}))["workers"]] == [200, 200]
    b.statuses["/flush_cache"] = 400  # it is busy
    answer = await lb.post("/flush_cache", {}, status=400)
    assert [(each["url"], each["status"]) for each in answer["workers"]] == [(a.url, 200), (b.url, 400)]


async def test_is_04_caches_of_two_salts_are_two(stubs, balance) -> None:
    """A prompt under another salt is no match: it goes where there is room, not where the same text lies."""
    a, b = await stubs("a", "b")
    lb = await balance("--worker-urls", a.url, b.url, "--policy", "cache_aware")
    await lb.up(2)
    text = "the very same text for everybody, again and again " * 40

    async def worker_of(**fields) -> str:
        return (await lb.post(body={"text": text, **fields}))["text"]

    first = await worker_of(cache_salt="one")
    assert {await worker_of(cache_salt="one") for _ in range(6)} == {first}
    others = {await worker_of(cache_salt=f"salt {number}") for number in range(20)}
    assert others == {"a", "b"}


async def test_workers_killed_and_restarted_at_random(stubs, balance) -> None:
    """Every request has one right answer or one clear error, and nothing is held afterwards."""
    workers = await stubs("a", "b", "c")

    async def script(request, visit):
        if len(workers[0].visits) % 7 == 3:
            return broken(request, visit)
        return web.json_response({"text": visit.body["text"]})

    workers[0].script = workers[1].script = workers[2].script = script
    lb = await balance("--worker-urls", *(worker.url for worker in workers), "--cb-timeout-duration-secs", "0.05")
    await lb.up(3)

    async def ask(number):
        async with lb.http.post("/generate", json={"text": str(number)}) as response:
            body = await response.json()
            return body["text"] == str(number) if response.status == 200 else bool(body["error"]["message"])

    async def havoc():
        for turn in range(12):
            worker = workers[turn % 3]
            await worker.stop()
            await asyncio.sleep(0.01)
            await worker.start()

    chaos = asyncio.create_task(havoc())
    outcomes = []
    for start in range(0, 600, 20):
        outcomes += await asyncio.gather(*(ask(start + index) for index in range(20)))
    await chaos
    assert outcomes == [True] * 600
    assert lb.idle()
    # A circuit that opened last closes with a request, so there must be some.
    async with asyncio.timeout(DEADLINE):
        while sum(worker.state(0.0) == "up" for worker in lb.parts.fleet) < 3:
            assert await ask(1)
            await asyncio.sleep(0.01)
