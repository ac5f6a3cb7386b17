"""Transports whose pages a library writes straight into the peer's pool (mooncake, nixl); our own tcp connection tells what was written.

A `Wire` puts bytes in place and says when it is done; then a frame without bytes goes out, so that token, room, pages and verdict are
checked as with shm. Invariants: nothing is written before both sides have proved the token, or for a room that was cancelled; a frame is
told only when its bytes are in place, and not if its room is over by then; a cancelled room is quiet when no write of it is under way, and
after one that failed, whose bytes may still be on the way, not before the receiver has forgotten the room and `grace` has passed.
What nothing here can hold: the libraries know no token, so whoever reaches their port may write into the pool, and a sender that is cut off
but alive, or was replaced while its machine was, may still have bytes on the way when it counts as lost. For trusted networks only.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from radixpd.core.handoff import Quiet
from radixpd.errors import PeerFailed
from radixpd.kv import frames
from radixpd.kv.layout import KVLayout
from radixpd.kv.pool import Pool
from radixpd.kv.transport import Endpoint, Finished, Ground, News, byte_rows, check_endpoint
from radixpd.kv.transport_tcp import TcpTransport

__all__ = ["OneSided", "Region", "Wire", "spans"]

logger = logging.getLogger(__name__)

TOP = 1 << 63  # addresses are below


@dataclass(frozen=True, slots=True)
class Region:
    """A peer's pool. `at`: what the library needs to find it; `bases`: the address of each layer there."""

    at: str
    bases: tuple[int, ...]

    @staticmethod
    def of(endpoint: Endpoint, layout: KVLayout) -> Region:
        """What an endpoint says. Raises PeerFailed."""
        try:
            said = json.loads(endpoint.details)
            region = Region(said["at"], tuple(said["bases"]))
        except (ValueError, TypeError, KeyError) as error:
            raise PeerFailed(f"the peer's {endpoint.transport} endpoint has details that make no sense: {error}") from error
        size = endpoint.pages * layout.page_bytes
        fit = all(isinstance(base, int) and 0 < base < TOP - size for base in region.bases)
        if not isinstance(region.at, str) or len(region.bases) != layout.layers or not fit:
            raise PeerFailed(f"the peer's {endpoint.transport} endpoint names no address for each of {layout.layers} layers")
        return region

    def told(self) -> str:
        """As `Endpoint.details`."""
        return json.dumps({"at": self.at, "bases": self.bases})


class Wire(Protocol):
    """What a library does; on the mover's thread, and it never waits. A write that was begun is answered in `poll`, also after `part`."""

    def open(self, rows: list[np.ndarray]) -> str:
        """Make own memory (uint8 `[pages, page_bytes]` a layer) known to the library: `Region.at`. Raises ConfigError."""
        ...

    def meet(self, peer: str, at: str) -> None:
        """Know where a peer's pool is. Raises PeerFailed."""
        ...

    def part(self, peer: str) -> None:
        """Begin nothing more for it, and stop what can be stopped."""
        ...

    def write(self, peer: str, number: int, parts: np.ndarray) -> None:
        """Own memory into the peer's; int64 `[n, 3]`: own address, address there, bytes."""
        ...

    def withdraw(self, number: int) -> bool:
        """Whether it had not begun. Then it never will, and is not answered."""
        ...

    def poll(self) -> list[tuple[int, str]]:
        """Writes that have ended, with the reason if they failed."""
        ...

    def close(self) -> None:
        """Own memory is known no more, as soon as nothing of it is being written."""
        ...


