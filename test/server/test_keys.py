"""Keys, administrators, tenants, names of requests: who may call what, and what tenants see of each other."""

from __future__ import annotations

import asyncio
import re

import pytest

from radixpd.config.secret import Secret
from radixpd.config.settings import ServerSettings
from radixpd.core.page_hash import namespace
from radixpd.runtime.messages import Abort, Generate
from radixpd.runtime.tokenizer_manager import TokenizerManager
from radixpd.server import app, guards, unsupported

ASK = {"text": "abc", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
ORDERS = [
    ("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/abort_request"), ("POST", "/pause_generation"),
    ("POST", "/continue_generation"), ("POST", "/configure_logging"), ("POST", "/start_profile"), ("POST", "/stop_profile"),
    ("POST", "/freeze_gc"), ("GET", "/cache_tree"), ("POST", "/pd_role_switch"),
]  # fmt: skip
VIEWS = [("GET", "/server_info"), ("GET", "/get_server_info"), ("GET", "/get_load"), ("GET", "/metrics"), ("GET", "/requests")]


def keyed(*keys: str, admin: str = "", **fields) -> ServerSettings:
    return ServerSettings(api_key=tuple(map(Secret, keys)), admin_api_key=(Secret(admin),) if admin else (), **fields)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def every_route(api) -> list[tuple[str, str]]:
    routes = {(route.method, route.resource.canonical) for route in api.http.app.router.routes()}
    return sorted((method, re.sub(r"{[^}]*}", "x", path)) for method, path in routes)


def is_order(method: str, path: str) -> bool:
    return ("GET" if method == "HEAD" else method, path) in ORDERS


async def status(api, method: str, path: str, key: str = "") -> int:
    async with api.http.request(method, path, headers=bearer(key) if key else {}, json={} if method == "POST" else None) as response:
        return response.status


async def test_every_route_needs_a_key_but_health(make_api) -> None:
    api = await make_api(server=keyed("k1", admin="adm"))
    routes = every_route(api)
    assert len(routes) > 40
    for method, path in [*routes, ("GET", "/nothing"), ("DELETE", "/generate"), ("OPTIONS", "/generate"), ("GET", "/health/")]:
        for key in ("", "wrong", "k", "k1x"):
            assert (await status(api, method, path, key) == 401) == (path != "/health"), (method, path)


async def test_an_admin_key_opens_every_route_and_orders_need_it(make_api) -> None:
    api = await make_api(server=keyed("k1", admin="adm"))
    for method, path in every_route(api):
        assert (await status(api, method, path, "k1") == 403) == is_order(method, path), (method, path)
        assert await status(api, method, path, "adm") not in (401, 403), (method, path)
    async with api.http.post("/flush_cache", headers=bearer("k1")) as response:
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "admin_key_required")


async def test_without_an_admin_key_any_key_gives_orders(make_api) -> None:
    api = await make_api(server=keyed("k1", "k2"))
    for key in ("k1", "k2"):
        assert await status(api, "POST", "/flush_cache", key) == 200


async def test_with_an_admin_key_alone_only_orders_need_it(make_api) -> None:
    api = await make_api(server=keyed(admin="adm"))
    for method, path in every_route(api):
        assert (await status(api, method, path) == 401) == is_order(method, path), (method, path)
    assert await status(api, "POST", "/flush_cache", "adm") == 200


def test_every_order_is_an_administrators() -> None:
    assert {handler.__name__ for handler in app.ADMIN} == {
        "abort_request", "cache_tree", "configure_logging", "continue_generation", "flush_cache", "freeze_gc", "pause_generation",
        "pd_role_switch", "start_profile", "stop_profile",
    }  # fmt: skip


@pytest.mark.parametrize("given", ["k1", "Basic k1", "Bearer", "Bearer ", "Bearer  k1", "Token k1", "Bearer k1 ", "bearer k1", "BEARER k1"])
async def test_the_scheme_is_bearer(make_api, given) -> None:
    api = await make_api(server=keyed("k1"))
    async with api.http.get("/v1/models", headers={"Authorization": given}) as response:
        # A space at the end is no part of a header's value.
        assert response.status == (200 if given.lower().rstrip() == "bearer k1" else 401)
        assert response.status == 200 or response.headers["WWW-Authenticate"] == "Bearer"


# ---- tenants ----------------------------------------------------------------------------------------------------------------------


