"""Requests through the load balancer: what passes, what is tried again, and how every failure reaches the client once."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest
from aiohttp import web
from mini_lb.lb_stubs import broken, dying, event, events_of, stream, until

TEXT = event({"text": "x", "meta_info": {"completion_tokens": 1}})
DONE = b"data: [DONE]\n\n"
NO_RETRIES = ("--retry-max-retries", "0")


def worker_flags(workers) -> tuple[str, ...]:
    return ("--worker-urls", *(worker.url for worker in workers))


@pytest.fixture
def serve(stubs, balance):
    """`await serve("a", "b", flags=...)`: the balancer and its workers, all up."""

    async def start(*names, flags=(), **options):
        workers = await stubs(*names, **options)
        lb = await balance(*worker_flags(workers), *flags)
        await lb.up(len(workers))
        return lb, *workers

    return start


# ---- what passes ----------------------------------------------------------------------------------------------------


async def test_a_body_passes_byte_for_byte(serve) -> None:
    lb, worker = await serve("a")
    raw = b'{"text": "caf\xc3\xa9 \\u00e9", "big": 12345678901234567890123, "x": 1.0e+2 , "text2":[ ]}'
    async with lb.http.post("/generate?a=%20b", data=raw, headers={"content-type": "application/json"}) as response:
        assert (await response.json())["text"] == "a"
    assert worker.visits[0].raw == raw
    assert worker.visits[0].path == "/generate?a=%20b"


async def test_a_host_before_the_path_is_left_out(serve) -> None:
    """RFC 9112, 3.2.2."""
    lb, worker = await serve("a")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(lb.url.rsplit(":", 1)[1]))
    try:
        for method, path, body in (("POST", "/generate?a=%20b", b'{"text": "x"}'), ("GET", "/v1/models", b"")):
            head = f"{method} http://other.example:1{path} HTTP/1.1\r\nHost: other.example:1\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            assert b" 200 " in await reader.readline()
            length = 0
            while (line := await reader.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            await reader.readexactly(length)
    finally:
        writer.close()
    assert [visit.path for visit in worker.visits] == ["/generate?a=%20b", "/v1/models"]


@pytest.mark.parametrize("path", ["/v1/models/../../flush_cache", "/v1/models/%2e%2e/%2E./flush_cache", "/v1/models/..%2f..%2fflush_cache"])
async def test_no_path_leads_out_of_the_routes(serve, path) -> None:
    lb, worker = await serve("a")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(lb.url.rsplit(":", 1)[1]))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        assert b" 404 " in await reader.readline()
    finally:
        writer.close()
    assert not worker.visits


async def test_round_robin_takes_turns(serve) -> None:
    lb, *workers = await serve("a", "b", "c")
    for _ in range(9):
        await lb.post()
    assert [len(worker.visits) for worker in workers] == [3, 3, 3]


async def test_rt_03_headers_pass_to_the_worker(serve) -> None:
    lb, worker = await serve("a")
    sent = {
        "Authorization": "Bearer theirs", "X-Request-Id": "req-7", "traceparent": "00-ab-cd-01", "X-Custom": "1",
        "Connection": "keep-alive, X-Hop", "X-Hop": "1", "TE": "trailers", "Proxy-Authorization": "Basic x",
    }  # fmt: skip
    await lb.post(headers=sent)
    got = worker.visits[0].headers
    assert {name: got.get(name) for name in ("Authorization", "X-Request-Id", "traceparent", "X-Custom")} == {
        "Authorization": "Bearer theirs", "X-Request-Id": "req-7", "traceparent": "00-ab-cd-01", "X-Custom": "1",
    }  # fmt: skip
    assert not {"X-Hop", "TE", "Proxy-Authorization"} & set(got)
    assert got["Host"] == worker.url.removeprefix("http://")


async def test_rt_04_headers_pass_back(serve) -> None:
    async def busy(request, visit):
        return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": "7", "X-Worker": "a"})

    lb, _ = await serve("a", script=busy)
    async with lb.http.post("/generate", json={"text": "a"}, headers={"X-Request-Id": "mine"}) as response:
        assert response.status == 503
        assert (await response.json())["error"]["message"] == "full"
        assert response.headers["Retry-After"] == "7"
        assert response.headers["X-Worker"] == "a"
        assert response.headers["X-Request-Id"] == "mine"
        assert response.headers.getall("Content-Length") == [str(len(await response.read()))]


async def test_rt_05_a_key_of_the_balancer_goes_no_further(serve) -> None:
    lb, worker = await serve("a", flags=("--api-key", "front"))
    for name in ("AUTHORIZATION", "authorization"):
        await lb.post(headers={name: "Bearer front"})
    assert ["Authorization" in visit.headers for visit in worker.visits] == [False, False]
    await lb.post(status=401)
    await lb.post(status=401, headers={"Authorization": "Bearer wrong"})
    async with lb.http.get("/v1/models") as response:
        assert response.status == 401
    async with lb.http.get("/health") as response:
        assert response.status == 200
    assert len(worker.visits) == 2


async def test_the_worker_gets_its_own_key(serve) -> None:
    lb, worker = await serve("a", flags=("--api-key", "front", "--worker-api-key", "back"))
    await lb.post(headers={"Authorization": "Bearer front"})
    assert worker.visits[0].headers["Authorization"] == "Bearer back"
    assert {look.headers["Authorization"] for look in worker.looks} == {"Bearer back"}


async def test_tenants_keep_their_keys(serve) -> None:
    lb, worker = await serve("a", flags=("--api-key", "t1", "t2", "--worker-api-key", "back", "--forward-api-key"))
    await lb.post(headers={"Authorization": "Bearer t2"})
    assert worker.visits[0].headers["Authorization"] == "Bearer t2"
    assert {look.headers["Authorization"] for look in worker.looks} == {"Bearer back"}


async def test_a_request_without_a_name_gets_one(serve) -> None:
    lb, worker = await serve("a")
    async with lb.http.post("/generate", json={"text": "a"}) as response:
        assert response.headers["X-Request-Id"] == worker.visits[0].headers["X-Request-Id"] != ""


async def test_rt_14_chunks_pass_as_they_come(serve) -> None:
    more = asyncio.Event()

    async def script(request, visit):
        return await stream(request, TEXT, more, TEXT, DONE)

    lb, _ = await serve("a", script=script)
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        assert response.headers["X-Accel-Buffering"] == "no"
        # The worker says nothing more until this has arrived.
        assert await response.content.readuntil(b"\n\n") == TEXT
        more.set()
        assert await response.read() == TEXT + DONE


async def test_rt_14_no_delay_on_either_side(serve) -> None:
    go = asyncio.Event()

    async def script(request, visit):
        return await stream(request, TEXT, go, DONE)

    lb, _ = await serve("a", script=script)
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        front = [connection.transport for connection in lb._runner.server.connections]
        back = [protocol.transport for protocol in lb.parts.upstream._session.connector._acquired]
        assert front
        assert back
        for transport in front + back:
            assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for transport in back:  # a machine that vanishes is noticed
            assert transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        go.set()
        await response.read()


async def test_events_are_passed_whole(serve) -> None:
    """Whatever way a worker's chunks fall, and whatever breaks: the client sees whole events only."""
    die = asyncio.Event()
    lb, _ = await serve("a", script=dying(die, TEXT[:10], TEXT[10:-1], TEXT[-1:] + TEXT[:5]))
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        assert await response.content.readuntil(b"\n\n") == TEXT
        die.set()
        (last,) = events_of(await response.read())
    assert last["error"]["code"] == "peer_failed"


