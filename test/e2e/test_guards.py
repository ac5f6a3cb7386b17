"""Tenants, bounds, deadlines and raw clients, on real servers: the brain, the engine and uvloop take part."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from e2e.asks import CHAT, GREEDY, raw_stream
from e2e.servers import Server, together, until


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def raw_request(server: Server, tokens: int, *, rid: str = "") -> bytes:
    body: dict[str, Any] = {"text": f"raw {tokens}", "sampling_params": {**GREEDY, "max_new_tokens": tokens}}
    raw = json.dumps({**body, "rid": rid} if rid else body)
    return f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n{raw}".encode()


def open_requests(server: Server) -> list[Any]:
    return list(server.server_info()["internal_states"][0]["requests"])


# ---- tenants ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tenants(serve: Callable[..., Server]) -> Server:
    """Two tenants and an administrator."""
    return serve("--api-key", "k1", "k2", "--admin-api-key", "adm", "--salt-from-key")


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "same"}, {"extra_key": "same"}])
@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_is_05_two_keys_never_share_the_cache(tenants: Server, route: str, fields: dict[str, str]) -> None:
    assert tenants.post("/flush_cache", headers=bearer("adm")).status == 200
    text = "a prompt that is long enough for several pages of the cache"
    prompt = {"/generate": {"text": text}, "/v1/completions": {"prompt": text}}.get(route, CHAT | {"max_tokens": 1})
    if route == "/v1/completions":
        prompt = prompt | {"max_tokens": 1}

    def cached(key: str) -> int:
        answer = tenants.post(route, {**prompt, **fields}, headers=bearer(key))
        assert answer.status == 200, answer.body
        if route == "/generate":
            return int(answer.json["meta_info"]["cached_tokens"])
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("k1") == 0
    assert cached("k1") >= 16, "a tenant finds its own"
    assert cached("k2") == 0, "never another's, whatever the body says"
    assert cached("adm") == 0
    assert cached("k2") >= 16


def test_a_tenant_cannot_see_or_end_another(tenants: Server) -> None:
    def run(key: str) -> Any:
        body = {"text": "x", "rid": "job", "sampling_params": {**GREEDY, "max_new_tokens": 2000}}
        return tenants.post("/generate", body, headers=bearer(key)).json["meta_info"]

    def meddle() -> None:
        def rids() -> list[str]:
            state = tenants.get("/server_info", headers=bearer("adm")).json["internal_states"][0]
            return sorted(each["rid"] for each in state["requests"])

        both = until(lambda: found if len(found := rids()) == 2 else None, "both run")
        assert [rid.partition("/")[2] for rid in both] == ["job", "job"]
        assert len({rid.partition("/")[0] for rid in both}) == 2
        assert tenants.get("/server_info", headers=bearer("k1")).status == 403
        assert tenants.post("/abort_request", {"rid": "job"}, headers=bearer("k1")).status == 403
        for rid in both:
            assert tenants.post("/abort_request", {"rid": rid}, headers=bearer("adm")).json == {"aborted": 1}

    first, second, _ = together([lambda: run("k1"), lambda: run("k2"), meddle])
    for meta in (first, second):
        assert (meta["id"], meta["finish_reason"]["type"]) == ("job", "abort")
    assert "k1" not in tenants.log


# ---- bounds -----------------------------------------------------------------------------------------------------------------------


def test_sc_05_the_bound_holds_when_pages_are_short(serve: Callable[..., Server]) -> None:
    short = serve("--max-running-requests", "64", "--max-queued-requests", "4", "--max-total-tokens", "512", "--context-length", "512")
    waiting = []

    def one(index: int) -> tuple[int, str | None]:
        # None shares a prefix: each needs pages of its own.
        body = {"input_ids": [3 + index] * 64, "sampling_params": {**GREEDY, "max_new_tokens": 60}}
        answer = short.post("/generate", body, timeout=60)
        return answer.status, answer.headers.get("Retry-After")

    def watch() -> tuple[int, None]:
        until(lambda: open_requests(short), "requests run")
        while requests := open_requests(short):
            waiting.append(sum(each["phase"] == "waiting" and not each["attempt"] for each in requests))
        return 200, None

    *found, _ = together([*(lambda index=index: one(index) for index in range(40)), watch])
    statuses = [status for status, _ in found]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 5
    assert all(again == "1" for status, again in found if status == 503)
    assert max(waiting) <= 4
    short.settled()


@pytest.fixture(scope="module")
def hasty(serve: Callable[..., Server]) -> Server:
    """One request at a time, and none longer than a second and a half."""
    return serve("--max-running-requests", "1", "--request-timeout", "1.5")


@pytest.mark.parametrize("stream", [False, True])
def test_deadlines_reach_the_queue_and_the_decode(hasty: Server, stream: bool) -> None:
    def runs() -> Any:
        body = {"text": "runs", "sampling_params": {**GREEDY, "max_new_tokens": 4000}}
        if stream:
            return list(hasty.stream("/generate", body))[-1]
        return hasty.post("/generate", body).json

    def waits() -> Any:
        until(lambda: hasty.metric("num_running_reqs") == 1, "the first runs")
        answer = hasty.post("/generate", {"text": "waits", "stream": stream, "sampling_params": {**GREEDY, "max_new_tokens": 4000}})
        return answer.status, answer.json if answer.status != 200 else answer.body

    first, (status, body) = together([runs, waits])
    assert first["error"]["code"] == "deadline_exceeded"
    # The second waits most of its time; what is left of it may show a first token.
    assert status == 504 or (stream and b"deadline_exceeded" in body)
    hasty.settled()


# ---- raw clients ------------------------------------------------------------------------------------------------------------------


def test_a_half_closed_client_gets_its_answer(server: Server) -> None:
    for tokens in (1, 400):
        with socket.create_connection(("127.0.0.1", server.port), 30) as client:
            client.sendall(raw_request(server, tokens))
            client.shutdown(socket.SHUT_WR)
            raw = b"".join(iter(lambda: client.recv(65536), b""))
        assert b"HTTP/1.1 200 OK" in raw
        assert json.loads(raw[raw.index(b"{") :])["meta_info"]["completion_tokens"] == tokens
    server.settled()


@pytest.mark.parametrize("how", ["close", "reset", "kill"])
def test_a_client_that_is_gone_is_aborted(server: Server, how: str) -> None:
    client = socket.create_connection(("127.0.0.1", server.port), 30)
    client.sendall(raw_request(server, 3900, rid=f"gone-{how}"))
    until(lambda: open_requests(server), "it runs")
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how == "kill":
        # As a client that dies: bytes in both directions, then nothing.
        client.shutdown(socket.SHUT_RDWR)
    client.close()
    until(lambda: not open_requests(server), "it is aborted", seconds=5)
    server.settled()


def test_streams_of_clients_that_are_gone_are_aborted(server: Server) -> None:
    clients = [raw_stream(server, 3000 + index) for index in range(4)]
    for client in clients:
        client.close()
    until(lambda: not open_requests(server), "all are aborted", seconds=5)
    server.settled()


@pytest.fixture(scope="module")
def rim(serve: Callable[..., Server]) -> Server:
    """A server that was started with room for a few files only, as shells often allow; impatient, and open to one origin."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2048:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        return serve("--body-timeout", "0.5", "--allowed-origins", "https://app.example")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_idle_connections_stop_nobody(rim: Server) -> None:
    idle = [socket.create_connection(("127.0.0.1", rim.port), 10) for _ in range(1000)]
    try:
        # Some of them have begun to speak.
        for client in idle[::2]:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\n")
        for client in idle[::4]:
            client.sendall(b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
        assert {rim.get("/health").status for _ in range(20)} == {200}
        assert rim.generate(text="hi", sampling_params={"max_new_tokens": 4})["meta_info"]["completion_tokens"] <= 4
    finally:
        for client in idle:
            client.close()
    rim.settled()


def test_a_body_that_trickles_in_is_ended(rim: Server) -> None:
    with socket.create_connection(("127.0.0.1", rim.port), 10) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n")
        answer, deadline = b"", time.monotonic() + 10
        client.settimeout(0.05)
        while b"}}" not in answer and time.monotonic() < deadline:
            try:
                client.sendall(b" ")
                answer += client.recv(4096)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answer
    rim.settled()


def test_pages_of_an_allowed_origin_can_read_answers(rim: Server) -> None:
    headers = {"Origin": "https://app.example"}
    preflight = rim.request("OPTIONS", "/v1/chat/completions", headers={**headers, "Access-Control-Request-Method": "POST"})
    assert preflight.status == 204
    stream = rim.post("/v1/chat/completions", {**CHAT, "max_tokens": 2, "stream": True}, headers=headers)
    error = rim.post("/v1/chat/completions", {}, headers=headers)
    assert (stream.status, error.status) == (200, 400)
    for answer in (preflight, stream, error):
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
