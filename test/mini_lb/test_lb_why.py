"""Why a request went where it went: the header, `/explain`, and what becomes of a request in both."""

from __future__ import annotations

import asyncio
import re

import aiohttp
import pytest
from aiohttp import web
from mini_lb.lb_stubs import broken, dying, event, stream, until

from radixpd.mini_lb.decisions import MOST_CANDIDATES, Decisions
from radixpd.mini_lb.snapshot import Candidate, Choice

HEADER = "X-Radixpd-Route"
FORM = re.compile(r'([wpd]\d+(?:\+d\d+)?);hit=(\d+)(?:;decode_hit=\d+)?;tokens=(\d+);est_ms=([\d.]+);tries=(\d+);reason="([^"\\]+)"')
USAGE = {"text": "x", "meta_info": {"prompt_tokens": 40, "completion_tokens": 7, "cached_tokens": 16}}
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def serve(stubs, balance):
    """`await serve("a", "b", flags=...)`: the balancer and its workers, all up."""

    async def start(*names, flags=(), **options):
        workers = await stubs(*names, **options)
        lb = await balance("--worker-urls", *(worker.url for worker in workers), *flags)
        await lb.up(len(workers))
        return lb, *workers

    return start


def route_of(response: aiohttp.ClientResponse) -> re.Match[str]:
    (value,) = response.headers.getall(HEADER)
    found = FORM.fullmatch(value)
    assert found, value
    return found


async def explained(lb, rid: str, *, status: int = 200):
    async with lb.http.get("/explain", params={"rid": rid}) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def named(lb) -> dict[str, str]:
    """Addresses by short name."""
    async with lb.http.get("/workers") as response:
        return {worker["name"]: worker["url"] for worker in (await response.json())["workers"]}


async def test_an_answer_tells_who_and_why(serve) -> None:
    lb, *workers = await serve("a", "b", flags=("--policy", "kv_cost"))
    urls = await named(lb)
    for _ in range(4):
        async with lb.http.post("/generate", json={"text": "a" * 400}) as response:
            told = route_of(response)
            served = (await response.json())["text"]
            assert urls[told[1]] == next(worker.url for worker in workers if worker.name == served)
    assert int(told[2]) > 0  # it was sent there before
    assert (int(told[3]), told[5]) == (101, "1")
    assert "of 101 tokens cached" in told[6]
    assert not [url for url in urls.values() if url in told[0]]


@pytest.mark.parametrize(
    ("flags", "headers", "body"),
    [((), {"x-session-id": "%d"}, {"user": "one"}), (("--session-header", "X-User"), {"X-User": "%d"}, {}), ((), {}, {"user": "%d"})],
)
async def test_requests_of_a_session_stay_together(serve, flags, headers, body) -> None:
    lb, *_ = await serve("a", "b", "c", flags=("--policy", "consistent_hash", *flags))
    homes = []
    for session in range(12):
        ask = {"text": "a", **{name: value.replace("%d", str(session)) for name, value in body.items()}}
        by = {name: value.replace("%d", str(session)) for name, value in headers.items()}
        took = set()
        for _ in range(3):
            async with lb.http.post("/generate", json=ask, headers=by) as response:
                took.add(route_of(response)[1])
        assert len(took) == 1
        homes.append(took.pop())
    assert len(set(homes)) > 1


async def test_a_stream_tells_it_too(serve) -> None:
    async def script(request, visit):
        return await stream(request, event(USAGE), DONE)

    lb, _ = await serve("a", script=script)
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        assert route_of(response)[6] == "next in turn"


async def test_a_pair_has_both_names(stubs, balance) -> None:
    p, d = await stubs("p", "d")
    lb = await balance("--prefill", p.url, "--decode", d.url)
    await lb.up(2)
    async with lb.http.post("/generate", json={"text": "a"}, headers={"X-Request-Id": "of-two"}) as response:
        told = route_of(response)
    names = await named(lb)
    assert [names[name] for name in told[1].split("+")] == [p.url, d.url]
    (candidate,) = (await explained(lb, "of-two"))["tries"][0]["candidates"]
    assert [candidate["worker"], candidate["decode"]] == [p.url, d.url]
    assert candidate["decode_hits"] == {"device": 0, "host": 0, "exact": False}


