"""JSON over HTTP, on aiohttp: one connection pool per backend. Called by the backends that speak to servers.

A request takes at most `timeout` seconds from the first attempt to the last byte. Until then a server that is full (503, 429) is asked
again, when it says so itself or after a short pause; once also one that closed a kept connection just as it was used. Everything else that
goes wrong is a `BackendError` at once. Keys are sent and never shown.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from radixpd_lang.errors import BackendError
from radixpd_lang.loop import at_end

__all__ = ["Http"]

CONNECT_SECONDS = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds before a full server is asked again
FULL = (429, 503)
WORDS = 500  # characters of a server's own words that are kept


class Http:
    """Requests to one server."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"the URL of a server begins with http:// or https://, got {base_url!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds above 0, got {timeout}")
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, path: str) -> Any:
        """GET; the answer's JSON."""
        async with self._answer("GET", path, None) as answer:
            return _parsed(await answer.read(), path)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST; the answer's JSON."""
        async with self._answer("POST", path, body) as answer:
            return _parsed(await answer.read(), path)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """POST; the server-sent events of the answer, up to `[DONE]`. Leaving early closes the connection, which ends the request."""
        async with self._answer("POST", path, body) as answer:
            held = b""
            async for chunk in answer.content.iter_any():
                *lines, held = (held + chunk).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event = _parsed(data, path)
                    if isinstance(event, dict) and event.get("error"):
                        raise _refusal(None, data, path)
                    yield event
        raise BackendError(f"{self.base_url}{path}: the stream ended without [DONE]")

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None and self._loop is asyncio.get_running_loop():
            await session.close()

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of status 200, whose reading is under the same deadline."""
        url = self.base_url + path
        try:
            async with asyncio.timeout(self.timeout) as limit:
                answer = await self._ask(method, path, body)
                try:
                    yield answer
                finally:
                    answer.close()  # an answer that was read to its end has given its connection back before
        except TimeoutError:
            what = f"no complete answer within {self.timeout:g} s" if limit.expired() else f"no connection within {CONNECT_SECONDS:g} s"
            raise BackendError(f"{url}: {what}") from None
        except aiohttp.ClientConnectorError as error:
            raise BackendError(f"{url}: cannot connect: {error.strerror or error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise BackendError(f"{url}: connection lost ({type(error).__name__}: {error})") from None

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> aiohttp.ClientResponse:
        """Ask until there is an answer other than "full"."""
        data = None if body is None else json.dumps(body).encode()
        session, pause, stale = self._open(), FIRST_PAUSE, 1
        until = time.monotonic() + self.timeout
        while True:
            try:
                answer = await session.request(method, self.base_url + path, data=data)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if not stale or isinstance(error, aiohttp.ClientConnectorError):
                    raise
                stale -= 1
                continue
            if answer.status == 200:
                return answer
            async with answer:
                words = await answer.read()
            wait = _seconds(answer.headers.get("retry-after"), pause)
            if answer.status not in FULL or time.monotonic() + wait > until:
                raise _refusal(answer.status, words, path)
            await asyncio.sleep(wait * random.uniform(0.8, 1.2))  # not all programs of a batch at once
            pause = min(2 * pause, LONGEST_PAUSE)

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                headers={"content-type": "application/json", **self._headers},
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=2**20,
            )
            at_end(self.close)
        return self._session


def _parsed(data: bytes, path: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise BackendError(f"{path}: no JSON: {data[:WORDS].decode(errors='replace')!r}") from None


def _refusal(status: int | None, body: bytes, path: str) -> BackendError:
    """The server's own words about what was wrong; in the middle of a stream there is no status."""
    where = f"{path}, in its stream" if status is None else f"{path}, {status}"
    try:
        decoded: Any = json.loads(body)
    except ValueError:
        decoded = None
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else None
    if not isinstance(error, dict):
        return BackendError(f"{body[:WORDS].decode(errors='replace')} ({where})", status=status)
    param = error.get("param")
    message = str(error.get("message", error))[:WORDS]
    return BackendError(f"{message} ({where})", status=status, param=param if isinstance(param, str) else None)


def _seconds(header: str | None, otherwise: float) -> float:
    try:
        return max(0.0, min(float(header or otherwise), 60.0))
    except ValueError:
        return otherwise
