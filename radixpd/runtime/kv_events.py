"""KV events over ZMQ, in the msgpack schema that cache-aware routers of other projects already read.

A PUB socket sends `[topic, sequence, payload]`: the sequence is 8 bytes big-endian, starts at 0 and has no holes; the payload is an
array-like `EventBatch` of tagged events. A ROUTER socket replays: the request's last frame is the first wanted sequence (8 bytes), the
answers are `[sequence, payload]` for each batch still held, then `[ff*8, empty]`; frames before the last (a REQ's delimiter) are echoed.
Who asks for batches that are no longer held gets a snapshot instead: one batch with the newest sequence, which clears everything and then
stores what is cached now.

Ids are the last 8 bytes of the page hash, big-endian, unsigned: the low 64 bits. `medium` names the tier, not the chip: readers take
"GPU" for the pool that the engine computes from and "CPU" for an offload tier that must be loaded back first, so the pool is "GPU".
Called by the scheduler process, in its one thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from radixpd.core.effects import CacheCleared, CacheEvent, PagesRemoved, PagesStored
from radixpd.core.page_hash import event_id
from radixpd.errors import ConfigError

__all__ = ["END_OF_REPLAY", "AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "Publisher"]

MEDIUM = "GPU"
BUFFERED_BATCHES = 10_000
END_OF_REPLAY = b"\xff" * 8  # -1 as a signed 64-bit number

logger = logging.getLogger(__name__)


class BlockStored(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Consecutive pages became findable; `token_ids` are theirs, `parent_block_hash` is the page before the first."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM


class BlockRemoved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Pages are no longer findable."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The whole cache was flushed."""


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events of one turn of the scheduler's loop, in order. `ts` is Unix time."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Publisher:
    """Sends batches and answers replay requests. `replay` is None without a replay endpoint, else the caller polls it; `cached` tells what
    is findable after the newest batch, parents first."""

    def __init__(
        self,
        context: zmq.Context[Any],
        *,
        endpoint: str,
        replay_endpoint: str = "",
        topic: str = "",
        page_size: int,
        buffered: int = BUFFERED_BATCHES,
        cached: Callable[[], Iterable[CacheEvent]] | None = None,
    ) -> None:
        self._topic = topic.encode()
        self._page_size = page_size
        self._cached = cached
        self._next = 0
        self._held: deque[tuple[int, bytes]] = deque(maxlen=buffered)
        # A slow reader loses batches (it sees the hole and asks for a replay) instead of growing this process.
        self._socket = _bind(context, zmq.PUB, endpoint, limit=buffered)
        self.replay = _bind(context, zmq.ROUTER, replay_endpoint, limit=2 * buffered) if replay_endpoint else None

    def publish(self, events: Iterable[CacheEvent], *, unix_time: float) -> None:
        """Send all events of one turn as one batch; nothing is sent for none."""
        batch = EventBatch(ts=unix_time, events=[self._public(event) for event in events])
        if not batch.events:
            return
        payload = msgspec.msgpack.encode(batch)
        self._held.append((self._next, payload))
        self._socket.send_multipart([self._topic, _sequence(self._next), payload])
        self._next += 1

    def answer_replays(self) -> None:
        """Answer every replay request that has arrived."""
        if self.replay is None:
            return
        while True:
            try:
                *envelope, start = self.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(start) != 8:
                logger.warning("KV event replay: a request of %d bytes is not a sequence of 8 bytes, ignored", len(start))
                continue
            self._replay(envelope, int.from_bytes(start, "big"))

    def close(self) -> None:
        """Close both sockets at once."""
        self._socket.close(linger=0)
        if self.replay is not None:
            self.replay.close(linger=0)

    def _replay(self, envelope: list[bytes], start: int) -> None:
        assert self.replay is not None
        for sequence, payload in self._since(start):
            if sequence >= start:
                self.replay.send_multipart([*envelope, _sequence(sequence), payload], zmq.NOBLOCK)
        self.replay.send_multipart([*envelope, END_OF_REPLAY, b""], zmq.NOBLOCK)

    def _since(self, start: int) -> Iterable[tuple[int, bytes]]:
        """What brings a reader up to date that needs everything from `start` on."""
        if self._cached is None or start >= self._next - len(self._held):
            return self._held
        events = [self._public(event) for event in (CacheCleared(), *self._cached())]
        return [(self._next - 1, msgspec.msgpack.encode(EventBatch(ts=time.time(), events=events)))]

    def _public(self, event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        match event:
            case PagesStored(hashes, parent, tokens):
                return BlockStored(
                    block_hashes=[event_id(page) for page in hashes],
                    parent_block_hash=None if parent is None else event_id(parent),
                    token_ids=tokens.tolist(),
                    block_size=self._page_size,
                )
            case PagesRemoved(hashes):
                return BlockRemoved([event_id(page) for page in hashes])
            case CacheCleared():
                return AllBlocksCleared()


def _sequence(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _bind(context: zmq.Context[Any], kind: int, endpoint: str, *, limit: int) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, limit + 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"--kv-events-config: cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}") from None
    return socket