async def test_the_header_can_be_left_out_and_looks_have_none(serve) -> None:
    lb, _ = await serve("a", flags=("--no-route-header",))
    async with lb.http.post("/generate", json={"text": "a"}) as response:
        assert HEADER not in response.headers
    lb, _ = await serve("a")
    for path in ("/health", "/v1/models", "/workers"):
        async with lb.http.get(path) as response:
            assert HEADER not in response.headers
    async with lb.http.post("/generate", data=b"no json") as response:
        assert response.status == 400
        assert HEADER not in response.headers


async def test_explain_shows_candidates_with_their_parts(serve) -> None:
    async def script(request, visit):
        return await stream(request, event(USAGE), DONE)

    lb, *workers = await serve("a", "b", "c", flags=("--policy", "kv_cost"), script=script)
    await lb.events(body={"text": "a" * 4000, "stream": True})
    await lb.events(body={"text": "a" * 4000, "stream": True}, headers={"X-Request-Id": "second"})
    await until(lb.idle, "it is over")
    told = await explained(lb, "second")
    assert {name: told[name] for name in ("rid", "path", "outcome", "status", "error", "stream")} == {
        "rid": "second", "path": "/generate", "outcome": "ok", "status": 200, "error": None, "stream": True,
    }  # fmt: skip
    assert (told["prompt_tokens"], told["cached_tokens"], told["output_tokens"]) == (40, 16, 7)
    assert 0 < told["ttft_s"] <= told["duration_s"]
    (tried,) = told["tries"]
    candidates = tried["candidates"]
    assert {each["worker"] for each in candidates} == {worker.url for worker in workers}
    for each in candidates:
        parts = each["parts"]
        first = sum(parts[name] for name in ("queue_s", "prefill_s", "transfer_s", "decode_s"))
        assert each["ttft_s"] == pytest.approx(first)
    assert sorted(each["hits"]["device"] for each in candidates)[:2] == [0, 0]
    assert max(each["hits"]["device"] for each in candidates) > 900  # of 1001
    # The chosen one stands first: the cheapest, or as good as it.
    assert candidates[0]["score"] == pytest.approx(min(each["score"] for each in candidates), rel=0.02, abs=0.001)
    assert told["estimated_ttft_s"] == candidates[0]["ttft_s"]
    assert told["reason"] == tried["reason"]
    assert tried["failure"] is None


async def test_explain_tells_of_every_try(serve) -> None:
    lb, a, b = await serve("a", "b")

    async def failing(request, visit):
        return broken(request, visit)

    a.script = failing
    for number in range(2):  # by turns, so that one of them begins at a
        async with lb.http.post("/generate", json={"text": "x"}, headers={"X-Request-Id": f"r{number}"}) as response:
            assert response.status == 200
            if route_of(response)[5] == "2":
                break
    told = await explained(lb, f"r{number}")
    first, second = told["tries"]
    assert first["failure"].startswith(a.url + ": the connection failed")
    assert (second["failure"], second["candidates"][0]["worker"]) == (None, b.url)
    assert 0 <= first["after_s"] < second["after_s"]


async def test_rids_that_nobody_knows(serve) -> None:
    lb, _ = await serve("a")
    assert "no request nobody among the last 0" in (await explained(lb, "nobody", status=404))["error"]["message"]
    answer = await explained(lb, "", status=400)
    assert answer["error"]["param"] == "rid"


async def test_a_request_without_a_name_is_found_by_the_answers(serve) -> None:
    lb, _ = await serve("a")
    async with lb.http.post("/generate", json={"text": "a"}) as response:
        rid = response.headers["X-Request-Id"]
    assert (await explained(lb, rid))["status"] == 200


