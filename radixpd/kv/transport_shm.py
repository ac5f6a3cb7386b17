"""Pages between two processes of one host: the prefill side maps the decode side's pool and writes there itself.

The pool's memfd comes over a Unix socket when both have proved their token and run as the same user; the same socket then carries frames
without bytes, each telling what has been written. A writer with a mapping is dangerous as long as its process lives, whatever its
connection does: it counts as lost when its pidfd says that the process is gone, or when it has said that it has unmapped (BYE). The
sender unmaps when its connection ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import shutil
import socket
import struct
import tempfile
from pathlib import Path

import numpy as np

from radixpd.core.handoff import PeerLost
from radixpd.errors import ConfigError, PeerFailed
from radixpd.kv import frames
from radixpd.kv.inbound import Inbound
from radixpd.kv.layout import KVLayout
from radixpd.kv.outbound import Frame, Line
from radixpd.kv.pool import Pool
from radixpd.kv.reception import Reception
from radixpd.kv.stream import Broken, Stream
from radixpd.kv.transport import Endpoint, Finished, Ground, News, boot_id, byte_rows, check_endpoint, check_token

__all__ = ["ShmTransport"]

SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it
BACKLOG = 64


class Mapping:
    """A peer's pool in our memory."""

    def __init__(self, fd: int, layers: int, pages: int, page_bytes: int) -> None:
        size = layers * pages * page_bytes
        try:
            if os.fstat(fd).st_size != size:
                raise Broken(f"the peer's pool has {os.fstat(fd).st_size} bytes, not {size}")
            self._memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._rows = np.frombuffer(self._memory, dtype=np.uint8).reshape(layers, pages, page_bytes)

    def write(self, layer: int, own: np.ndarray, source: np.ndarray, target: np.ndarray) -> bytes:
        """Copy pages there; no bytes are left for the socket. Runs in which both sides are adjacent are one copy."""
        rows = self._rows[layer]
        cuts = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
        for start, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(source)], strict=True):
            count, first, there = end - start, int(source[start]), int(target[start])
            rows[there : there + count] = own[first : first + count]  # numpy lets other threads run meanwhile
        return b""

    def close(self) -> None:
        """Unmap."""
        del self._rows
        self._memory.close()


