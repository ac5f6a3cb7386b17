"""Pages over TCP: pool memory goes to the socket and from the socket into the peer's pool, with no copy of ours in between. Coded pages
go through staging memory on both sides.

The decode side listens; a prefill side keeps several connections to each peer. This receiver's mover is the only writer of its pool, so a
peer whose connections are all closed, and stay so for a moment, has lost all access once its rooms are forgotten: then it counts as lost.
"""

from __future__ import annotations

import socket

import numpy as np

from radixpd.core.handoff import PeerLost
from radixpd.errors import ConfigError, PeerFailed
from radixpd.kv import frames
from radixpd.kv.coding import Coded
from radixpd.kv.inbound import Inbound
from radixpd.kv.layout import KVLayout
from radixpd.kv.outbound import Frame, Line
from radixpd.kv.pool import Pool
from radixpd.kv.reception import Reception
from radixpd.kv.stream import Output
from radixpd.kv.transport import Endpoint, Finished, Ground, News, byte_rows, check_endpoint, check_token

__all__ = ["TcpTransport"]

BACKLOG = 64
SILENCE_MS = 30_000  # the kernel gives a connection up when sent bytes stay unconfirmed for so long
PROBES = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, SILENCE_MS))


class TcpTransport:
    """See `KVTransport`. Without `bodies` its frames bring no bytes: they tell what another transport has put in place."""

    def __init__(self, ground: Ground, *, bodies: bool = True) -> None:
        self._ground, self._bodies = ground, bodies
        self._lines: dict[str, Line] = {}
        self._alone: dict[str, float] = {}  # peers without a connection: since when
        self._news: list[News] = []

    def open(self, layout: KVLayout, pool: Pool) -> Endpoint:
        """Listen."""
        options = self._ground.options
        self._layout, self._rows = layout, byte_rows(pool)
        try:
            family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            listener = socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"the KV transfer port cannot be opened on {options.host}:{options.port}: {error.strerror}") from error
        self._reception = Reception(
            self._ground,
            listener,
            fingerprint=layout.fingerprint,
            pages=pool.pages,
            rows=self._rows if self._bodies else None,
            welcome=self._welcome,
            gone=self._left,
        )
        host = options.advertise or options.host
        return Endpoint("tcp", f"{host}:{listener.getsockname()[1]}", pool.pages, layout.fingerprint)

    def meet(self, peer: str, token: bytes, endpoint: Endpoint | None) -> None:
        """See `KVTransport`."""
        if endpoint is None:
            self._admit(peer, token)
            return
        check_endpoint(endpoint, self._layout, token)
        host, _, port = endpoint.address.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        except (OSError, ValueError) as error:
            raise PeerFailed(f"the peer's data address {endpoint.address} makes no sense: {error}") from error
        old = self._lines.get(peer)
        if old is not None:
            if (old.endpoint, old.token) == (endpoint, token):
                return
            self._news += old.close("the peer has restarted", gone=True)
        connections = self._ground.options.connections if self._bodies else 1
        self._lines[peer] = Line(self._ground, endpoint, token, connect=lambda: _connecting(found[0], found[4]), connections=connections)

    def line(self, peer: str) -> Line | None:
        """What goes to a peer."""
        return self._lines.get(peer)

    def part(self, peer: str) -> None:
        """See `KVTransport`."""
        if (line := self._lines.pop(peer, None)) is not None:
            self._news += line.close("the peer is not served any more", gone=False)
        if self._reception.tokens.pop(peer, None) is not None:
            self._reception.dismiss(peer, "the peer is not served any more")
            self._lose(peer, "its access was taken away")

    def send(self, peer: str, room: int, layer: int, source: np.ndarray, target: np.ndarray, coded: Coded | None = None) -> int:
        """See `KVTransport`."""
        number = next(self._ground.numbers)
        line = self._lines.get(peer)
        if line is None:
            self._news.append(Finished(number, f"there is no connection to {peer}"))
            return number
        rows, runs, born = self._rows[layer], frames.runs_of(target), self._ground.clock()
        whole, size = rows.reshape(-1).data, rows.shape[1]
        if coded is not None:
            head = frames.HEAD.pack(frames.CODED, layer, len(runs), room, number)
            head += frames.CODING.pack(coded.codec.encode(), coded.span.size) + runs.tobytes()
            line.send(Frame(number, room, head, [coded.span.view], coded.span.size, born, raw=size * len(source)))
            return number
        own = frames.runs_of(source).tolist() if self._bodies else []
        body: list[Output] = [whole[first * size : (first + count) * size] for first, count in own]
        head = frames.HEAD.pack(frames.DATA, layer, len(runs), room, number) + runs.tobytes()
        line.send(Frame(number, room, head, body, size * len(source), born))
        return number

    def cancel(self, room: int) -> bool:
        """See `KVTransport`."""
        answers = [line.cancel(room) for line in self._lines.values()]  # every one is asked
        return all(answers)

    def may_write(self, peer: str) -> bool:
        """See `KVTransport`. Bytes that this thread puts into the pool stop with the room; others while the peer is connected."""
        return not self._bodies and (bool(self._reception.of(peer)) or peer in self._alone)

    def poll(self) -> list[News]:
        """See `KVTransport`."""
        self._reception.poll()
        now = self._ground.clock()
        for peer, since in list(self._alone.items()):
            if self._reception.of(peer):
                del self._alone[peer]
            elif now - since > self._ground.options.grace:
                self._lose(peer, "all its data connections have ended")
        news, self._news = self._news + self._reception.news, []
        self._reception.news = []
        for line in self._lines.values():
            news += line.poll()
        return news

    def close(self) -> None:
        """See `KVTransport`."""
        for line in self._lines.values():
            line.close("this server is closing")
        self._reception.close()
        self._rows = []  # the pool's memory is given back when nobody looks at it any more

    # ---- inner ------------------------------------------------------------------------------------------------------------------

    def _admit(self, peer: str, token: bytes) -> None:
        check_token(token)
        old = self._reception.tokens.get(peer)
        if old == token:
            return
        self._reception.tokens[peer] = token
        if old is not None:
            self._reception.dismiss(peer, "the peer has restarted")
            self._lose(peer, "it has restarted")

    def _welcome(self, guest: Inbound, word: bytes) -> None:
        _tune(guest.stream.sock)
        guest.stream.write(memoryview(word))

    def _left(self, guest: Inbound) -> None:
        if not self._reception.of(guest.peer):
            self._alone[guest.peer] = self._ground.clock()

    def _lose(self, peer: str, reason: str) -> None:
        """Nobody writes for this peer any more, and nobody will."""
        self._alone.pop(peer, None)
        self._ground.arrivals.end_peer(peer)
        self._news.append(PeerLost(peer, reason))


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in PROBES:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _connecting(family: int, address: tuple[object, ...]) -> socket.socket:
    """A socket on its way to the address."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _tune(sock)
        sock.connect(address)
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        raise
    return sock
