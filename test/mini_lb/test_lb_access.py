"""Who may call what: keys on every route, web pages of other origins, the status page's files and its events."""

from __future__ import annotations

import asyncio
import base64
import json
import re

import pytest
from aiohttp import web
from mini_lb.lb_stubs import until

from radixpd.mini_lb import board, page_api

PAGE = "https://app.example"
KEY, ADMIN = {"Authorization": "Bearer key"}, {"Authorization": "Bearer root"}
BODIES = {"/workers": {"url": "http://127.0.0.1:9"}}
ADMINS = {
    ("POST", "/workers"), ("DELETE", "/workers/{url}"), ("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/abort_request"),
    ("POST", "/pause_generation"), ("POST", "/continue_generation"),
}  # fmt: skip
SHARED = {("GET", "/metrics"), ("GET", "/workers"), ("GET", "/explain"), ("GET", "/events")}


@pytest.fixture
def guarded(stubs, balance):
    async def start(*flags):
        (worker,) = await stubs("a")
        lb = await balance("--worker-urls", worker.url, *flags)
        await lb.up(1)
        return lb, worker

    return start


def routes(lb) -> set[tuple[str, str]]:
    """Every method and path that there is, as the router has them."""
    found = {(route.method, route.resource.canonical) for route in lb.app.router.routes() if route.resource is not None}
    assert len(found) > 30
    return found


async def status_of(lb, method: str, path: str, **options) -> int:
    """Of an answer whose body may never end."""
    path = re.sub(r"\{.*?\}", "x", path)
    async with lb.http.request(method, path, json=BODIES.get(path, {"text": "a"}) if method == "POST" else None, **options) as response:
        return response.status


async def test_every_route_but_health_needs_the_key(guarded) -> None:
    lb, worker = await guarded("--api-key", "key")
    for method, path in sorted(routes(lb) | {("GET", "/made/up"), ("POST", "/made/up"), ("OPTIONS", "/generate"), ("PATCH", "/generate")}):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic a2V5OmtleQ=="} if path[:2] != "/" else {}):
            open_to_all = path == "/health" or (headers.get("Authorization", "").startswith("Basic") and path in ("/", "/page/{name}"))
            assert (await status_of(lb, method, path, headers=headers) != 401) == open_to_all, (method, path, headers)
        assert await status_of(lb, method, path, headers=KEY) != 401, (method, path)
    assert all("Authorization" not in visit.headers for visit in worker.visits)


@pytest.mark.parametrize("apart", [False, True])
async def test_an_order_needs_the_admin_key(guarded, apart) -> None:
    lb, _ = await guarded("--api-key", "key", "--admin-api-key", "root", *(("--forward-api-key",) if apart else ()))
    for method, path in sorted(routes(lb)):
        wanted = ("GET" if method == "HEAD" else method, path) in (ADMINS | SHARED if apart else ADMINS)
        assert (await status_of(lb, method, path, headers=KEY) == 403) == wanted, (method, path)
        assert await status_of(lb, method, path, headers=ADMIN) not in (401, 403), (method, path)


# ---- other origins ---------------------------------------------------------------------------------------------------


async def test_pages_of_other_origins_may_do_nothing_by_default(guarded) -> None:
    lb, worker = await guarded()
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    async with lb.http.options("/generate", headers=asked) as response:
        assert response.status == 405
    async with lb.http.post("/generate", json={"text": "a"}, headers={"Origin": PAGE}) as response:
        assert response.status == 200
        assert not [name for name in response.headers if name.startswith("Access-Control")]
    assert len(worker.visits) == 1