async def test_rt_15_one_body_limit(serve) -> None:
    lb, worker = await serve("a", flags=("--max-body-size", "100000"))
    await lb.post(body={"text": "x" * 99_000})
    assert len(worker.visits) == 1
    answer = await lb.post(body={"text": "x" * 100_000}, status=413)
    assert answer["error"]["message"] == "the body is larger than 100000 bytes (--max-body-size)"
    assert len(worker.visits) == 1


@pytest.mark.parametrize(("raw", "words"), [(b"{", "not valid JSON"), (b"[1]", "must be a JSON object"), (b"", "not valid JSON")])
async def test_what_is_no_object_is_refused_here(serve, raw, words) -> None:
    lb, worker = await serve("a")
    async with lb.http.post("/generate", data=raw) as response:
        assert response.status == 400
        assert words in (await response.json())["error"]["message"]
    assert worker.visits == []


async def test_errors_have_the_servers_shape(serve) -> None:
    lb, _ = await serve("a")
    for method, path, status in (("GET", "/nowhere", 404), ("DELETE", "/generate", 405)):
        async with lb.http.request(method, path) as response:
            assert response.status == status
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
    answer = await lb.post(body={"text": "a", "bootstrap_room": 5}, status=400)
    assert answer["error"]["param"] == "bootstrap_room"


