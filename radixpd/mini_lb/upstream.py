"""Requests to workers: connections, headers, and what can go wrong on the way.

Headers pass end to end by rule: hop-by-hop ones and those that this hop makes itself are dropped both ways; the client's key goes on only
where this balancer does not ask for one itself. Invariant: every failure is a `LegFailed` that says whether the worker may have begun to
compute; no wait is without a deadline: connecting has its own, everything else runs under the request's. Called by the proxy, `pd` and
`fleet`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp import AddrInfoType, hdrs
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from radixpd.mini_lb.settings import LbSettings

__all__ = ["LegFailed", "Outgoing", "Reply", "Upstream", "request_headers", "response_headers"]

KEEP_ALIVE = 60.0  # seconds; below the 620 of our servers, so that this side closes first and no request meets a closing connection

LONGEST_LOOK = 1 << 24  # bytes of such an answer: what a worker says of itself is short

# RFC 9110, 7.6.1; what `Connection` names is dropped too.
HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
CORS = (
    hdrs.ACCESS_CONTROL_ALLOW_ORIGIN,
    hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS,
    hdrs.ACCESS_CONTROL_EXPOSE_HEADERS,
)
OWN = frozenset(("host", "content-length", "expect", "content-encoding", "accept-encoding", "date", "server", "x-request-id"))


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as a worker gave it, to be passed on."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


@dataclass(slots=True, eq=False)
class LegFailed(Exception):
    """A request to a worker failed before its client got a byte. `reply`: the worker's own error, if it gave one."""

    worker: str
    reason: str
    sent: bool = True  # the worker may have begun to compute
    reply: Reply | None = None
    retryable: bool = True

    def __str__(self) -> str:
        return f"{self.worker}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request on its way to workers: the same for every try and leg, but for the body."""

    method: str
    path: str  # as the client wrote it, with its query
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)


class Upstream:
    """The client side. Made inside the loop that serves."""

    def __init__(self, settings: LbSettings) -> None:
        key = settings.fleet.worker_api_key
        self._key = {} if key is None else {hdrs.AUTHORIZATION: f"Bearer {key.reveal()}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.door.connect_timeout)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE, socket_factory=_socket)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False,
            skip_auto_headers=(hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE), read_bufsize=2**18,
        )  # fmt: skip

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def open(self, worker: str, outgoing: Outgoing, body: bytes | None) -> aiohttp.ClientResponse:
        """The head of a worker's answer; whoever calls closes it."""
        try:
            return await self._session.request(
                outgoing.method, URL(worker + outgoing.path, encoded=True), headers=outgoing.headers, data=body, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise LegFailed(worker, f"cannot be reached: {_words(error)}", sent=False) from None
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed(worker, f"the connection failed: {_words(error)}") from None

    async def read(self, worker: str, response: aiohttp.ClientResponse) -> bytes:
        """The rest of an answer."""
        try:
            return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed(worker, f"the answer broke off: {_words(error)}") from None

    async def look(self, url: str, *, seconds: float) -> tuple[int, bytes]:
        """Status and body of a short GET; status 0 if there was no answer in time, or one without end."""
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.get(URL(url, encoded=True), headers=self._key, allow_redirects=False) as found,
            ):
                body = bytearray()
                async for part in found.content.iter_any():
                    body += part
                    if len(body) > LONGEST_LOOK:
                        return 0, b""
                return found.status, bytes(body)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, b""


def _socket(address: AddrInfoType) -> socket.socket:
    """A socket that notices within half a minute that its peer's machine has vanished; a request may be silent for longer than that."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4), (socket.TCP_USER_TIMEOUT, 30_000)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def request_headers(given: Mapping[str, str], *, request_id: str, key: str | None, pass_key: bool) -> CIMultiDict[str]:
    """What goes to a worker. `key`: of the worker, instead of the client's; `pass_key`: whether the client's own may go on."""
    headers = _end_to_end(given)
    headers["X-Request-Id"] = request_id
    if not pass_key:
        headers.popall(hdrs.AUTHORIZATION, None)
    if key is not None:
        headers[hdrs.AUTHORIZATION] = f"Bearer {key}"
    return headers


def response_headers(given: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """What goes back to the client."""
    headers = _end_to_end(given)
    for name in CORS:  # which pages may read an answer, this balancer says
        headers.popall(name, None)
    if (encoding := given.get(hdrs.CONTENT_ENCODING)) is not None:
        headers[hdrs.CONTENT_ENCODING] = encoding  # the body passes as it is
    return headers


def _end_to_end(given: Mapping[str, str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in given.get(hdrs.CONNECTION, "").split(",")}
    dropped = HOP_BY_HOP | OWN | named
    return CIMultiDict((name, value) for name, value in given.items() if name.lower() not in dropped)


def _words(error: BaseException) -> str:
    """Why, without the address: messages reach clients."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or type(error.os_error).__name__
    if isinstance(error, aiohttp.ClientResponseError):  # the parser's message has what it stumbled over in lines of its own
        return error.message.partition("\n")[0].rstrip(":") or type(error).__name__
    if isinstance(error, aiohttp.ServerDisconnectedError):  # its message may be the half of the head that came
        return "Server disconnected"
    return type(error).__name__ if isinstance(error, aiohttp.ClientPayloadError) else str(error) or type(error).__name__