class ShmTransport:
    """See `KVTransport`."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._lines: dict[str, Line] = {}
        self._mappings: dict[str, Mapping] = {}
        self._writers: dict[str, dict[int, int]] = {}  # processes that have, or may have, the pool mapped: peer -> pid -> pidfd
        self._news: list[News] = []

    @property
    def mapped(self) -> int:
        """Pools of peers that are mapped now."""
        return len(self._mappings)

    def open(self, layout: KVLayout, pool: Pool) -> Endpoint:
        """Listen on a Unix socket."""
        self._layout, self._rows, self._fd = layout, byte_rows(pool), pool.fd
        self._own_folder = "" if self._ground.options.folder else tempfile.mkdtemp(prefix="radixpd-kv-")
        self._path = Path(self._ground.options.folder or self._own_folder) / f"kv-{os.getpid()}-{os.urandom(4).hex()}.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(f"the KV transfer socket {self._path} cannot be made: {error.strerror or error}") from error
        self._reception = Reception(
            self._ground,
            listener,
            fingerprint=layout.fingerprint,
            pages=pool.pages,
            rows=None,
            welcome=self._welcome,
            gone=self._left,
        )
        return Endpoint("shm", str(self._path), pool.pages, layout.fingerprint, boot_id())

    def meet(self, peer: str, token: bytes, endpoint: Endpoint | None) -> None:
        """See `KVTransport`."""
        if endpoint is None:
            check_token(token)
            if self._reception.tokens.get(peer) != token:
                self._reception.tokens[peer] = token
                self._reception.dismiss(peer, "the peer has restarted")
            return
        check_endpoint(endpoint, self._layout, token)
        if endpoint.boot_id != boot_id():
            raise PeerFailed("shared memory needs both servers on one host, and the peer is on another")
        if (old := self._lines.get(peer)) is not None:
            if (old.endpoint, old.token) == (endpoint, token):
                return
            self._part(peer, "the peer has restarted")
        self._lines[peer] = Line(
            self._ground,
            endpoint,
            token,
            connect=lambda: _connected(endpoint.address),
            connections=1,
            entered=lambda stream: self._map(peer, endpoint, stream),
            lost=lambda: self._unmap(peer),
        )

    def part(self, peer: str) -> None:
        """See `KVTransport`."""
        if peer in self._lines:
            self._part(peer, "the peer is not served any more")
        if self._reception.tokens.pop(peer, None) is not None:
            self._reception.dismiss(peer, "the peer is not served any more")

    def send(self, peer: str, room: int, layer: int, source: np.ndarray, target: np.ndarray) -> int:
        """See `KVTransport`. The copy is made when the frame's turn has come."""
        number, line = next(self._ground.numbers), self._lines.get(peer)
        problem = "" if line is not None else f"there is no connection to {peer}"
        if line is not None and (int(target.min()) < 0 or int(target.max()) >= line.endpoint.pages):
            problem = f"page {int(target.max())} is outside of the peer's pool"
        if line is None or problem:
            self._news.append(Finished(number, problem))
            return number
        rows, runs = self._rows[layer], frames.runs_of(target)
        head = frames.HEAD.pack(frames.DATA, layer, len(runs), room, number) + runs.tobytes()
        size = rows.shape[1] * len(source)
        line.send(Frame(number, room, head, [lambda: self._mapping(peer).write(layer, rows, source, target)], size, self._ground.clock()))
        return number

    def cancel(self, room: int) -> bool:
        """See `KVTransport`. Whatever has started is written already, by this very thread."""
        for line in self._lines.values():
            line.drop(room)
        return True

    def may_write(self, peer: str) -> bool:
        """See `KVTransport`."""
        return bool(self._writers.get(peer))

    def poll(self) -> list[News]:
        """See `KVTransport`."""
        self._reception.poll()
        news, self._news = self._news + self._reception.news, []
        self._reception.news = []
        for line in self._lines.values():
            news += line.poll()
        return news

    def close(self) -> None:
        """See `KVTransport`."""
        for peer in list(self._lines):
            self._part(peer, "this server is closing")
        self._reception.close()
        self._rows = []  # the pool's memory is given back when nobody looks at it any more
        for peer in list(self._writers):
            for pid in list(self._writers[peer]):
                self._forget_writer(peer, pid)
        self._path.unlink(missing_ok=True)
        if self._own_folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    # ---- as a writer --------------------------------------------------------------------------------------------------------------

    def _map(self, peer: str, endpoint: Endpoint, stream: Stream) -> None:
        fds, stream.fds = stream.fds, []
        for extra in fds[1:]:
            os.close(extra)
        if not fds:
            raise Broken("the peer sent no descriptor of its pool")
        self._unmap(peer)
        self._mappings[peer] = Mapping(fds[0], self._layout.layers, endpoint.pages, self._layout.page_bytes)

    def _mapping(self, peer: str) -> Mapping:
        if peer not in self._mappings:
            raise Broken("the peer's pool is not mapped any more")
        return self._mappings[peer]

    def _unmap(self, peer: str) -> None:
        if (mapping := self._mappings.pop(peer, None)) is not None:
            mapping.close()

    def _part(self, peer: str, reason: str) -> None:
        """Unmap, say so, and end the line."""
        line = self._lines.pop(peer)
        self._unmap(peer)
        line.say(frames.BYE)
        self._news += line.close(reason, gone=True)

    # ---- as the owner of the pool ---------------------------------------------------------------------------------------------------

    def _welcome(self, guest: Inbound, word: bytes) -> None:
        """Hand over the pool. From now on the process is a writer until it is proved otherwise."""
        sock = guest.stream.sock
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            raise Broken(f"it runs as user {uid}, not as {os.geteuid()}")
        writers = self._writers.setdefault(guest.peer, {})
        if any(each != pid for each in writers):
            raise Broken("an earlier process of this peer still has the pool mapped")
        if pid not in writers:
            writers[pid] = _pidfd(sock, pid)
            peer = guest.peer
            self._ground.selector.register(writers[pid], selectors.EVENT_READ, lambda mask: self._died(peer, pid))
        guest.pid = pid
        socket.send_fds(sock, [word], [self._fd])

    def _left(self, guest: Inbound) -> None:
        if guest.said_bye and guest.pid and not any(each.pid == guest.pid for each in self._reception.of(guest.peer)):
            self._gone(guest.peer, guest.pid, "it has closed its mapping of the pool")

    def _died(self, peer: str, pid: int) -> None:
        self._gone(peer, pid, "its process has ended")

    def _gone(self, peer: str, pid: int, reason: str) -> None:
        self._forget_writer(peer, pid)
        if not self._writers.get(peer):
            self._ground.arrivals.end_peer(peer)
            self._news.append(PeerLost(peer, reason))

    def _forget_writer(self, peer: str, pid: int) -> None:
        fd = self._writers.get(peer, {}).pop(pid, None)
        if fd is not None:
            self._ground.selector.unregister(fd)
            os.close(fd)


def _pidfd(sock: socket.socket, pid: int) -> int:
    """A descriptor that becomes readable when the process at the other end is gone. Raises Broken: without one it cannot be let in."""
    with contextlib.suppress(OSError):
        return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4), "little")
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise Broken(f"process {pid} cannot be watched: {error.strerror}") from error


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock
