"""The seam between the mover and whatever carries pages to a peer's pool, and the list of those there are.

A transport serves both directions: it lets known peers write into the own pool (as `Arrivals` permits), and writes into theirs. It lives
on the mover's thread alone and never waits: sockets go into the mover's selector with a callback as their data, everything timed happens
in `poll`. Invariants: every `send` is answered by exactly one `Finished`; no byte is written for a room after its `cancel` was
answered True, or after its `Quiet`; nobody without the token gets near a pool. The mover paces and orders; a transport only carries.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from selectors import BaseSelector
from typing import Protocol

import numpy as np
import torch

from radixpd.core.handoff import Failure, Landed, PeerLost, Quiet
from radixpd.errors import ConfigError, PeerFailed
from radixpd.kv.arrivals import Arrivals
from radixpd.kv.coding import Coded, Decoder
from radixpd.kv.layout import KVLayout
from radixpd.kv.pool import Pool

__all__ = [
    "Counters", "Endpoint", "Finished", "Ground", "KVTransport", "News", "TransportOptions", "boot_id", "byte_rows", "check_endpoint",
    "choose", "create",
]  # fmt: skip

TRANSPORTS = {
    "shm": "radixpd.kv.transport_shm:ShmTransport",
    "tcp": "radixpd.kv.transport_tcp:TcpTransport",
    "mooncake": "radixpd.kv.transport_mooncake:transport",
    "nixl": "radixpd.kv.transport_nixl:transport",
}
MIN_TOKEN = 16  # bytes


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a pool can be written to; plain data, told to peers in the handshake. Holds no secret."""

    transport: str
    address: str  # tcp: host:port; shm: the Unix socket's path
    pages: int
    fingerprint: str  # of the layout
    boot_id: str = ""  # of the machine
    details: str = ""  # the transport's own


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """`host`: where to listen, `advertise`: what peers are told instead; `folder`: a private one, for the
    Unix socket. The rest: seconds."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    folder: str = ""
    ib_device: str = ""  # mooncake: RDMA devices, as mlx5_0,mlx5_1; empty: TCP
    connections: int = 3  # to one peer
    connect: float = 5.0  # until a connection stands, greeting included
    grace: float = 1.0  # all connections of a peer are closed: until it counts as lost
    patience: float = 5.0  # a frame may come before the brain's word that its room is expected


@dataclass(slots=True)
class Counters:
    """What the transports of one mover have done so far. `bytes`: of pages as they crossed, coded or not; `raw`: of the same pages in the
    pool."""

    bytes_in: int = 0
    bytes_out: int = 0
    raw_in: int = 0
    raw_out: int = 0
    frames_in: int = 0
    frames_out: int = 0
    refused: int = 0  # frames for unknown rooms or foreign pages
    wrong_tokens: int = 0
    cut: int = 0  # connections that ended while frames were unanswered


@dataclass(frozen=True, slots=True)
class Finished:
    """One `send` is over: the receiver has it, or `error` says why not."""

    number: int
    error: str = ""


News = Finished | Quiet | Landed | Failure | PeerLost


@dataclass(slots=True)
class Ground:
    """What all transports of one mover stand on. `ended`: rooms whose source pages may be given up; asked before a frame is called good.
    `decoder`: for coded pages; None where none are taken."""

    selector: BaseSelector
    arrivals: Arrivals
    ended: Container[int]
    options: TransportOptions = field(default_factory=TransportOptions)
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    decoder: Decoder | None = None
    nap: float = math.inf  # seconds until a transport must be polled again, where no socket would say so; lowered by it, reset before polls


class KVTransport(Protocol):
    """Carries pages. `expect` of the design is `Arrivals.expect`: one book for all transports; `meet`, `part` and `close`
    frame the life of a peer and of the transport; `may_write` is what makes a dead peer's rooms quiet at once."""

    def open(self, layout: KVLayout, pool: Pool) -> Endpoint:
        """Make the pool reachable. Raises ConfigError."""
        ...

    def meet(self, peer: str, token: bytes, endpoint: Endpoint | None) -> None:
        """Know a peer: with an endpoint we write there, without one it writes here. A new token is a new incarnation. Raises PeerFailed."""
        ...

    def part(self, peer: str) -> None:
        """Know a peer no more."""
        ...

    def send(self, peer: str, room: int, layer: int, source: np.ndarray, target: np.ndarray, coded: Coded | None = None) -> int:
        """Write own pages `source` of a layer to the peer's pages `target`; the number that its `Finished` will carry. Until then the
        bytes of `coded`, which go in their place, stay as they are; it is given only to `codec_choice.CARRIERS`."""
        ...

    def cancel(self, room: int) -> bool:
        """Write no more of this room. True: nothing of it is under way; else `Quiet` follows."""
        ...

    def may_write(self, peer: str) -> bool:
        """Whether a room that is over here may still be written into: by the peer itself, not by this thread."""
        ...

    def poll(self) -> list[News]:
        """Do what is due; what has happened since the last call."""
        ...

    def close(self) -> None:
        """Let go of everything, at once."""
        ...


@cache
def _factory(name: str) -> Callable[[Ground], KVTransport]:
    if name not in TRANSPORTS:
        raise ConfigError(f"unknown transport {name!r}: --disaggregation-transfer-backend is one of {', '.join(TRANSPORTS)}")
    module, _, attribute = TRANSPORTS[name].partition(":")
    try:
        factory: Callable[[Ground], KVTransport] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"--disaggregation-transfer-backend {name} needs a package that is not installed: {error}") from error
    return factory


def create(name: str, ground: Ground) -> KVTransport:
    """A transport by name; its module is imported now. Raises ConfigError."""
    return _factory(name)(ground)


def boot_id() -> str:
    """A name of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def choose(offered: tuple[Endpoint, ...], usable: tuple[str, ...]) -> Endpoint:
    """The best of a peer's endpoints: shared memory where both are on one host, else in our own order. Raises PeerFailed."""
    here = boot_id()
    for name in sorted(usable, key=lambda each: each != "shm"):
        for endpoint in offered:
            if endpoint.transport == name and (name != "shm" or (endpoint.boot_id == here and Path(endpoint.address).is_socket())):
                return endpoint
    theirs = ", ".join(each.transport for each in offered) or "none"
    raise PeerFailed(f"no common transport: the peer offers {theirs}, this server has {', '.join(usable)} (shm only on one host)")


def check_endpoint(endpoint: Endpoint, layout: KVLayout, token: bytes) -> None:
    """Raise PeerFailed when nothing good can come of writing there."""
    if endpoint.fingerprint != layout.fingerprint:
        raise PeerFailed(f"the peer's KV layout is {endpoint.fingerprint}, this server's {layout.fingerprint}")
    if endpoint.pages < 1:
        raise PeerFailed(f"the peer's pool has {endpoint.pages} pages")
    check_token(token)


def check_token(token: bytes) -> None:
    """A short token could be guessed."""
    if len(token) < MIN_TOKEN:
        raise PeerFailed(f"a data token has at least {MIN_TOKEN} bytes, not {len(token)}")


def byte_rows(pool: Pool) -> list[np.ndarray]:
    """Each layer's pages as bytes, uint8 `[pages, page_bytes]`, over the pool's own memory."""
    return [layer.view(torch.uint8).view(pool.pages, pool.layout.page_bytes).numpy() for layer in pool.layers]