# ---- what is tried again ----------------------------------------------------------------------------------------------------


async def test_rt_01_no_second_try_after_the_first_byte(serve) -> None:
    die = asyncio.Event()
    lb, *workers = await serve("a", "b", script=dying(die, *(event({"text": str(number), "id": "only"}) for number in range(3))))
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        begun = [await response.content.readuntil(b"\n\n") for _ in range(3)]
        die.set()
        (last,) = events_of(await response.read())
    assert [each["text"] for each in events_of(b"".join(begun))] == ["0", "1", "2"]
    assert set(last) == {"error"}
    assert sum(len(worker.visits) for worker in workers) == 1


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_worker_that_dies_before_the_first_byte_is_replaced(serve, streaming) -> None:
    async def dies(request, visit):
        return broken(request, visit)

    async def answers(request, visit):
        return await stream(request, TEXT, DONE) if visit.body["stream"] else web.json_response({"text": "b"})

    lb, a, b = await serve("a", "b")
    a.script, b.script = dies, answers
    for _ in range(2):  # whoever has the turn
        body = {"text": "q", "stream": streaming}
        assert (await lb.events(body=body) == events_of(TEXT + DONE)) if streaming else (await lb.post(body=body))["text"] == "b"
    assert len(a.visits) == await lb.metric("retries_total", reason="broken") >= 1
    assert len(b.visits) == 2


async def test_a_plain_answer_that_breaks_off_is_had_elsewhere(serve) -> None:
    """Nothing of it has gone to the client."""

    async def dies(request, visit):
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"text": "half')
        return broken(request, visit)

    lb, a, _ = await serve("a", "b")
    a.script = dies
    assert [(await lb.post())["text"] for _ in range(2)] == ["b", "b"]
    assert a.visits[0].end == "broken"


async def test_rt_12_a_worker_that_dies_in_mid_stream_is_no_short_answer(serve) -> None:
    die = asyncio.Event()
    lb, a = await serve("a", script=dying(die, TEXT))
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        assert await response.content.readuntil(b"\n\n") == TEXT
        die.set()
        (last,) = events_of(await response.read())
    assert last["error"]["type"] == "server_error"
    assert "incomplete" in last["error"]["message"]
    assert a.url not in last["error"]["message"]
    assert [worker.outcomes["fault"] for worker in lb.parts.fleet] == [1]


async def test_rt_02_a_bad_request_is_the_clients_fault(serve) -> None:
    async def script(request, visit):
        return web.json_response({"error": {"message": "no", "param": "temperature"}}, status=400)

    lb, a, b = await serve("a", "b", script=script, flags=("--cb-failure-threshold", "1"))
    for _ in range(10):
        assert (await lb.post(status=400))["error"]["param"] == "temperature"
    assert [len(a.visits), len(b.visits)] == [5, 5]
    assert all(worker.state(0.0) == "up" for worker in lb.parts.fleet)


@pytest.mark.parametrize(("status", "calls"), [(500, 1), (502, 2), (503, 2), (504, 1), (429, 1)])
async def test_only_listed_answers_are_tried_elsewhere(serve, status, calls) -> None:
    async def script(request, visit):
        return web.json_response({"error": {"message": f"by {status}"}}, status=status)

    lb, *workers = await serve("a", "b", script=script)
    assert (await lb.post(status=status))["error"]["message"] == f"by {status}"
    assert sum(len(worker.visits) for worker in workers) == calls


async def test_nobody_left_to_try_is_one_clear_error(serve) -> None:
    async def script(request, visit):
        return broken(request, visit)

    lb, *workers = await serve("a", "b", script=script)
    answer = await lb.post(status=502)
    assert answer["error"]["message"].startswith("no worker could answer")
    assert [len(worker.visits) for worker in workers] == [1, 1]
    assert lb.idle()


