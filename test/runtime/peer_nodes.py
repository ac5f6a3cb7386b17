"""Two or more `Peers` in one process, over real sockets on loopback, with a clock of their own. Used by the tests of the control link."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq

from radixpd.config.secret import Secret
from radixpd.core.handoff import PeerMessage, Reserve
from radixpd.errors import ConfigError
from radixpd.runtime.peer_messages import Layout
from radixpd.runtime.peers import Identity, News, Peers

SECRET = Secret("a secret of enough letters")
DEADLINE = 10.0  # real seconds for anything to happen
LAYOUT = Layout(layers=2, kv_heads=1, head_dim=8, page_size=16, dtype="bfloat16", order="NHD", fingerprint="f" * 16)

_incarnations = itertools.count(1)


def identity(role: str, **changes: Any) -> Identity:
    fields: dict[str, Any] = {"role": role, "name": f"{role}:1", "model": "m1", "layout": LAYOUT, "tp": 1, "offers": {"shm": {"of": role}}}
    return Identity(**{**fields, **changes})


def reserve(room: int, pages: int = 3) -> Reserve:
    return Reserve(room, 16 * pages, 0, np.arange(pages, dtype=np.int32), 10.0, b"d" * 32, 0)


class Clock:
    """Time as the nodes see it: it passes as they turn, and jumps when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0


class Node:
    """One scheduler's end of the link, and everything it has heard."""

    def __init__(
        self, context: zmq.Context[Any], clock: Clock, role: str, *, secret: Secret | None = SECRET, port: int = 0, **options: Any
    ) -> None:
        self.clock = clock
        self.poller = zmq.Poller()
        self.events: list[tuple[str, PeerMessage | News]] = []
        self.incarnation = next(_incarnations).to_bytes(16, "little")
        own = options.pop("identity", identity(role))
        bind = ("127.0.0.1", port) if role == "prefill" else None
        self.peers = Peers(context, self.poller, secret=secret, incarnation=self.incarnation, bind=bind, **options)
        if own is not None:
            self.peers.identify(own)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.peers.port}"

    def turn(self) -> None:
        self.poller.poll(2)
        self.events += self.peers.drain(self.clock.now)
        self.peers.tick(self.clock.now)
        self.events += self.peers.drain(self.clock.now)

    def send(self, peer: str, message: PeerMessage) -> None:
        self.peers.send(peer, message, self.clock.now)

    def heard(self, kind: type) -> list[Any]:
        return [item for _, item in self.events if isinstance(item, kind)]

    def peer(self) -> str:
        """The one peer that this node knows."""
        (view,) = self.peers.view(self.clock.now)
        return view.peer


class Room:
    """Nodes that turn together."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.context = context
        self.clock = Clock()
        self.nodes: list[Node] = []

    def add(self, role: str, **options: Any) -> Node:
        self.nodes.append(node := Node(self.context, self.clock, role, **options))
        return node

    def restart(self, node: Node) -> Node:
        """Another process in place of a prefill node, on the same port: ZMQ lets go of it in its own time."""
        port, deadline = node.peers.port, time.monotonic() + DEADLINE
        self.remove(node)
        while True:
            try:
                return self.add("prefill", port=port)
            except ConfigError:
                assert time.monotonic() < deadline, "the port is never free"
                self.turns(1)

    def remove(self, node: Node) -> None:
        self.nodes.remove(node)
        node.peers.close()

    def until(self, done: Callable[[], object], what: str = "") -> None:
        deadline = time.monotonic() + DEADLINE
        while not done():
            assert time.monotonic() < deadline, f"{what or 'it'} never happened; heard: {[node.events for node in self.nodes]}"
            self.turns(1)

    def turns(self, count: int, step: float = 0.01) -> None:
        for _ in range(count):
            self.clock.now += step
            for node in self.nodes:
                node.turn()

    def pass_time(self, seconds: float) -> None:
        """Half a second at a time, everyone turning."""
        self.turns(int(seconds * 2), 0.5)

    def live(self, seconds: float, *nodes: Node) -> None:
        """Half a second at a time, and each time these nodes hear their peers before it goes on, however slow the machine is."""

        def heard() -> bool:
            return all(view.silent_seconds <= 1 for node in nodes for view in node.peers.view(self.clock.now))

        for _ in range(int(seconds * 2)):
            self.clock.now += 0.5
            self.turns(1, 0.0)
            self.until(heard, "a heartbeat")


@contextmanager
def open_room() -> Iterator[Room]:
    context: zmq.Context[Any] = zmq.Context()
    room = Room(context)
    try:
        yield room
    finally:
        for node in list(room.nodes):
            room.remove(node)
        context.destroy(linger=0)
