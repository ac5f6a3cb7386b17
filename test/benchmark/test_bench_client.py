"""Every way in which an answer can go wrong, against a real HTTP server that misbehaves on demand."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmark.backends import BACKENDS
from benchmark.client import Client
from benchmark.driver import WallClock
from benchmark.timeline import Record

GOOD = (
    b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"text": "b", "finish_reason": "length"}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n',
)
DONE = b"data: [DONE]\n\n"


async def ask(handler: object, *, timeout: float = 20.0, streamed: bool = True) -> tuple[Record, web.Request]:
    """The record of one request to a server with this handler, and the request."""
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        await request.read()
        return await handler(request)  # type: ignore[operator, no-any-return]

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    record = Record(streamed=streamed)
    async with TestServer(app) as server:
        url, clock = f"http://127.0.0.1:{server.port}", WallClock()
        async with Client(url, BACKENDS["vllm"], clock, timeout=timeout, api_key="sesame") as client:
            record.sent = clock.now()
            await client.post(b"{}", record)
    return record, seen[0]


async def stream(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    for piece in pieces:
        await answer.write(piece)
    return answer


def kind(record: Record) -> str:
    assert record.failure is not None
    assert record.end >= record.sent
    return record.failure.kind


async def test_a_good_stream() -> None:
    record, request = await ask(lambda request: stream(request, *GOOD, DONE))
    assert record.failure is None
    assert (record.text, record.completion_tokens) == ("ab", 2)
    assert record.sent <= record.times[0] <= record.times[-1] <= record.end
    assert request.headers["authorization"] == "Bearer sesame"
    assert request.headers["content-type"] == "application/json"


async def test_a_stream_that_ends_properly_without_done_is_complete() -> None:
    record, _ = await ask(lambda request: stream(request, *GOOD))
    assert record.failure is None


@pytest.mark.parametrize("pieces", [(), GOOD[:1], (GOOD[0], DONE)])
async def test_a_stream_without_its_end_is_a_failure(pieces: tuple[bytes, ...]) -> None:
    record, _ = await ask(lambda request: stream(request, *pieces))
    assert kind(record) == "the answer ended early"


async def test_a_connection_that_breaks() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = await stream(request, GOOD[0])
        assert request.transport is not None
        request.transport.abort()
        return answer

    record, _ = await ask(handler)
    assert kind(record) == "connection lost"


async def test_an_answer_that_never_comes() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    record, _ = await ask(handler, timeout=0.2)
    assert kind(record) == "no complete answer within 0.2 s"


async def test_a_stream_that_stops_in_the_middle() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await stream(request, GOOD[0])
        await asyncio.Event().wait()
        raise AssertionError

    record, _ = await ask(handler, timeout=0.3)
    assert kind(record) == "no complete answer within 0.3 s"


async def test_garbage() -> None:
    record, _ = await ask(lambda request: stream(request, b"data: {not json\n\n"))
    assert kind(record) == "unreadable answer"


async def test_an_error_in_the_stream() -> None:
    record, _ = await ask(lambda request: stream(request, GOOD[0], b'data: {"error": {"message": "out of luck"}}\n\n'))
    assert kind(record) == "error in the stream"
    assert record.failure is not None
    assert record.failure.detail == "out of luck"


@pytest.mark.parametrize(
    ("status", "body", "expected", "detail"),
    [
        (503, '{"error": {"message": "full", "type": "overloaded_error", "code": 503}}', "HTTP 503 overloaded_error", "full"),
        (400, '{"error": {"message": "long", "type": "x", "code": "context_length_exceeded"}}', "HTTP 400 context_length_exceeded", "long"),
        (400, '{"object": "error", "message": "long", "type": "BadRequest", "code": 400}', "HTTP 400 BadRequest", "long"),
        (502, "<html>bad gateway</html>", "HTTP 502", "<html>bad gateway</html>"),
        (500, "[]", "HTTP 500", "[]"),
    ],
)
async def test_a_refusal_is_counted_by_status_and_code(status: int, body: str, expected: str, detail: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    record, _ = await ask(handler)
    assert kind(record) == expected
    assert record.failure is not None
    assert record.failure.detail == detail


async def test_nobody_listens() -> None:
    app = web.Application()
    async with TestServer(app) as server:
        port = server.port
    record = Record()
    async with Client(f"http://127.0.0.1:{port}", BACKENDS["vllm"], WallClock(), timeout=5) as client:
        await client.post(b"{}", record)
    assert kind(record) == "cannot connect"


async def test_a_whole_answer() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"choices": [{"text": "ab", "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        )

    record, _ = await ask(handler, streamed=False)
    assert (record.failure, record.text, record.completion_tokens) == (None, "ab", 2)