# ---- outcomes --------------------------------------------------------------------------------------------------------


async def test_outcomes(serve) -> None:
    """Open, then what it came to, each as the client saw it."""
    go, die = asyncio.Event(), asyncio.Event()

    async def script(request, visit):
        match visit.body["text"]:
            case "held":
                return await stream(request, event(USAGE), go, DONE)
            case "dies":
                return await dying(die, event(USAGE))(request, visit)
            case _:
                return web.json_response({"error": {"message": "no"}}, status=418)

    lb, _ = await serve("a", script=script)

    async def ask(text: str):
        return await lb.http.post("/generate", json={"text": text, "stream": True}, headers={"X-Request-Id": text})

    async def outcome(rid: str) -> tuple[str, int | None]:
        told = await explained(lb, rid)
        return told["outcome"], told["status"]

    async with await ask("held") as response:
        await response.content.readuntil(b"\n\n")
        assert await outcome("held") == ("open", None)
    await until(lb.idle, "it has hung up")
    assert await outcome("held") == ("hung up", 499)
    async with await ask("dies") as response:
        await response.content.readuntil(b"\n\n")
        die.set()
        await response.read()
    assert await outcome("dies") == ("broken off", 200)
    assert "the answer is incomplete" in (await explained(lb, "dies"))["error"]
    async with await ask("bad") as response:
        assert response.status == 418
    assert await outcome("bad") == ("failed", 418)


async def test_a_refusal_by_a_limit_is_explained(serve) -> None:
    go = asyncio.Event()

    async def script(request, visit):
        return await stream(request, go, DONE)

    lb, worker = await serve("a", flags=("--slo-ttft-ms", "2000"), script=script)
    long = asyncio.create_task(lb.events(body={"text": "x" * 400_000, "stream": True}))
    await until(lambda: worker.visits, "somebody is there")
    async with lb.http.post("/generate", json={"text": "a"}, headers={"X-Request-Id": "late"}) as response:
        assert response.status == 429
        assert float(route_of(response)[4]) > 2000
    told = await explained(lb, "late")
    assert (told["outcome"], told["status"]) == ("refused", 429)
    assert "--slo-ttft-ms" in told["error"]
    go.set()
    await long


# ---- the ring --------------------------------------------------------------------------------------------------------


def choice(candidates: int = 1) -> Choice:
    return Choice("w", "why", candidates=tuple(Candidate(f"w{number}", float(number)) for number in range(candidates)))


def test_the_ring_is_bounded_and_the_newest_come_first() -> None:
    decisions = Decisions(3)
    for number in range(5):
        decision = decisions.begin(f"r{number}", "/generate", 0.0)
        decision.tried(choice(1000), "w1", 0.0)
        decisions.remember(decision)
    assert [each.rid for each in decisions] == ["r4", "r3", "r2"]
    assert decisions.find("r1") is None
    assert [each.worker for each in decision.tries[0].candidates] == [f"w{number}" for number in range(MOST_CANDIDATES)]


def test_a_name_that_is_used_again_means_the_latest() -> None:
    decisions = Decisions(3)
    for rid, path in (("same", "/a"), ("other", "/c"), ("same", "/b")):
        decisions.remember(decisions.begin(rid, path, 0.0))
    assert [each.path for each in decisions] == ["/b", "/c"]
    found = decisions.find("same")
    assert found is not None
    assert found.path == "/b"
    assert len(decisions) == 2


async def test_a_flood_of_refusals_pushes_out_nothing(serve) -> None:
    lb, worker = await serve("a", flags=("--max-concurrent-requests", "1", "--queue-size", "0"))
    go = asyncio.Event()

    async def script(request, visit):
        return await stream(request, go, DONE)

    worker.script = script
    held = asyncio.create_task(lb.events())
    await until(lambda: worker.visits, "the place is taken")
    for _ in range(5):
        await lb.post(status=429)
    assert len(lb.parts.decisions) == 1
    go.set()
    await held