@pytest.mark.parametrize(
    "sent", [b"\0rubbish\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-Secret: 7\r\nX-", b"HTTP/1.1 200 OK\r\nContent-Length: -7\r\n\r\n"]
)
async def test_what_a_worker_sent_and_where_it_is_stays_here(serve, sent) -> None:
    """The parser's messages quote both."""

    async def script(request, visit):
        request.transport.write(sent)
        request.transport.close()
        raise ConnectionResetError

    lb, worker = await serve("a", script=script)
    message = (await lb.post(status=502))["error"]["message"]
    assert message.startswith("no worker could answer: the last one the connection failed: ")
    assert str(worker.port) not in message
    assert not any(word in message for word in ("rubbish", "Secret", "-7", "\n"))


async def test_second_tries_have_a_budget(serve) -> None:
    """A request that kills workers does not go through the fleet with everybody's."""

    async def script(request, visit):
        return broken(request, visit)

    flags = ("--retry-budget", "0", "--cb-failure-threshold", "1000")
    lb, *workers = await serve("a", "b", script=script, flags=flags)
    for _ in range(20):
        await lb.post(status=502)
    assert sum(len(worker.visits) for worker in workers) == 20 + 10


async def test_a_worker_that_cannot_be_reached_costs_nothing(serve) -> None:
    flags = ("--retry-budget", "0", "--health-failure-threshold", "1000", "--cb-failure-threshold", "1000")
    lb, a, _ = await serve("a", "b", flags=flags)
    await a.stop()
    for _ in range(30):
        assert (await lb.post())["text"] == "b"
    assert await lb.metric("retries_total", reason="unreached") >= 14


# ---- ends ----------------------------------------------------------------------------------------------------


async def test_rt_06_counters_come_down_whatever_ends_a_stream(serve) -> None:
    endless = asyncio.Event()

    async def script(request, visit):
        return await stream(request, TEXT, endless)

    lb, *workers = await serve("a", "b", script=script)
    for _ in range(50):
        response = await lb.http.post("/generate", json={"text": "a", "stream": True})
        await response.content.readuntil(b"\n\n")
        response.close()
    await until(lb.idle, "no request is open")
    await until(lambda: all(visit.end == "gone" for worker in workers for visit in worker.visits), "workers were told")
    assert await lb.metric("worker_num_running_reqs") == 0
    assert all(worker.state(0.0) == "up" and worker.outcomes["fault"] == 0 for worker in lb.parts.fleet)


async def test_a_client_that_hangs_up_before_the_answer_ends_its_leg(serve) -> None:
    never = asyncio.Event()

    async def script(request, visit):
        await never.wait()
        return web.Response()

    lb, a = await serve("a", script=script)
    task = asyncio.create_task(lb.post())
    await until(lambda: a.visits, "the request has arrived")
    task.cancel()
    await until(lambda: a.visits[0].end == "gone", "the worker was told")
    await until(lb.idle, "nothing is held")
    assert len(a.visits) == 1
    assert await lb.metric("http_requests_total", status="499") == 1


async def test_a_request_has_a_deadline(serve) -> None:
    never = asyncio.Event()

    async def script(request, visit):
        return await stream(request, TEXT, never) if visit.body.get("stream") else await asyncio.Future()

    lb, a = await serve("a", script=script, flags=("--request-timeout", "0.2"))
    assert (await lb.post(status=504))["error"]["code"] == "deadline_exceeded"
    events = await lb.events()
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    await until(lambda: [visit.end for visit in a.visits] == ["gone", "gone"], "the worker was told")
    assert lb.idle()


async def test_the_queue_is_bounded_and_ordered(serve) -> None:
    go = asyncio.Event()

    async def script(request, visit):
        await go.wait()
        return web.json_response({"text": visit.body["text"]})

    lb, a = await serve("a", script=script, flags=("--max-concurrent-requests", "2", "--queue-size", "3"))
    tasks = []
    for number in range(5):
        tasks.append(asyncio.create_task(lb.post(body={"text": str(number)})))
        await until(lambda: lb.parts.gate.open + lb.parts.gate.waiting == number + 1, "it has a place")  # noqa: B023
    async with lb.http.post("/generate", json={"text": "5"}) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        assert "--queue-size" in (await response.json())["error"]["message"]
    assert len(a.visits) == 2
    tasks[3].cancel()  # one that waits
    await until(lambda: lb.parts.gate.waiting == 2, "it has left the queue")
    go.set()
    assert [(await task)["text"] for task in tasks if task is not tasks[3]] == ["0", "1", "2", "4"]
    assert [visit.body["text"] for visit in a.visits[2:]] == ["2", "4"]
    assert lb.idle()
    assert await lb.metric("rejected_total", reason="queue_full") == 1


