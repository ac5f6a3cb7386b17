"""KV events as a router sees them: a real subscriber, a real replay, raw msgpack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from radixpd.core.effects import CacheCleared, PagesRemoved, PagesStored
from radixpd.core.page_hash import event_id
from radixpd.errors import ConfigError
from radixpd.runtime.kv_events import END_OF_REPLAY, Publisher

ROOT, CHILD = b"\x01" * 24 + b"\x00" * 7 + b"\x05", b"\x02" * 24 + b"\xff" * 8
STORED = PagesStored((ROOT, CHILD), None, np.arange(4, dtype=np.int32))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def publisher(context: zmq.Context[Any], **options: Any) -> Publisher:
    defaults: dict[str, Any] = {"endpoint": "inproc://events", "replay_endpoint": "inproc://replay", "page_size": 2}
    return Publisher(context, **(defaults | options))


def subscriber(context: zmq.Context[Any], source: Publisher, topic: bytes = b"") -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.connect("inproc://events")
    # A subscription takes effect some time after connect: publish until it does, then read up to the last of these.
    while not socket.poll(20):
        source.publish([CacheCleared()], unix_time=0.0)
    while socket.poll(200):
        socket.recv_multipart()
    return socket


def receive(socket: zmq.Socket[Any]) -> list[bytes]:
    assert socket.poll(5000), "nothing arrived"
    return list(socket.recv_multipart())


def ask_replay(context: zmq.Context[Any], source: Publisher, start: int, *, kind: int = zmq.DEALER) -> list[list[bytes]]:
    """All answers up to the end marker. A DEALER that sends an empty frame first does what a REQ does."""
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.connect("inproc://replay")
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    assert source.replay is not None
    assert source.replay.poll(5000)
    source.answer_replays()
    answers: list[list[bytes]] = []
    while True:
        empty, *answer = receive(socket)
        assert empty == b""
        if answer[0] == END_OF_REPLAY:
            assert answer[1] == b""
            socket.close(linger=0)
            return answers
        answers.append(answer)


def test_a_subscriber_reads_the_schema_of_other_routers(context: zmq.Context[Any]) -> None:
    source = publisher(context, topic="kv-events")
    socket = subscriber(context, source, b"kv-events")
    source.publish([STORED, PagesRemoved((CHILD,)), CacheCleared()], unix_time=7.5)
    topic, sequence, payload = receive(socket)
    assert topic == b"kv-events"
    assert len(sequence) == 8
    assert msgspec.msgpack.decode(payload) == [
        7.5,
        [["BlockStored", [5, 2**64 - 1], None, [0, 1, 2, 3], 2, None, "GPU"], ["BlockRemoved", [2**64 - 1], "GPU"], ["AllBlocksCleared"]],
    ]


def test_parent_and_id_are_the_low_bits_of_the_hash(context: zmq.Context[Any]) -> None:
    source = publisher(context)
    socket = subscriber(context, source)
    source.publish([PagesStored((CHILD,), ROOT, np.array([1, 2], np.int32))], unix_time=0.0)
    [_, [event]] = msgspec.msgpack.decode(receive(socket)[2])
    assert event[1:3] == [[int.from_bytes(CHILD, "big") % 2**64], int.from_bytes(ROOT, "big") % 2**64]
    assert event_id(CHILD) == 2**64 - 1


def test_sequences_have_no_holes_and_nothing_is_sent_for_nothing(context: zmq.Context[Any]) -> None:
    source = publisher(context)
    socket = subscriber(context, source)
    for _ in range(3):
        source.publish([CacheCleared()], unix_time=0.0)
        source.publish([], unix_time=0.0)
    numbers = [int.from_bytes(receive(socket)[1], "big") for _ in range(3)]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]
    assert not socket.poll(50)


def test_replay_answers_from_the_asked_sequence(context: zmq.Context[Any]) -> None:
    source = publisher(context)
    for number in range(5):
        source.publish([PagesRemoved((bytes([number]),))], unix_time=float(number))
    answers = ask_replay(context, source, 2)
    assert [int.from_bytes(sequence, "big") for sequence, _ in answers] == [2, 3, 4]
    assert [msgspec.msgpack.decode(payload)[0] for _, payload in answers] == [2.0, 3.0, 4.0]


def test_replay_gives_what_is_still_held(context: zmq.Context[Any]) -> None:
    source = publisher(context, buffered=2)
    for number in range(5):
        source.publish([CacheCleared()], unix_time=float(number))
    assert [int.from_bytes(sequence, "big") for sequence, _ in ask_replay(context, source, 0)] == [3, 4]
    assert ask_replay(context, source, 99) == []


def test_who_comes_too_late_gets_a_snapshot(context: zmq.Context[Any]) -> None:
    """Of batches that are no longer held nothing is sent but what came of them: all that is cached, under the newest number."""
    source = publisher(context, buffered=2, cached=lambda: [STORED, PagesStored((CHILD,), ROOT, np.array([1, 2], np.int32))])
    assert ask_replay(context, source, 0) == []
    for number in range(5):
        source.publish([PagesRemoved((bytes([number]),))], unix_time=float(number))
    [[sequence, payload]] = ask_replay(context, source, 2)
    assert int.from_bytes(sequence, "big") == 4
    cleared, first, second = msgspec.msgpack.decode(payload)[1]
    assert (cleared, first[:3], second[:3]) == (
        ["AllBlocksCleared"],
        ["BlockStored", [5, 2**64 - 1], None],
        ["BlockStored", [2**64 - 1], 5],
    )
    assert [int.from_bytes(sequence, "big") for sequence, _ in ask_replay(context, source, 3)] == [3, 4]


def test_a_broken_replay_request_is_ignored(context: zmq.Context[Any]) -> None:
    source = publisher(context)
    source.publish([CacheCleared()], unix_time=0.0)
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    socket.connect("inproc://replay")
    socket.send_multipart([b"", b"12"])
    assert len(ask_replay(context, source, 0)) == 1
    assert not socket.poll(50)


def test_an_endpoint_in_use_is_one_config_error(context: zmq.Context[Any]) -> None:
    taken: zmq.Socket[Any] = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(ConfigError, match="--kv-events-config: cannot bind"):
        publisher(context, endpoint=f"tcp://127.0.0.1:{port}")


def test_without_a_replay_endpoint_there_is_no_replay(context: zmq.Context[Any]) -> None:
    source = publisher(context, replay_endpoint="")
    assert source.replay is None
    source.answer_replays()