def spans(own: int, there: int, size: int, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """What to copy where, int64 `[n, 3]`: own address, address there, bytes. `own`, `there`: of page 0, `size`: of a page. Pages that are
    adjacent on both sides are one part."""
    source, target = source.astype(np.int64), target.astype(np.int64)
    cuts = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate(([0], cuts))
    counts = np.diff(np.append(starts, len(source)))
    return np.stack([own + source[starts] * size, there + target[starts] * size, counts * size], axis=1)


@dataclass(slots=True, eq=False)
class Write:
    """One `send` whose bytes are not in place. `ended`: its `Finished` is told, and only the end of the writing is still awaited."""

    number: int
    peer: str
    room: int
    layer: int
    source: np.ndarray
    target: np.ndarray
    born: float
    ended: bool = False


@dataclass(slots=True)
class Ending:
    """A cancelled room. `asked`: the frames that told of it have been withdrawn; `forgotten`: since when the receiver does not know it."""

    asked: bool = False
    forgotten: float | None = None


class OneSided:
    """See `KVTransport`."""

    def __init__(self, name: str, ground: Ground, wire: Wire) -> None:
        self._name, self._ground, self._wire = name, ground, wire
        self._talk = TcpTransport(ground, bodies=False)
        self._regions: dict[str, tuple[Endpoint, Region]] = {}
        self._waiting: dict[str, deque[Write]] = {}  # for a connection, by peer
        self._writes: dict[int, Write] = {}  # given to the wire
        self._told: dict[int, int] = {}  # number of a frame -> of the send
        self._doubtful: set[int] = set()  # rooms of which a write has failed
        self._ending: dict[int, Ending] = {}
        self._news: list[News] = []

    def open(self, layout: KVLayout, pool: Pool) -> Endpoint:
        """Listen, and make the pool known to the library."""
        self._layout, self._rows = layout, byte_rows(pool)
        endpoint = self._talk.open(layout, pool)
        region = Region(self._wire.open(self._rows), tuple(row.ctypes.data for row in self._rows))
        logger.warning("%s knows no secret: whoever reaches its port may write into the KV pool. For trusted networks only", self._name)
        return replace(endpoint, transport=self._name, details=region.told())

    def meet(self, peer: str, token: bytes, endpoint: Endpoint | None) -> None:
        """See `KVTransport`."""
        if endpoint is None:
            self._talk.meet(peer, token, None)
            return
        check_endpoint(endpoint, self._layout, token)
        region = Region.of(endpoint, self._layout)
        known = self._regions.get(peer)
        if known is not None and known[0] != endpoint:
            self._forsake(peer, "the peer has restarted")
            del self._regions[peer]
            for number in [each.number for each in self._writes.values() if each.peer == peer]:
                del self._writes[number]  # the pool that it goes to is no more
        self._wire.meet(peer, region.at)
        self._talk.meet(peer, token, endpoint)
        self._regions[peer] = endpoint, region
        self._waiting.setdefault(peer, deque())

    def part(self, peer: str) -> None:
        """See `KVTransport`."""
        if self._regions.pop(peer, None) is not None:
            self._forsake(peer, "the peer is not served any more")
        self._talk.part(peer)
        for ending in self._ending.values():
            ending.asked = ending.forgotten is not None  # who was asked may be gone

    def send(self, peer: str, room: int, layer: int, source: np.ndarray, target: np.ndarray) -> int:
        """See `KVTransport`."""
        number, known = next(self._ground.numbers), self._regions.get(peer)
        problem = f"there is no connection to {peer}" if known is None else ""
        if known is not None and (int(target.min()) < 0 or int(target.max()) >= known[0].pages):
            problem = f"page {int(target.max())} is outside of the peer's pool"
        if problem:
            self._news.append(Finished(number, problem))
            return number
        self._waiting[peer].append(Write(number, peer, room, layer, source, target, self._ground.clock()))
        self._begin(peer)
        return number

    def cancel(self, room: int) -> bool:
        """See `KVTransport`."""
        for queue in self._waiting.values():
            for write in [each for each in queue if each.room == room]:
                queue.remove(write)
                self._end(write, frames.REFUSALS[frames.WITHDRAWN])
        for write in [each for each in self._writes.values() if each.room == room]:
            self._withdraw(write, frames.REFUSALS[frames.WITHDRAWN])
        self._ending.setdefault(room, Ending())
        return self._is_quiet(room)

    def may_write(self, peer: str) -> bool:
        """See `KVTransport`."""
        return self._talk.may_write(peer)

    def poll(self) -> list[News]:
        """See `KVTransport`."""
        for number, error in self._wire.poll():
            if (write := self._writes.pop(number, None)) is not None:
                self._written(write, error)
        for peer in self._regions:
            self._begin(peer)
        for each in self._talk.poll():
            self._hear(each)
        self._news += [Quiet(room) for room in list(self._ending) if self._is_quiet(room)]
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """See `KVTransport`."""
        self._talk.close()
        self._wire.close()
        self._rows = []

    # ---- inner ------------------------------------------------------------------------------------------------------------------

    def _begin(self, peer: str) -> None:
        """Write what may be written; give up what has waited too long for a connection."""
        line, queue = self._talk.line(peer), self._waiting[peer]
        assert line is not None  # as long as the region is known
        endpoint, region = self._regions[peer]
        while queue and line.stands:
            write = queue.popleft()
            own, size = self._rows[write.layer].ctypes.data, self._layout.page_bytes
            self._writes[write.number] = write
            self._wire.write(peer, write.number, spans(own, region.bases[write.layer], size, write.source, write.target))
        now, limit = self._ground.clock(), self._ground.options.connect
        while queue and now - queue[0].born > limit:
            self._end(queue.popleft(), line.trouble or f"no connection to {endpoint.address} within {limit:g} s")

    def _written(self, write: Write, error: str) -> None:
        """The library is done with it."""
        if error:
            self._doubtful.add(write.room)
            if (line := self._talk.line(write.peer)) is not None:
                line.doubt(write.room)
            self._end(write, error)
        elif write.room in self._ending or write.room in self._ground.ended:
            self._end(write, frames.REFUSALS[frames.WITHDRAWN])
        elif not write.ended:
            self._told[self._talk.send(write.peer, write.room, write.layer, write.source, write.target)] = write.number

    def _end(self, write: Write, error: str) -> None:
        if not write.ended:
            write.ended = True
            self._news.append(Finished(write.number, error))

    def _withdraw(self, write: Write, error: str) -> None:
        """Not under way: gone. Under way: its end is awaited."""
        if self._wire.withdraw(write.number):
            del self._writes[write.number]
            self._end(write, error)

    def _forsake(self, peer: str, reason: str) -> None:
        """Nothing more is written there."""
        for write in [each for each in self._writes.values() if each.peer == peer]:
            self._withdraw(write, reason)
            self._end(write, reason)
        for write in self._waiting.pop(peer):
            self._end(write, reason)
        self._wire.part(peer)

    def _hear(self, news: News) -> None:
        if isinstance(news, Finished):
            self._news.append(Finished(self._told.pop(news.number), news.error))
        elif isinstance(news, Quiet):
            if (ending := self._ending.get(news.room)) is not None:
                ending.forgotten = self._ground.clock()
        else:
            self._news.append(news)

    def _is_quiet(self, room: int) -> bool:
        """Whether nothing of a cancelled room is being written, or will be. Then that is the last word on it."""
        if any(each.room == room for each in self._writes.values()):
            return False
        ending, now = self._ending[room], self._ground.clock()
        if not ending.asked:
            ending.asked = True
            if self._talk.cancel(room):
                ending.forgotten = now
        if ending.forgotten is None or (room in self._doubtful and now - ending.forgotten < self._ground.options.grace):
            return False
        del self._ending[room]
        self._doubtful.discard(room)
        return True