async def test_pages_of_allowed_origins_may(guarded) -> None:
    lb, _ = await guarded("--allowed-origins", PAGE, "--api-key", "key")
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with lb.http.options("/generate", headers=asked) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == PAGE
        assert "DELETE" not in response.headers["Access-Control-Allow-Methods"]
    for headers, status in (({}, 401), (KEY, 200)):
        async with lb.http.post("/generate", json={"text": "a"}, headers={"Origin": PAGE, **headers}) as response:
            assert response.status == status
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "X-Radixpd-Route" in response.headers["Access-Control-Expose-Headers"]
    async with lb.http.post("/generate", json={"text": "a"}, headers={"Origin": "https://evil.example", **KEY}) as response:
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_what_a_worker_says_of_origins_stays_behind(guarded) -> None:
    async def open_to_all(request, visit):
        return web.json_response({"text": "a"}, headers={"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Credentials": "true"})

    lb, worker = await guarded()
    worker.script = open_to_all
    async with lb.http.post("/generate", json={"text": "a"}, headers={"Origin": PAGE}) as response:
        assert not [name for name in response.headers if name.startswith("Access-Control")]


# ---- the status page -------------------------------------------------------------------------------------------------


async def test_the_page_is_all_there_and_asks_nobody_else(guarded) -> None:
    lb, _ = await guarded()
    texts = {}
    for path in ("/", *(f"/page/{name}" for name in page_api.PAGE_FILES)):
        async with lb.http.get(path) as response:
            assert response.status == 200
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            texts[path] = await response.text()
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', texts["/"]))
    for path, text in texts.items():
        if path.endswith(".js"):
            named |= set(re.findall(r'from "\./([^"]+)"', text))
        assert not re.findall(r"https?://(?!www\.w3\.org/)", text), path
        assert "innerHTML" not in text
    assert named == {*page_api.PAGE_FILES}
    for name in ("../app.py", "page.js", "nothing"):
        async with lb.http.get(f"/page/{name}") as response:
            assert response.status == 404


async def test_with_keys_a_browser_may_open_the_page_and_nothing_else(guarded) -> None:
    lb, _ = await guarded("--api-key", "key")
    password = {"Authorization": "Basic " + base64.b64encode(b"ada:key").decode()}
    async with lb.http.get("/") as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"].startswith("Basic ")
    assert await status_of(lb, "GET", "/", headers=password) == 200
    assert await status_of(lb, "GET", "/page/fleet.js", headers=password) == 200
    for path in ("/events", "/workers", "/explain?rid=a"):
        assert await status_of(lb, "GET", path, headers=password) == 401


async def event_of(response) -> dict:
    async with asyncio.timeout(10):
        return json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))


async def test_events_tell_what_is_true(guarded, monkeypatch) -> None:
    monkeypatch.setattr(board, "EVERY", 0.02)
    lb, worker = await guarded()
    async with lb.http.get("/events") as response:
        state = await event_of(response)
        assert (state["policy"], state["running"], state["waiting"], state["rejected"]) == ("round_robin", 0, 0, 0)
        assert [each["url"] for each in state["workers"]] == [worker.url]
        await lb.post(headers={"X-Request-Id": "mine"})
        while not state["decisions"]:
            state = await event_of(response)
        (told,) = state["decisions"]
        assert (told["rid"], told["names"], told["outcome"], told["reason"]) == ("mine", state["workers"][0]["name"], "ok", "next in turn")
        lb.parts.gate.close()
        while not state["draining"]:
            state = await event_of(response)
        await lb.app.shutdown()
        await asyncio.wait_for(response.read(), 10)  # nobody waits for whoever looks


async def test_who_looks_takes_nobodys_place_and_they_are_not_too_many(guarded, monkeypatch) -> None:
    monkeypatch.setattr(board, "MOST_VIEWERS", 2)
    lb, _ = await guarded("--max-concurrent-requests", "1", "--queue-size", "0")
    first, second = [await lb.http.get("/events") for _ in range(2)]
    await lb.post()
    assert await status_of(lb, "GET", "/events") == 503
    first.close()
    await until(lambda: lb.app[board.BOARD].viewers == 1, "it is gone")
    assert await status_of(lb, "GET", "/events") == 200
    second.close()
