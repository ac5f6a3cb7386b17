"""`/openapi.json` is true: it has every route, allows what the server takes, forbids what it refuses, and describes every answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import schemathesis
from aiohttp import web
from contract import EXCUSES, Contract, candidates

from radixpd import __version__
from radixpd.config.secret import Secret
from radixpd.config.settings import DisaggregationSettings, ServerSettings
from radixpd.runtime.fields import LATER
from radixpd.runtime.messages import Generate
from radixpd.server import app, openapi
from radixpd.server.docs import Doc

CHAT = [{"role": "user", "content": "abc"}]
# The least that a route takes; fields are tried on top of it.
LEAST: dict[str, Any] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"text": "a"},
    "/detokenize": {"tokens": [1]},
    "/abort_request": {"rid": "nobody"},
}
SCORES = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [3], "return_text_in_logprobs": True}
# Requests that bring out every shape of an answer.
SHAPES: dict[str, list[Any]] = {
    "/generate": [
        {"text": "abc", **SCORES}, {"text": ["abc", "de"], **SCORES}, {"input_ids": [1, 2], "sampling_params": {"n": 2}},
        {"text": "abc", "sampling_params": {"stop": "b"}}, {"text": "abc", "sampling_params": {"max_new_tokens": 1}},
        {"text": "abc", "stream": True}, {"text": "abc", "stream": True, "sampling_params": {"n": 2}, **SCORES},
    ],
    "/v1/completions": [
        {"prompt": "abc"}, {"prompt": ["abc", "d"], "n": 2, "best_of": 3, "logprobs": 2, "echo": True}, {"prompt": [1], "logprobs": 0},
        {"prompt": "abc", "stop": "b"}, {"prompt": "abc", "stream": True, "n": 2, "logprobs": 2, "echo": True},
        {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/v1/chat/completions": [
        {"messages": CHAT}, {"messages": CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}, {"messages": CHAT, "stream": True, "n": 2},
        {"messages": CHAT, "stream": True, "logprobs": True, "stream_options": {"include_usage": True}},
    ],
    "/tokenize": [{"text": "abc"}, {"prompt": ["a", "b"]}, {"messages": CHAT}],
    "/detokenize": [{"tokens": [1, 2]}, {"tokens": [[1], []]}],
    "/abort_request": [{"rid": "nobody"}, {"abort_all": True}],
    "/pd_role_switch": [{"role": "decode"}, {"role": "decode", "timeout": 0}],
}  # fmt: skip


def of(table: dict[str, Any], path: str) -> Any:
    """An entry, under the path's name without its version too."""
    return table.get(path, table.get(path.removeprefix("/v1")))


def contract_of(api) -> Contract:
    return Contract(api.http.server.app[openapi.DOCUMENT])


async def answer(api, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, str, bytes]:
    response = await api.http.request(method, path, **({} if body is None else {"json": body}), **options)
    return response.status, response.content_type, await response.read()


async def test_the_document_is_valid_and_names_the_version(api) -> None:
    status, kind, body = await answer(api, "get", "/openapi.json")
    assert (status, kind) == (200, "application/json")
    document = json.loads(body)
    schemathesis.openapi.from_dict(document).validate()
    assert (document["openapi"][:3], document["info"]["version"]) == ("3.1", __version__)
    names = [operation["operationId"] for _, _, operation in Contract(document).operations()]
    assert len(set(names)) == len(names)


async def test_every_route_is_in_the_document_and_nothing_else_is(api) -> None:
    router = api.http.server.app.router
    real = {(route.method.lower(), route.resource.canonical) for route in router.routes() if route.method != "HEAD"}
    assert {(method, path) for method, path, _ in contract_of(api).operations()} == real
    assert ("post", "/generate") in real


async def test_a_route_that_says_nothing_of_itself_keeps_the_server_from_starting(api, monkeypatch) -> None:
    async def undocumented(request: web.Request) -> web.Response:
        return web.Response()

    monkeypatch.setattr(openapi, "ROUTES", (*openapi.ROUTES, web.get("/new", undocumented)))
    with pytest.raises(LookupError, match="/new"):
        app.build_app(api.service)
    monkeypatch.setattr(openapi, "DOCS", {**openapi.DOCS, undocumented: Doc("New")})
    assert "/new" in app.build_app(api.service)[openapi.DOCUMENT]["paths"]


async def test_people_get_a_list(api) -> None:
    status, kind, body = await answer(api, "get", "/docs")
    assert (status, kind) == (200, "text/plain")
    lines = body.decode().splitlines()
    assert any(line.split()[:2] == ["POST", "/generate"] for line in lines)


