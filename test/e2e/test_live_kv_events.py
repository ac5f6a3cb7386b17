"""KV events of a live server, read as a router of another project would: subscribe, find holes, ask for a replay."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from e2e.servers import Server, free_port, until


def ids(length: int, seed: int) -> list[int]:
    """Random token ids of the tiny model."""
    dice = random.Random(seed)
    return [dice.randrange(3, 259) for _ in range(length)]


def sampling(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """As a router of another project reads it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """As above."""

    block_hashes: list[int]


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """As above."""


class EventBatch(msgspec.Struct, array_like=True):
    """As above."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def test_kv_events_reach_a_subscriber_and_can_be_replayed(serve: Callable[..., Server]) -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    config = {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay, "topic": "kv"}
    context = zmq.Context()
    try:
        listener = context.socket(zmq.SUB)
        listener.setsockopt(zmq.SUBSCRIBE, b"kv")
        listener.connect(endpoint)
        server = serve("--threads", "1", "--kv-events-config", json.dumps(config))
        got: list[tuple[int, EventBatch]] = []

        def receive(*kinds: type) -> bool:
            while listener.poll(0):
                topic, sequence, payload = listener.recv_multipart()
                assert topic == b"kv"
                got.append((int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload, type=EventBatch)))
            seen = {type(event) for _, batch in got for event in batch.events}
            return seen >= set(kinds)

        def warm_until_seen() -> bool:
            # A subscription takes a moment to arrive; each prompt is new.
            server.generate(input_ids=ids(40, 500 + len(got)), sampling_params=sampling(1))
            server.flush()
            return receive(BlockStored, AllBlocksCleared)

        until(warm_until_seen, "the subscription works")
        prompt = ids(100, 50)
        server.generate(input_ids=prompt, sampling_params=sampling(1))
        until(lambda: receive() and any(prompt[:16] == event.token_ids[:16] for event in stored(got)), "the prompt's blocks")
        mine = [event for event in stored(got) if event.token_ids[0] == prompt[0]]
        assert [token for event in mine for token in event.token_ids] == prompt[:96]
        assert mine[0].parent_block_hash is None
        assert all(event.block_size == 16 for event in mine)
        assert len({block for event in mine for block in event.block_hashes}) == 6

        first = got[0][0]
        assert [sequence for sequence, _ in got] == list(range(first, first + len(got)))
        assert replayed(context, replay, first) == got
    finally:
        context.destroy(linger=0)


def stored(got: list[tuple[int, EventBatch]]) -> list[BlockStored]:
    return [event for _, batch in got for event in batch.events if isinstance(event, BlockStored)]


def replayed(context: zmq.Context[Any], endpoint: str, start: int) -> list[tuple[int, EventBatch]]:
    """Every batch from `start` on, asked for again."""
    asker = context.socket(zmq.DEALER)  # a REQ would take one answer only
    asker.connect(endpoint)
    asker.send_multipart([b"", start.to_bytes(8, "big")])
    found = []
    while True:
        assert asker.poll(5000), "no answer to the replay"
        _, sequence, payload = asker.recv_multipart()
        number = int.from_bytes(sequence, "big", signed=True)
        if number < 0:
            return found
        found.append((number, msgspec.msgpack.decode(payload, type=EventBatch)))
