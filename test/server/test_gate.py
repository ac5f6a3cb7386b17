"""How many, how long, how large: concurrency, deadlines, bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket

import pytest
from server.events import parse_events
from server.test_connection import HEAD, answer_to, opened

from radixpd.config.settings import SchedulerSettings, ServerSettings
from radixpd.runtime.messages import Abort, Generate
from radixpd.server import faults

ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions"]
ENDLESS = {"ignore_eos": True, "max_new_tokens": 400}
SHORT = 0.2  # seconds: a deadline that is sure to pass while the engine is held


def body_for(path: str, **fields) -> dict:
    shapes = {
        "/generate": {"text": "abc", "sampling_params": ENDLESS},
        "/v1/completions": {"prompt": "abc", "ignore_eos": True, "max_tokens": 400},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True, "max_tokens": 400},
    }
    return {**shapes[path], **fields}


async def test_over_the_concurrency_limit_is_503_at_once(make_api) -> None:
    api = await make_api(server=ServerSettings(max_concurrent_requests=3))
    api.engine.hold()
    open_ones = [
        asyncio.create_task(api.http.post(path, json=body_for(path, stream=stream))) for path, stream in zip(ROUTES, (False, True, False))
    ]
    await api.engine.received(Generate, 3)
    for path in ROUTES:
        # Before its body: a client that never sends one is refused all the same.
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n".encode()
        async with opened(api) as (reader, writer):
            writer.write(head)
            answer = await asyncio.wait_for(reader.read(4096), 5)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1" in answer
        assert b"--max-concurrent-requests" in answer
    for path in ("/health", "/v1/models", "/metrics"):
        assert (await api.http.get(path)).status == 200
    open_ones[0].cancel()
    await api.engine.received(Abort)
    async with asyncio.timeout(5):
        while (await api.http.post("/generate", json={"text": 5})).status == 503:
            await asyncio.sleep(0)
    api.engine.release()
    await api.generate("and more")


async def test_refused_and_failed_requests_give_their_place_back(make_api) -> None:
    api = await make_api(server=ServerSettings(max_concurrent_requests=1))
    for _ in range(3):
        await api.post("/generate", {"text": 5}, status=400)
        await api.post("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, status=400)
        await api.generate("abc")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_that_waits_too_long_is_504_and_aborted(make_api, path) -> None:
    api = await make_api(server=ServerSettings(request_timeout=SHORT))
    api.engine.hold()
    for stream in (False, True):
        async with api.http.post(path, json=body_for(path, stream=stream, rid=f"r{stream}")) as response:
            error = (await response.json())["error"]
        assert response.status == 504
        assert (error["code"], error["type"]) == ("deadline_exceeded", "server_error")
        assert "0.2 s (--request-timeout)" in error["message"]
    await api.engine.received(Abort, 2)
    await asyncio.wait_for(api.service.client.idle(), 5)
    api.engine.release()
    await api.generate("abc")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_that_takes_too_long_ends_with_one_error_event(make_api, path) -> None:
    api = await make_api(server=ServerSettings(request_timeout=0.5))
    api.engine.hold()
    task = asyncio.create_task(api.http.post(path, json=body_for(path, stream=True)))
    await api.engine.received(Generate)
    api.engine.step()
    response = await task
    assert response.status == 200
    events = parse_events(await response.text())
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert sum("error" in event for event in events) == 1
    await api.engine.received(Abort)


async def test_every_sample_and_prompt_is_aborted(make_api) -> None:
    api = await make_api(server=ServerSettings(request_timeout=SHORT))
    api.engine.hold()
    await api.post("/generate", {"text": ["ab", "cd"], "sampling_params": {**ENDLESS, "n": 2}}, status=504)
    await api.engine.received(Abort, 4)


async def test_the_deadline_leaves_in_time_alone(make_api) -> None:
    api = await make_api(server=ServerSettings(request_timeout=30))
    assert (await api.generate("abc"))["text"] == "abc"
    assert (await api.events("/generate", body_for("/generate", sampling_params={})))[-1] == "[DONE]"
    assert api.engine.of(Abort) == []


async def test_reading_the_body_counts_too(make_api) -> None:
    api = await make_api(server=ServerSettings(request_timeout=SHORT))
    async with opened(api) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(4096), 5)
    assert answer.startswith(b"HTTP/1.1 504")


async def stalled(api, client: socket.socket) -> None:
    """A stream whose client does not read, up to the end of its request."""
    raw = json.dumps({"text": "x" * 4000, "stream": True, "sampling_params": {"ignore_eos": True, "max_new_tokens": 100_000}}).encode()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (api.http.server.host, api.http.server.port))
    await loop.sock_sendall(client, HEAD + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
    await api.engine.received(Generate)
    (connection,) = api.http.server.runner.server.connections
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with asyncio.timeout(10):
        while not connection.writing_paused:
            await asyncio.sleep(0)
    await api.engine.received(Abort)
    await asyncio.wait_for(api.service.client.idle(), 10)


async def test_a_client_that_does_not_read_is_cut_off_at_its_deadline(make_api, monkeypatch) -> None:
    monkeypatch.setattr(faults, "LAST_WRITE_SECONDS", 0.1)
    api = await make_api(server=ServerSettings(request_timeout=1.0), context_length=2**17, max_total_tokens=2**18)
    with socket.socket() as client:
        await stalled(api, client)
        async with asyncio.timeout(10):
            while api.http.server.runner.server.connections:
                await asyncio.sleep(0)


async def test_a_client_that_reads_late_is_told_of_its_deadline(make_api) -> None:
    api = await make_api(server=ServerSettings(request_timeout=1.0), context_length=2**17, max_total_tokens=2**18)
    with socket.socket() as client:
        await stalled(api, client)
        got = b""
        async with asyncio.timeout(10):
            while not got.endswith(b"0\r\n\r\n"):
                got += await asyncio.get_running_loop().sock_recv(client, 2**20)
    assert got.count(b"deadline_exceeded") == 1


async def test_a_client_that_never_reads_does_not_keep_its_place(make_api, monkeypatch) -> None:
    """Without any deadline of the server's own: the stream's writes have one."""
    monkeypatch.setattr(faults, "STALLED_SECONDS", 0.2)
    api = await make_api(server=ServerSettings(max_concurrent_requests=1), context_length=2**17, max_total_tokens=2**18)
    with socket.socket() as client:
        await stalled(api, client)
        async with asyncio.timeout(10):
            while api.http.server.runner.server.connections:
                await asyncio.sleep(0)
        assert (await api.generate("abc"))["text"] == "abc"


async def test_a_body_that_trickles_in_is_408(make_api) -> None:
    api = await make_api(server=ServerSettings(body_timeout=SHORT))
    for path in ("/generate", "/tokenize", "/abort_request"):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n".encode()
        async with opened(api) as (reader, writer):
            writer.write(head + b'{"a": ')
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"body_timeout"' in answer
    await api.generate("abc")


async def test_the_body_limit_is_a_flag_and_counts_what_is_unpacked(make_api) -> None:
    api = await make_api(server=ServerSettings(max_body_size=2048))
    fits, large = (json.dumps({"text": "a", "pad": "x" * size}).encode() for size in (1900, 2100))
    headers = {"Content-Type": "application/json"}
    assert (await api.http.post("/generate", data=fits, headers=headers)).status == 200
    packed = {**headers, "Content-Encoding": "gzip"}
    for data, extra in ((large, headers), (gzip.compress(large), packed)):
        async with api.http.post("/generate", data=data, headers=extra) as response:
            assert response.status == 413
            assert "2048 bytes (--max-body-size)" in await response.text()
    assert (await api.http.post("/generate", data=gzip.compress(fits), headers=packed)).status == 200
    chunks = HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n"
    assert (await answer_to(api, chunks, b"400\r\n" + b"x" * 1024 + b"\r\n", b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n"))[0] == 413


async def test_a_body_that_announces_too_much_is_refused_unread(make_api) -> None:
    api = await make_api(server=ServerSettings(max_body_size=2048))
    async with opened(api) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 1000000000000\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(4096), 5)).startswith(b"HTTP/1.1 413")


async def test_a_full_brain_is_503_with_retry_after(make_api) -> None:
    """The scheduler turns away what it cannot seat; here its word arrives as the end of a request that was sent."""
    api = await make_api(scheduler=SchedulerSettings(max_running_requests=8, max_queued_requests=4))
    api.engine.hold()
    for stream in (False, True):
        task = asyncio.create_task(api.http.post("/generate", json=body_for("/generate", rid="r", stream=stream)))
        await api.engine.received(Generate, 1 + stream)
        api.service.client.abort("r", "the queue is full: --max-queued-requests is 4", 503)
        response = await task
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