@pytest.mark.parametrize("path", LEAST)
async def test_what_the_schema_says_of_a_field_is_what_the_server_does(api, path) -> None:
    """Both sides of every bound, and a value of every kind, for every field: valid is taken, invalid is a 400 that names the field."""
    contract = contract_of(api)
    schema = contract.body_schema("post", path)
    tried = 0
    for name, field in schema["properties"].items():
        if field != {"description": "accepted, no effect"}:
            for value in candidates(contract, field):
                await _try(api, contract, path, {**LEAST[path], name: value}, name)
                tried += 1
    if path == "/generate":
        for name, field in contract.document["components"]["schemas"]["Sampling"]["properties"].items():
            for value in candidates(contract, field):
                await _try(api, contract, path, {**LEAST[path], "sampling_params": {name: value}}, name)
    assert tried > 10
    schemas = contract.document["components"]["schemas"]
    assert set(schemas["Unserved"]["properties"]) == set(LATER)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_what_the_schema_says_of_rooms_is_what_servers_of_a_pair_do(make_api, path, mode) -> None:
    """The other fields of a room stand beside the one that is tried: alone it names none."""
    api = await make_api(disaggregation=DisaggregationSettings(disaggregation_mode=mode))
    contract = contract_of(api)
    fields = contract.body_schema("post", path)["properties"]
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
    for name in room:
        statuses = [
            await _try(api, contract, path, {**LEAST[path], **more, **room, name: value}, name)
            for value in [*candidates(contract, fields[name]), room[name], [room[name]]]
            for more in ({}, {"stream": True})
        ]
        assert {200, 400} == {*statuses}, name
        assert not contract.allows(contract.body_schema("post", path), {**LEAST[path], **room, name: []})
    for value in (0, 2**63 - 1, [0], [2**63 - 1]):
        assert await _try(api, contract, path, {**LEAST[path], **room, "bootstrap_room": value}, "bootstrap_room") == 200
    several = {**LEAST[path], "n": 2} if "chat" in path else {next(iter(LEAST[path])): ["a", "b"]}
    for value in ([1, 2], [1, 1], 7, 2**63 - 1, [1, 2**63], [1], [1, 2, 3]):
        await _try(api, contract, path, {**several, **room, "bootstrap_room": value}, "bootstrap_room")


async def _try(api, contract: Contract, path: str, body: Any, name: str) -> int:
    valid = contract.allows(contract.body_schema("post", path), body)
    status, kind, answered = await answer(api, "post", path, body)
    shown = f"{json.dumps(body)[:500]}: {status} {answered[:500]!r}"
    if status == 200:
        assert valid, f"the schema forbids what the server takes: {shown}"
    else:
        assert status == 400, shown
        error = json.loads(answered)["error"]
        assert not valid or EXCUSES.search(error["message"]), f"the schema allows what the server refuses: {shown}"
        assert valid or error["param"] in (name, "text"), shown
    contract.check("post", path, status, kind, answered)
    return status


@pytest.mark.parametrize("name", ["suffix", "guided_json", "length_penalty", "kv_transfer_params", "modalities"])
async def test_a_field_that_is_not_served_must_ask_for_nothing(api, name) -> None:
    contract = contract_of(api)
    field = contract.document["components"]["schemas"]["Unserved"]["properties"][name]
    more = [*LATER[name], {"x": None}, {"type": "text", "json_schema": None}, {"type": "json_object"}, 0, 2]
    for value in [*candidates(contract, field), *more]:
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            await _try(api, contract, path, {**LEAST[path], name: value}, name)


async def test_every_answer_is_as_described(api, make_api) -> None:
    contract = contract_of(api)
    half = await make_api(disaggregation=DisaggregationSettings(disaggregation_mode="decode"))
    await api.post("/generate", {"text": "a", "rid": "org/fake", "sampling_params": {"n": 2}})  # its journey can be asked for
    unseen = []
    for method, path, operation in contract.operations():
        taken = False
        for url in _urls(operation, path):
            for body in of(SHAPES, path) or [{}] if "requestBody" in operation else [None]:
                status, kind, answered = await answer(half if path == "/pd_role_switch" else api, method, url, body)
                contract.check(method, path, status, kind, answered)
                taken |= status == 200
                if status == 200 and body is not None:
                    assert contract.allows(contract.body_schema(method, path), body), f"{method} {path} took {body}"
        if "requestBody" in operation:
            status, kind, answered = await answer(api, method, path, [])
            assert status == 400
            contract.check(method, path, status, kind, answered)
        unseen += [] if taken else [(method, path)]
    assert unseen == [], "give these a request in SHAPES that succeeds"


def _urls(operation: Any, path: str) -> list[str]:
    """A path with its parts filled in."""
    schemas = {parameter["name"]: parameter["schema"] for parameter in operation.get("parameters", []) if parameter.get("in") == "path"}
    if not schemas:
        return [path]
    ((name, schema),) = schemas.items()
    return [path.replace(f"{{{name}}}", value) for value in schema.get("enum", ["org/fake", "nope"])]