async def test_keys_never_share_a_namespace_whatever_the_body_says(make_api) -> None:
    api = await make_api(server=keyed("k1", "k2", admin="adm", salt_from_key=True))
    spaces = {}
    for salt in (None, "s", "x" * 1024):
        for key in ("k1", "k2", "adm"):
            async with api.http.post("/generate", json={**ASK, "cache_salt": salt}, headers=bearer(key)) as response:
                assert response.status == 200
            spaces[key, salt] = api.engine.of(Generate)[-1].namespace
    assert len(set(spaces.values())) == len(spaces) == 9
    assert b"" not in spaces.values()
    # Guessing what the server derives does not help.
    tenant = Secret("k1").digest(guards.TENANT)
    guesses = [tenant, spaces["k1", None].hex(), "k1"]
    for guess in guesses:
        for fields in ({"cache_salt": guess}, {"extra_key": guess}, {"tenant": guess}):
            await (await api.http.post("/generate", json={**ASK, **fields}, headers=bearer("k2"))).read()
            assert api.engine.of(Generate)[-1].namespace not in (spaces["k1", None], spaces["k1", "s"], namespace({"tenant": tenant}))


async def test_a_tenant_keeps_its_namespace(make_api) -> None:
    found = []
    for _ in range(2):
        api = await make_api(server=keyed("k1", "k2", salt_from_key=True))
        for path, body in (
            ("/generate", ASK),
            ("/v1/completions", {"prompt": "abc", "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}),
        ):
            await (await api.http.post(path, json=body, headers=bearer("k1"))).read()
            found.append(api.engine.of(Generate)[-1].namespace)
    assert len(set(found)) == 1
    assert len(found[0]) == 32


async def test_without_the_flag_salts_are_the_bodys(make_api) -> None:
    api = await make_api(server=keyed("k1", "k2"))
    for key in ("k1", "k2"):
        await (await api.http.post("/generate", json={**ASK, "cache_salt": "s"}, headers=bearer(key))).read()
    assert {message.namespace for message in api.engine.of(Generate)} == {namespace({"cache_salt": "s"})}


async def running(api, key: str, rid: str, count: int) -> asyncio.Task:
    task = asyncio.create_task(api.http.post("/generate", json={**ASK, "rid": rid}, headers=bearer(key)))
    await api.engine.received(Generate, count)
    return task


async def aborts(api, key: str, **body) -> int:
    async with api.http.post("/abort_request", json=body, headers=bearer(key)) as response:
        assert response.status == 200
        return (await response.json())["aborted"]


async def test_two_tenants_may_use_one_rid_and_neither_ends_the_others(make_api) -> None:
    api = await make_api(server=keyed("k1", "k2", salt_from_key=True))
    api.engine.hold()
    first, second = await running(api, "k1", "job", 1), await running(api, "k2", "job", 2)
    async with api.http.post("/generate", json={**ASK, "rid": "job"}, headers=bearer("k1")) as response:
        error = (await response.json())["error"]
    assert (error["code"], error["message"]) == ("duplicate_rid", "rid job is in use by a live request")
    assert await aborts(api, "k1", rid="job") == 1
    assert (await (await first).json())["meta_info"]["finish_reason"]["type"] == "abort"
    scoped = api.engine.of(Generate)[1].rids[0]
    for name in (scoped, scoped.partition("/")[0] + "/job", "../job", "/job"):
        assert await aborts(api, "k1", rid=name) == 0
    assert await aborts(api, "k1", abort_all=True) == 0
    api.engine.release()
    answer = await (await second).json()
    assert (answer["text"], answer["meta_info"]["id"]) == ("ab", "job")


async def test_an_operator_ends_anybodys_by_the_name_in_the_log(make_api) -> None:
    api = await make_api(server=keyed("k1", "k2", admin="adm", salt_from_key=True))
    api.engine.hold()
    tasks = [await running(api, "k1", "job", 1), await running(api, "k2", "job", 2), await running(api, "k2", "other", 3)]
    assert await aborts(api, "adm", rid="job") == 0, "which of the two?"
    assert await aborts(api, "adm", rid=api.engine.of(Generate)[1].rids[0]) == 1
    await tasks[1]
    assert await aborts(api, "adm", abort_all=True) == 2
    await api.engine.received(Abort, 3)
    await asyncio.gather(*tasks)


async def test_what_shows_all_tenants_is_the_administrators(make_api) -> None:
    api = await make_api(server=keyed("k1", "k2", admin="adm", salt_from_key=True))
    for method, path in VIEWS:
        assert await status(api, method, path, "k1") == 403
        assert await status(api, method, path, "adm") == 200


async def test_a_tenant_sees_its_own_requests_in_the_servers_state(make_api, monkeypatch) -> None:
    api = await make_api(server=keyed("k1", "k2", salt_from_key=True))
    rids = []
    for key in ("k1", "k2"):
        await (await api.http.post("/generate", json={**ASK, "rid": "job"}, headers=bearer(key))).read()
        rids.append(api.engine.of(Generate)[-1].rids[0])

    async def control(action: str, **options) -> dict:
        return {"in_flight": 0, "requests": [{"rid": rid} for rid in rids]}

    monkeypatch.setattr(api.service.client, "control", control)
    for key, rid in (("k1", rids[0]), ("k2", rids[1])):
        info = await (await api.http.get("/server_info", headers=bearer(key))).json()
        assert info["internal_states"] == [{"in_flight": 0, "requests": [{"rid": rid}]}]


async def test_no_key_is_ever_shown(make_api) -> None:
    api = await make_api(server=keyed("hush-1", "hush-2", admin="hush-3", salt_from_key=True))
    shown = []
    for path in ("/server_info", "/get_model_info", "/metrics", "/openapi.json", "/v1/models"):
        async with api.http.get(path, headers=bearer("hush-3")) as response:
            shown += [await response.text(), str(response.headers)]
    for key in ("hush-1", "hush-2"):
        async with api.http.post("/generate", json=ASK, headers=bearer(key)) as response:
            shown += [await response.text(), str(response.headers)]
    shown += [str(message) for message in api.engine.seen]
    assert not [text for text in shown if "hush" in text]


# ---- names of requests ------------------------------------------------------------------------------------------------------------


async def test_a_request_id_comes_back(api, caplog) -> None:
    for path, expected in (("/generate", 200), ("/nothing", 404)):
        async with api.http.post(path, json=ASK, headers={"X-Request-Id": "trace-1;a=b"}) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (expected, "trace-1;a=b")
    async with api.http.post("/generate", json={**ASK, "stream": True}, headers={"X-Request-Id": "t2"}) as response:
        assert response.headers["X-Request-Id"] == "t2"
        assert '"id":"t2"' not in await response.text(), "two live requests may share a request id, but no rid"


async def test_without_a_request_id_it_is_the_rid(api) -> None:
    for stream in (False, True):
        async with api.http.post("/generate", json={**ASK, "rid": "job-7", "stream": stream}) as response:
            assert response.headers["X-Request-Id"] == "job-7"
    async with api.http.post("/generate", json=ASK) as response:
        assert response.headers["X-Request-Id"] == (await response.json())["meta_info"]["id"]
    ids = {(await api.http.get("/health")).headers["X-Request-Id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize("rid", ["a\r\nX-Evil: 1", "größe", "x" * 1024, " ", "\0"])
async def test_a_rid_that_no_header_can_hold_is_not_put_into_one(api, rid) -> None:
    for stream in (False, True):
        async with api.http.post("/generate", json={**ASK, "rid": rid, "stream": stream}) as response:
            assert response.status == 200
            assert re.fullmatch("[0-9a-f]{32}", response.headers["X-Request-Id"])
            assert "X-Evil" not in response.headers
            assert "[DONE]" in await response.text() or (await response.json())["meta_info"]["id"] == rid


@pytest.mark.parametrize("given", ["x" * 129, "a b", "é"])
async def test_a_request_id_is_checked(api, given) -> None:
    async with api.http.post("/generate", json=ASK, headers={"X-Request-Id": given}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "X-Request-Id")
        assert response.headers["X-Request-Id"] != given


async def test_a_bug_is_logged_with_the_request_id(api, caplog, monkeypatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(TokenizerManager, "start", broken)
    async with api.http.post("/generate", json=ASK, headers={"X-Request-Id": "find-me"}) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (500, "find-me")
        assert "a bug" not in await response.text()
    assert "find-me" in caplog.text


# ---- routes that are not there ----------------------------------------------------------------------------------------------------


async def test_known_routes_of_others_say_why_they_are_missing(api) -> None:
    paths = {route.resource.canonical for route in api.http.app.router.routes()}
    for sentence, missing in unsupported.UNSUPPORTED.items():
        assert paths.isdisjoint(missing), "a route that exists has no excuse"
        for path in missing:
            async with api.http.post(path, json={}) as response:
                error = (await response.json())["error"]
            assert (response.status, error["code"], error["type"], error["message"]) == (
                404,
                "unsupported_route",
                "not_found_error",
                sentence,
            )
    for path, code in (
        ("/v1/responses/resp_1/cancel", "unsupported_route"),
        ("/v1/files/a/b/c", "unsupported_route"),
        ("/v1", 404),
        ("/encoder", 404),
    ):
        async with api.http.get(path) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, code)


async def test_se_06_nothing_loads_weights_or_adapters(api) -> None:
    for path in ("/load_lora_adapter", "/unload_lora_adapter", "/update_weights_from_disk"):
        for name in ("../../etc", "/etc", "org/model"):
            async with api.http.post(path, json={"lora_name": name, "lora_path": name, "model_path": name}) as response:
                assert response.status == 404
