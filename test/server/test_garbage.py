"""Bytes that are no HTTP: an answer or a closed connection, and one line in the log, which does not show them."""

from __future__ import annotations

import asyncio
import logging

import pytest


@pytest.mark.parametrize("garbage", [b"Authorization: Bearer sesame\x00\r\n", b"Content-Length: sesame\r\n", b"Content-Length: -5\r\n"])
async def test_garbage_is_one_line_in_the_log_without_its_bytes(api, caplog, garbage) -> None:
    caplog.set_level(logging.INFO)
    server = api.http.server
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n" + garbage + b"\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer.split()[1] == b"400"
    (record,) = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert (record.levelno, record.exc_info) == (logging.INFO, None)
    assert "no HTTP" in record.getMessage()
    assert "sesame" not in caplog.text
    await api.generate("a")


async def test_a_quiet_server_says_nothing_of_garbage(api, caplog) -> None:
    caplog.set_level(logging.WARNING)
    reader, writer = await asyncio.open_connection(api.http.server.host, api.http.server.port)
    writer.write(b"\x00\xff garbage\r\n\r\n")
    await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert caplog.records == []
