"""The rim: bytes that are no HTTP, damaged bodies, clients that close their sending side. Raw sockets against the real connection."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp.compression_utils import ZLibDecompressor

from radixpd.config.settings import ServerSettings
from radixpd.runtime.messages import Abort, Generate
from radixpd.server import connection

BODY = b'{"text": "abc", "sampling_params": {"max_new_tokens": 3, "ignore_eos": true}}'
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ASK = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@asynccontextmanager
async def opened(api) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(api.http.server.host, api.http.server.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_to(api, *parts: bytes, half_close: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to raw bytes, up to the end of the connection."""
    async with opened(api) as (reader, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(10):
            raw = await reader.read()
    assert raw.startswith(b"HTTP/1.")
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, body


def chunked(*chunks: bytes) -> bytes:
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks)


REFUSED = {
    "noise": (b"\x00\x01\x02\r\n\r\n", 400),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "http2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "header of 1 MiB": (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 2**20 + b"\r\n\r\n", 431),
    "target of 1 MiB": (b"GET /health?" + b"y" * 2**20 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "10 000 headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(10_000)) + b"\r\n", 431),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 400),
    "HTTP/2.0 in words": (b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "negative length": (HEAD + b"Content-Length: -2\r\n\r\n{}", 400),
    "length and chunks": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunk size": (chunked(b"zz\r\nhello\r\n0\r\n\r\n"), 400),
    "brotli": (HEAD + b"Content-Encoding: br\r\nContent-Length: 5\r\n\r\nhello", 415),
    "unknown encoding": (HEAD + b"Connection: close\r\nContent-Encoding: sesame\r\nContent-Length: 2\r\n\r\n{}", 415),
    "expectation": (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: a miracle\r\n\r\n", 417),
    "expectation in odd bytes": (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: \xff\xfe\r\n\r\n", 417),
    "control character": (b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\x01\r\n\r\n", 400),
    "length in words": (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: sesame\r\n\r\n", 400),
    "target": (b"GET http://[sesame HTTP/1.1\r\nHost: x\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("half_close", [False, True])
async def test_what_is_no_request_gets_the_error_shape_and_one_line_in_the_log(api, caplog, name, half_close) -> None:
    caplog.set_level(logging.INFO)
    raw, expected = REFUSED[name]
    status, headers, body = await answer_to(api, raw, half_close=half_close)
    assert status == expected
    assert headers["content-type"] == "application/json"
    assert headers["server"] == "radixpd"
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", expected)
    assert len(caplog.records) <= 1
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.INFO]
    assert "sesame" not in caplog.text
    await api.generate("a")


async def test_a_quiet_server_says_nothing_of_garbage(api, caplog) -> None:
    caplog.set_level(logging.WARNING)
    await answer_to(api, b"\x00\xff garbage\r\n\r\n")
    assert caplog.records == []


async def test_the_header_limit_is_a_flag(make_api) -> None:
    api = await make_api(server=ServerSettings(max_header_size=2048))
    line = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: %s\r\n\r\n"
    assert (await answer_to(api, line % (b"y" * 2000)))[0] == 200
    status, _, body = await answer_to(api, line % (b"y" * 2100))
    assert status == 431
    assert b"2048 bytes (--max-header-size)" in body


async def test_headers_are_counted(api) -> None:
    most = connection.MAX_HEADERS
    for count, status in ((most - 2, 200), (most + 1, 431)):
        fields = b"".join(b"X-%d: 1\r\n" % i for i in range(count))
        assert (await answer_to(api, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + fields + b"\r\n"))[0] == status


@pytest.mark.parametrize(
    "parts",
    [
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",),
        (chunked(b"5\r\n{\"a\":\r\n"), b"zz\r\n\r\n"),
    ],
)  # fmt: skip
async def test_a_body_that_turns_out_damaged_is_refused(api, caplog, parts) -> None:
    caplog.set_level(logging.INFO)
    async with opened(api) as (reader, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
            # The handler must be waiting for the rest when the damage comes.
            await api.http.get("/health")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.split()[1] == b"400"
        assert b"\r\nConnection: close\r\n" in head  # or the client's next request would meet a closed connection
        assert b"the body could not be read" in await asyncio.wait_for(reader.read(200), 5)
    assert caplog.records == []
    await api.generate("a")


async def test_gzip_is_understood(api) -> None:
    packed = gzip.compress(BODY)
    raw = HEAD + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed
    status, _, body = await answer_to(api, raw)
    assert (status, json.loads(body)["text"]) == (200, "abc")


async def test_what_nobody_reads_is_not_unpacked(api, monkeypatch) -> None:
    """A packed body that is refused must not go on being unpacked: a few MiB of it would hold up everybody for seconds."""
    unpacked = 0
    unpack = ZLibDecompressor.decompress_sync

    def counted(self, *args, **options) -> bytes:
        nonlocal unpacked
        piece = unpack(self, *args, **options)
        unpacked += len(piece)
        return piece

    monkeypatch.setattr(ZLibDecompressor, "decompress_sync", counted)
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = packer.compress(bytes(2**28)) + packer.flush()
    for route, status in ((b"/nope", 404), (b"/health", 405)):
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % (route, len(bomb))
        found, _, body = await answer_to(api, head, bomb, half_close=True)
        assert found == status
        json.loads(body)
    assert 0 < unpacked < 2**24


async def test_the_answer_comes_before_the_bytes_that_follow_it(api) -> None:
    async with opened(api) as (reader, writer):
        writer.write(ASK)
        await api.engine.received(Generate)
        writer.write(b"\x00 garbage\r\n\r\n")
        raw = await asyncio.wait_for(reader.read(), 5)
    assert raw.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.0 400" in raw


@pytest.mark.parametrize("raw", [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n", ASK])
async def test_a_client_that_has_only_ended_its_sending_gets_its_answer(api, raw) -> None:
    status, _, body = await answer_to(api, raw, half_close=True)
    assert status == 200
    json.loads(body)


async def test_pipelined_requests_of_a_half_closed_client_are_all_answered(api) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    async with opened(api) as (reader, writer):
        writer.write(get * 3)
        writer.write_eof()
        assert (await asyncio.wait_for(reader.read(), 5)).count(b"HTTP/1.1 200 OK") == 3


async def test_a_half_closed_client_gets_an_answer_that_takes_long(api, monkeypatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PROBE", 0.001)
    api.engine.hold()
    async with opened(api) as (reader, writer):
        writer.write(ASK)
        writer.write_eof()
        # Only a client that is probed sees the word that it must skip.
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == connection.STILL_THERE
        api.engine.release()
        raw = await asyncio.wait_for(reader.read(), 10)
    assert b"HTTP/1.1 200 OK" in raw
    assert raw.endswith(b"}")
    assert api.engine.of(Abort) == []


async def test_a_client_that_closed_is_told_from_one_that_waits(api, monkeypatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PROBE", 0.001)
    api.engine.hold()
    async with opened(api) as (_, writer):
        writer.write(ASK)
        await api.engine.received(Generate)
    await api.engine.received(Abort)
    await asyncio.wait_for(api.service.client.idle(), 5)


async def test_an_old_client_that_closed_counts_as_gone(api, monkeypatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PROBE", 0.001)
    monkeypatch.setattr(connection, "BLIND", 0.01)
    api.engine.hold()
    async with opened(api) as (_, writer):
        writer.write(ASK.replace(b"HTTP/1.1", b"HTTP/1.0"))
        await api.engine.received(Generate)
        writer.write_eof()
        await api.engine.received(Abort)


async def test_half_a_body_is_no_request(api) -> None:
    async with opened(api) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 100\r\n\r\n{}")
        await api.http.get("/health")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b""
    await api.generate("a")


async def test_no_answer_tells_versions(api) -> None:
    for path in ("/health", "/nothing", "/metrics", "/generate"):
        response = await api.http.get(path)
        assert response.headers["Server"] == "radixpd"


async def test_a_thousand_idle_connections_stop_nobody(api) -> None:
    async with asyncio.timeout(60):
        idle = [await asyncio.open_connection(api.http.server.host, api.http.server.port) for _ in range(1000)]
        try:
            await api.generate("still here")
        finally:
            for _, writer in idle:
                writer.close()