async def test_waiting_ends_with_429(serve) -> None:
    go = asyncio.Event()

    async def script(request, visit):
        await go.wait()
        return web.json_response({})

    lb, _ = await serve("a", script=script, flags=("--max-concurrent-requests", "1", "--queue-timeout-secs", "0.05"))
    first = asyncio.create_task(lb.post())
    await until(lambda: lb.parts.gate.open, "it has a place")
    assert "--queue-timeout-secs" in (await lb.post(status=429))["error"]["message"]
    go.set()
    await first
    assert lb.idle()


@pytest.mark.parametrize(
    ("path", "role", "text"),
    [
        ("/generate", {"text": "", "output_ids": []}, {"text": "a"}),
        ("/v1/completions", {"choices": [{"text": ""}]}, {"choices": [{"text": "a"}]}),
        ("/v1/chat/completions", {"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "a"}}]}),
    ],
)
async def test_rt_13_the_first_token_is_text(serve, monkeypatch, path, role, text) -> None:
    """The clock stands still but for what the test adds, between the role chunk and the text."""
    from radixpd.mini_lb import proxy, relay

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock, more = Clock(), asyncio.Event()

    async def script(request, visit):
        return await stream(request, event(role), more, event(text), DONE)

    lb, _ = await serve("a", script=script)
    monkeypatch.setattr(proxy, "time", clock)
    monkeypatch.setattr(relay, "time", clock)
    async with lb.http.post(path, json={"prompt": "a", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        clock.now += 5
        more.set()
        await response.read()
    assert await lb.metric("time_to_first_token_seconds_sum") == 5
    assert await lb.metric("time_to_first_token_seconds_count") == 1


async def test_a_client_that_reads_nothing_is_cut_off(serve, monkeypatch) -> None:
    from radixpd.server import faults

    monkeypatch.setattr(faults, "STALLED_SECONDS", 0.2)

    async def script(request, visit):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(event({"text": "x" * 100_000}))

    lb, a = await serve("a", script=script)
    host, port = lb.url.removeprefix("http://").split(":")
    raw = json.dumps({"text": "a", "stream": True}).encode()
    _, writer = await asyncio.open_connection(host, int(port), limit=1)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    await until(lambda: a.visits and a.visits[0].end == "gone", "the worker was told")
    await until(lb.idle, "nothing is held")
    assert all(worker.outcomes["fault"] == 0 for worker in lb.parts.fleet)
    writer.close()


async def test_bytes_that_are_no_http_get_the_error_shape(serve) -> None:
    lb, _ = await serve("a")
    host, port = lb.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01garbage\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert b'"error"' in answer
    writer.close()


async def test_draining_lets_open_requests_finish(serve) -> None:
    go = asyncio.Event()

    async def script(request, visit):
        return await stream(request, TEXT, go, DONE)

    lb, _ = await serve("a", script=script)
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        lb.parts.gate.close()
        assert "shutting down" in (await lb.post(status=503))["error"]["message"]
        async with lb.http.get("/health") as health:
            assert health.status == 503
        go.set()
        assert await response.read() == DONE
    await asyncio.wait_for(lb.parts.gate.idle(), 5)


async def test_what_does_not_finish_in_time_is_told_so(serve) -> None:
    never = asyncio.Event()

    async def script(request, visit):
        return await stream(request, TEXT, never)

    lb, _ = await serve("a", script=script)
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        lb.parts.proxy.stop()
        assert events_of(await response.read())[-1]["error"]["message"] == "the load balancer is shutting down"
    await until(lb.idle, "nothing is held")


async def test_session_of_many_requests_keeps_connections(serve) -> None:
    lb, a = await serve("a")
    for _ in range(20):
        await lb.post()
    connector = lb.parts.upstream._session.connector
    assert isinstance(connector, aiohttp.TCPConnector)
    assert sum(len(each) for each in connector._conns.values()) <= 2
    assert len(a.visits) == 20