async def test_every_error_is_as_described(api, make_api) -> None:
    """413, 415, and what a server says that starts or has failed."""
    contract = contract_of(api)
    posts = [(method, path) for method, path, operation in contract.operations() if "requestBody" in operation]
    small = await make_api(server=ServerSettings(max_body_size=1024))
    for method, path in posts:
        for status, data, kind in ((415, b"text=a", "text/plain"), (413, b'{"a": "' + b"a" * 2000 + b'"}', "application/json")):
            got = await answer(small, method, path, data=data, headers={"content-type": kind})
            assert got[0] == status, (path, got)
            contract.check(method, path, *got)
    starting = await make_api(opened=False)
    broken = await make_api()
    broken.engine.fail("the runner is gone")
    await asyncio.wait_for(broken.service.client.failed.wait(), 5)
    for server, statuses in ((starting, {503}), (broken, {500, 503})):
        for method, path, operation in contract.operations():
            body = of(LEAST, path) if "requestBody" in operation else None
            got = await answer(server, method, _urls(operation, path)[0], body)
            contract.check(method, path, *got)
            if path in ("/generate", "/v1/completions", "/v1/chat/completions", "/health"):
                assert got[0] in statuses, (path, got)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_an_aborted_request_is_as_described(api, path, stream) -> None:
    contract = contract_of(api)
    api.engine.hold()
    waiting = asyncio.create_task(answer(api, "post", path, {**LEAST[path], "rid": "r", "stream": stream}))
    await api.engine.received(Generate)
    if stream:
        api.engine.step()
    await api.post("/abort_request", {"rid": "r"})
    got = await waiting
    assert b"abort" in got[2]
    contract.check("post", path, *got)


async def test_keys_are_security_schemes(make_api) -> None:
    key, admin = {"authorization": "Bearer sesame"}, {"authorization": "Bearer wand"}
    locked = await make_api(server=ServerSettings(api_key=(Secret("sesame"),), admin_api_key=(Secret("wand"),)))
    contract = contract_of(locked)
    kinds = {name: scheme["scheme"] for name, scheme in contract.document["components"]["securitySchemes"].items()}
    assert kinds == {"key": "bearer", "admin": "bearer", "password": "basic"}
    for method, path, operation in contract.operations():
        url, body = _urls(operation, path)[0], {} if "requestBody" in operation else None
        schemes = {name for scheme in operation.get("security", []) for name in scheme}
        for headers, refusal in (({}, 401 if schemes else None), (key, 403 if "admin" in schemes else None), (admin, None)):
            status, kind, answered = await answer(locked, method, url, body, headers=headers)
            assert (status if status in (401, 403) else None) == refusal, (path, headers, answered)
            contract.check(method, path, status, kind, answered)
    paths = contract.document["paths"]
    assert (paths["/generate"]["post"]["security"], "security" in paths["/health"]["get"]) == ([{"key": []}], False)
    assert (paths["/flush_cache"]["post"]["security"], paths["/"]["get"]["security"]) == ([{"admin": []}], [{"key": []}, {"password": []}])


async def test_a_server_without_keys_has_no_security_schemes(api) -> None:
    document = contract_of(api).document
    assert "securitySchemes" not in document["components"]
    assert not any("security" in operation for *_, operation in contract_of(api).operations())


async def test_a_deadline_is_as_described(make_api) -> None:
    hasty = await make_api(server=ServerSettings(request_timeout=0.01))
    contract = contract_of(hasty)
    hasty.engine.hold()
    for method, path, operation in contract.operations():
        if "504" in operation["responses"]:
            got = await answer(hasty, method, path, LEAST[path])
            assert got[0] == 504, got
            contract.check(method, path, *got)
    assert "504" in contract.document["paths"]["/generate"]["post"]["responses"]
    assert "504" not in contract.document["paths"]["/tokenize"]["post"]["responses"]


async def test_a_request_id_is_described_and_checked_on_every_route(api) -> None:
    contract = contract_of(api)
    parameter = contract.document["components"]["parameters"]["RequestId"]
    for method, path, operation in contract.operations():
        assert {"$ref": "#/components/parameters/RequestId"} in operation["parameters"]
        for value in ("", "a" * 128, "a" * 129, "two words"):
            valid = contract.allows(parameter["schema"], value)
            body = of(LEAST, path) if "requestBody" in operation else None
            got = await answer(api, method, _urls(operation, path)[0], body, headers={parameter["name"]: value})
            refused = got[0] == 400 and json.loads(got[2])["error"]["param"] == parameter["name"]
            assert refused == (not valid), (path, got)
            contract.check(method, path, *got)
