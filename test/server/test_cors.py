"""What a web page of another origin may do: nothing by default, what `--allowed-origins` says otherwise, on every route and error."""

from __future__ import annotations

import pytest
from server.test_connection import answer_to

from radixpd.config.secret import Secret
from radixpd.config.settings import ServerSettings

PAGE = "https://app.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}
PATHS = ["/generate", "/v1/chat/completions", "/v1/models", "/health", "/nothing"]


def allowing(*origins: str, key: str = "") -> ServerSettings:
    return ServerSettings(allowed_origins=origins, api_key=(Secret(key),) if key else ())


def allowed(response) -> str | None:
    return response.headers.get("Access-Control-Allow-Origin")


@pytest.mark.parametrize("path", PATHS)
async def test_off_by_default(api, path) -> None:
    async with api.http.options(path, headers=PREFLIGHT) as response:
        assert response.status in (404, 405)
        assert not [name for name in response.headers if name.startswith("Access-Control")]
        assert "Vary" not in response.headers
    assert allowed(await api.http.get(path, headers={"Origin": PAGE})) is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("origins", [(PAGE, "http://localhost:3000"), ("*",)])
async def test_a_preflight_needs_no_key(make_api, path, origins) -> None:
    api = await make_api(server=allowing(*origins, key="k"))
    async with api.http.options(path, headers=PREFLIGHT) as response:
        assert response.status == 204
        assert allowed(response) == ("*" if origins == ("*",) else PAGE)
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type,x-stainless-lang"
        assert int(response.headers["Access-Control-Max-Age"]) > 0
    # The real request does.
    async with api.http.get(path, headers={"Origin": PAGE}) as response:
        assert response.status == (200 if path == "/health" else 401)
        assert allowed(response) == ("*" if origins == ("*",) else PAGE), "a page must be able to read the refusal"


async def test_a_preflight_is_not_echoed_blindly(make_api) -> None:
    api = await make_api(server=allowing("*"))
    raw = b"OPTIONS /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nOrigin: https://a\r\nAccess-Control-Request-Method: POST\r\n"
    for names in (b"\xff\xfe", b"", b"a<script>", "größe".encode()):
        status, headers, _ = await answer_to(api, raw + b"Access-Control-Request-Headers: " + names + b"\r\n\r\n")
        assert (status, headers["access-control-allow-headers"]) == (204, "Authorization, Content-Type, X-Request-Id")


async def test_another_origin_gets_nothing(make_api) -> None:
    api = await make_api(server=allowing(PAGE))
    for origin in ("https://evil.example", "https://app.example.evil.example", "http://app.example", "null", PAGE.upper()):
        async with api.http.options("/generate", headers={**PREFLIGHT, "Origin": origin}) as response:
            assert response.status == 405
            assert allowed(response) is None
        async with api.http.get("/v1/models", headers={"Origin": origin}) as response:
            assert (response.status, allowed(response)) == (200, None)
            assert response.headers["Vary"] == "Origin"


async def test_answers_errors_and_streams_can_be_read(make_api) -> None:
    api = await make_api(server=allowing(PAGE))
    headers = {"Origin": PAGE}
    for body, status in (({"text": "abc"}, 200), ({"text": "abc", "stream": True}, 200), ({"text": 5}, 400)):
        async with api.http.post("/generate", json=body, headers=headers) as response:
            assert (response.status, allowed(response)) == (status, PAGE)
            assert response.headers["Access-Control-Expose-Headers"] == "X-Request-Id, Retry-After"
            assert response.headers["Vary"] == "Origin"
            assert "Access-Control-Allow-Credentials" not in response.headers
    async with api.http.get("/v1/models") as response:
        assert allowed(response) is None


async def test_an_options_request_that_is_no_preflight_is_no_exception(make_api) -> None:
    api = await make_api(server=allowing("*", key="k"))
    assert (await api.http.options("/generate", headers={"Origin": PAGE})).status == 401
    assert (await api.http.options("/generate", headers={"Access-Control-Request-Method": "POST"})).status == 401
