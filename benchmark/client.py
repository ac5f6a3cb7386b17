"""One HTTP request and its answer, on aiohttp. `Client.post` never raises: every way to fail ends as a `Failure` in the record.

A kind of failure is short and the same for equal cases, so that it can be counted; its detail is one server's own words. Every wait ends:
`timeout` is the longest life of a request. Called by `driver`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import aiohttp
import msgspec
import yarl

from benchmark.backends import Backend, Reader
from benchmark.driver import Clock
from benchmark.events import EventSplitter
from benchmark.timeline import Failure, Record

__all__ = ["Client"]

CONNECT_SECONDS = 30.0
READ_BUFFER = 2**20
DETAIL = 300  # characters of a server's words that are kept


class Client:
    """An async context manager around one connection pool."""

    def __init__(self, base_url: str, backend: Backend, clock: Clock, *, timeout: float, api_key: str | None = None) -> None:
        self._url = yarl.URL(base_url + backend.path)
        self._backend = backend
        self._clock = clock
        self._timeout = timeout
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {api_key}"} if api_key else {})}

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=CONNECT_SECONDS),
            read_bufsize=READ_BUFFER,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def post(self, body: bytes, record: Record) -> None:
        """Send, read to the end, fill the record."""
        try:
            await self._exchange(body, record)
        except TimeoutError:
            record.failure = Failure(f"no complete answer within {self._timeout:g} s")
        except aiohttp.ClientConnectorError as error:
            record.failure = Failure("cannot connect", str(error))
        except (aiohttp.ClientError, OSError) as error:
            record.failure = Failure("connection lost", f"{type(error).__name__}: {error}")
        except msgspec.MsgspecError as error:
            record.failure = Failure("unreadable answer", str(error))
        if record.failure is not None:
            record.end = self._clock.now()

    async def _exchange(self, body: bytes, record: Record) -> None:
        async with self._session.post(self._url, data=body) as answer:
            if answer.status != 200:
                record.failure = refusal(answer.status, await answer.read())
                return
            reader = self._backend.reader(record)
            if record.streamed:
                await self._read_stream(answer, reader, record)
            else:
                reader.whole(await answer.read(), self._clock.now())
            reader.close()
            if not reader.finished and record.failure is None:
                record.failure = Failure("the answer ended early")

    async def _read_stream(self, answer: aiohttp.ClientResponse, reader: Reader, record: Record) -> None:
        splitter = EventSplitter()
        async for piece in answer.content.iter_any():
            now = self._clock.now()
            for payload in splitter.feed(piece):
                if payload == b"[DONE]":
                    return
                reader.event(payload, now)
                if record.failure is not None:
                    return


def refusal(status: int, body: bytes) -> Failure:
    """What an answer other than 200 says: the status and the error's code or type as the kind."""
    try:
        decoded: Any = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        decoded = None
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else None
    if not isinstance(error, dict):
        return Failure(f"HTTP {status}", body[:DETAIL].decode(errors="replace"))
    code = error.get("code")
    word = code if isinstance(code, str) else error.get("type")
    return Failure(f"HTTP {status} {word}" if word else f"HTTP {status}", str(error.get("message", ""))[:DETAIL])
