"""SE-05 and SE-01 on the bootstrap port: strangers, replays, a man in the middle. Nothing changes, everything is counted."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from peer_nodes import Node, Room, identity, open_room, reserve

from radixpd.core.handoff import Arrived, NotNeeded, PeerAbort, Renew, Reserve
from radixpd.runtime.peer_messages import VERSION, Confirm, Hello, Knock, Sealed, Stranger, Welcome, read_frame, write, write_body
from radixpd.runtime.peer_trust import proof
from radixpd.runtime.peers import PeerLimits, PeerUp

LAYOUT = identity("decode").layout


@pytest.fixture
def room() -> Iterator[Room]:
    with open_room() as room:
        yield room


def stranger(room: Room, node: Node) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = room.context.socket(zmq.DEALER)
    socket.connect(f"tcp://{node.address}")
    return socket


def hello(**changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "version": VERSION, "incarnation": b"i" * 16, "nonce": b"n" * 32, "role": "decode", "name": "decode:1", "called": "",
        "secured": True, "model": "m1", "layout": LAYOUT, "tp": 1, "codecs": ("none",),
    }  # fmt: skip
    return Hello(**{**fields, **changes})


def sealed(body: bytes, *, session: bytes = b"s" * 16, incarnation: bytes = b"i" * 16) -> bytes:
    return write(Sealed(session, incarnation, 2**62, 0, 1, body, b"m" * 32))


class Trap:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_se_05_se_01_strangers_change_nothing_and_are_counted(room: Room, tmp_path: Path) -> None:
    prefill, decode = room.add("prefill"), room.add("decode")
    decode.send(prefill.address, Renew(1, 1.0))
    room.until(lambda: decode.heard(PeerUp) and prefill.heard(Renew))
    state, events = prefill.peer(), len(prefill.events)
    (session,) = prefill.peers._door.guests if prefill.peers._door else ()
    random.seed(7)
    frames = [
        *(random.randbytes(size) for size in (0, 1, 10, 100, 10_000)),
        pickle.dumps(Trap(tmp_path / "sprung")),
        write_body(reserve(1)),
        write(Knock(b"")),
        write(Knock(write(hello(incarnation=b"x" * 16)) + b"\x00")),
        write(Confirm(b"p" * 32)),
        write(Welcome(b"", b"p" * 32)),
        write(Stranger(session)),
        sealed(write_body(reserve(1))),
        sealed(write_body(PeerAbort(1, "die")), session=session),
        sealed(write_body(PeerAbort(1, "die")), session=session, incarnation=decode.incarnation),
        sealed(pickle.dumps(Trap(tmp_path / "sprung")), session=session, incarnation=decode.incarnation),
    ]
    intruder = stranger(room, prefill)
    for frame in frames:
        intruder.send(frame)
    intruder.send_multipart([b"", frames[-1]])
    room.until(lambda: prefill.peers.rejected.total() == len(frames) + 1)
    assert (prefill.peer(), len(prefill.events)) == (state, events)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(frames[5])
    assert (tmp_path / "sprung").exists(), "the trap itself works"
    assert prefill.peers.rejected["mac"] == 2
    assert prefill.peers.rejected["incarnation"] == 1
    assert prefill.peers.rejected["unknown session"] == 1
    decode.send(prefill.address, NotNeeded(2))
    room.until(lambda: prefill.heard(NotNeeded))
    intruder.close(linger=0)


def test_se_05_a_right_hello_without_the_secret_gets_no_further(room: Room) -> None:
    prefill = room.add("prefill")
    intruder = stranger(room, prefill)
    ours = write(hello())
    intruder.send(write(Knock(ours)))
    room.until(lambda: intruder.poll(0))
    welcome = read_frame(intruder.recv())
    assert isinstance(welcome, Welcome)
    assert b"shm" not in welcome.hello, "endpoints are told to proven peers only"
    # Its own proof thrown back at it, another's, none: each time a handshake is used up.
    for wrong in (welcome.proof, proof(b"guess", "decode", ours, welcome.hello), b"\x00" * 32):
        before = prefill.peers.rejected.total()
        intruder.send(write(Knock(ours)))
        intruder.send(write(Confirm(wrong)))
        intruder.send(sealed(write_body(reserve(1))))
        room.until(lambda before=before: prefill.peers.rejected.total() == before + 2)
    assert prefill.peers.rejected["proof"] == 3
    assert not prefill.events
    assert not prefill.peers.view(0.0)
    intruder.close(linger=0)


def test_se_05_a_flood_of_begun_handshakes_is_bounded(room: Room) -> None:
    limits = PeerLimits(handshakes=8)
    prefill, decode = room.add("prefill", limits=limits), room.add("decode")
    intruders = [stranger(room, prefill) for _ in range(20)]
    for number, intruder in enumerate(intruders):
        intruder.send(write(Knock(write(hello(nonce=bytes([number]) * 32)))))
    room.until(lambda: all(intruder.poll(0) for intruder in intruders))
    assert prefill.peers._door is not None
    assert len(prefill.peers._door._begun) == 8
    decode.send(prefill.address, Renew(1, 1.0))
    room.until(lambda: prefill.heard(Renew))
    room.turns(20, 2.0)
    assert not prefill.peers._door._begun
    for intruder in intruders:
        intruder.close(linger=0)


def test_se_05_a_huge_frame_ends_its_connection_alone(room: Room) -> None:
    limits = PeerLimits(frame=100_000)
    prefill, decode = room.add("prefill", limits=limits), room.add("decode")
    decode.send(prefill.address, Renew(1, 1.0))
    room.until(lambda: prefill.heard(Renew))
    intruder = stranger(room, prefill)
    monitor = intruder.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    intruder.send(b"x" * 200_000)
    room.until(lambda: monitor.poll(0), "the end of that connection")
    assert not prefill.peers.rejected
    decode.send(prefill.address, NotNeeded(2))
    room.until(lambda: prefill.heard(NotNeeded))
    intruder.disable_monitor()
    intruder.close(linger=0)


def test_se_05_what_a_false_prefill_server_says_changes_nothing(room: Room) -> None:
    decode = room.add("decode")
    false: zmq.Socket[Any] = room.context.socket(zmq.ROUTER)
    port = false.bind_to_random_port("tcp://127.0.0.1")
    peer = f"127.0.0.1:{port}"
    decode.send(peer, reserve(5))
    room.until(lambda: false.poll(0))
    route, knock = false.recv_multipart()
    assert isinstance(read_frame(knock), Knock)
    theirs = write(hello(role="prefill"))
    for frame in (
        b"junk",
        write(Welcome(theirs, b"p" * 32)),
        write(Welcome(b"junk", b"p" * 32)),
        write(Stranger(b"s" * 16)),
        write(Confirm(b"p" * 32)),
        knock,
        sealed(write_body(Arrived(5, np.array([1], dtype=np.int32)))),
    ):
        false.send_multipart([route, frame])
    room.until(lambda: decode.peers.rejected.total() == 7)
    assert not decode.events
    room.pass_time(6)
    assert "did not prove that it knows the secret" in decode.heard(PeerAbort)[0].reason
    false.close(linger=0)


class Middle:
    """Sits between decode and prefill; `mangle` turns each frame into those that go on."""

    def __init__(self, room: Room, prefill: Node, mangle: Callable[[bytes], list[bytes]]) -> None:
        self.room, self.prefill, self.mangle = room, prefill, mangle
        self.front: zmq.Socket[Any] = room.context.socket(zmq.ROUTER)
        self.address = f"127.0.0.1:{self.front.bind_to_random_port('tcp://127.0.0.1')}"
        self.back = stranger(room, prefill)
        self.route = b""

    def turn(self) -> None:
        while self.front.poll(0):
            self.route, frame = self.front.recv_multipart()
            for each in self.mangle(frame):
                self.back.send(each)
        while self.back.poll(0):
            for each in self.mangle(self.back.recv()):
                self.front.send_multipart([self.route, each])

    def close(self) -> None:
        self.front.close(linger=0)
        self.back.close(linger=0)


def mangler(seed: int) -> Callable[[bytes], list[bytes]]:
    rng, held = random.Random(seed), []

    def mangle(frame: bytes) -> list[bytes]:
        held.append(frame)
        match rng.choice(["pass", "pass", "pass", "drop", "twice", "flip", "old", "swap"]):
            case "drop":
                return []
            case "twice":
                return [frame, frame]
            case "flip":
                damaged = bytearray(frame)
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
                return [bytes(damaged)]
            case "old":
                return [rng.choice(held), frame, rng.choice(held)]
            case "swap":
                return [frame, held[-2]] if len(held) > 1 else [frame]
            case _:
                return [frame]

    return mangle


@pytest.mark.parametrize("seed", range(3))
def test_se_05_a_man_in_the_middle_can_delay_and_nothing_else(room: Room, seed: int) -> None:
    limits = PeerLimits(keep=1e9, silence=1e9)
    prefill, decode = room.add("prefill", limits=limits), room.add("decode", limits=limits)
    middle = Middle(room, prefill, mangler(seed))
    numbers = itertools.count()
    answered = 0

    def step() -> bool:
        nonlocal answered
        if decode.heard(PeerUp) and room.clock.now % 1 < 0.05:
            decode.send(middle.address, reserve(next(numbers)))
        middle.turn()
        for message in prefill.heard(Reserve)[answered:]:
            guests = prefill.peers.view(room.clock.now)
            prefill.send(guests[0].peer, Arrived(message.room, np.array([message.room], dtype=np.int32)))
            answered += 1
        return len(decode.heard(Arrived)) >= 15

    decode.send(middle.address, Renew(10**6, 1.0))
    for _ in range(4000):
        if step():
            break
        room.turns(1, 0.05)
    asked, told = [m.room for m in prefill.heard(Reserve)], [m.room for m in decode.heard(Arrived)]
    assert len(told) >= 15
    assert asked == list(range(len(asked)))
    assert told == list(range(len(told)))
    assert all(len(message.pages) == 3 for message in prefill.heard(Reserve))
    assert len(prefill.heard(PeerUp)) == len(decode.heard(PeerUp)) == 1
    assert prefill.peers.rejected.total() + decode.peers.rejected.total() > 0
    middle.close()


def test_se_05_a_recorded_conversation_played_again_changes_nothing(room: Room) -> None:
    recorded: list[bytes] = []
    prefill, decode = room.add("prefill"), room.add("decode")
    middle = Middle(room, prefill, lambda frame: recorded.append(frame) or [frame])
    decode.send(middle.address, reserve(5))

    def arrived() -> bool:
        middle.turn()
        return bool(prefill.heard(Reserve))

    room.until(arrived)
    before = len(prefill.events)
    intruder = stranger(room, prefill)
    rejected = prefill.peers.rejected.total()
    for frame in recorded:
        intruder.send(frame)
    # Knocks aside, all of it is turned away, now and after the session has ended.
    turned_away = sum(not isinstance(read_frame(frame), Knock) for frame in recorded)
    room.until(lambda: prefill.peers.rejected.total() == rejected + turned_away)
    assert len(prefill.events) == before
    again = room.restart(prefill)
    intruder.connect(f"tcp://{again.address}")
    for frame in recorded:
        intruder.send(frame)
    room.turns(50)
    assert not again.heard(Reserve)
    middle.close()
    intruder.close(linger=0)


def test_se01_no_pickle_in_the_sources() -> None:
    for path in Path("radixpd/runtime").glob("peer*.py"):
        text = path.read_text()
        for word in ("import pickle", "recv_pyobj", "send_pyobj", "torch.load", "marshal"):
            assert word not in text, path


def test_se_05_a_session_in_use_cannot_be_talked_away(room: Room) -> None:
    prefill, decode = room.add("prefill"), room.add("decode")
    middle = Middle(room, prefill, lambda frame: [frame])
    decode.send(middle.address, reserve(5))

    def paired() -> bool:
        middle.turn()
        return bool(prefill.heard(Reserve))

    room.until(paired)
    assert prefill.peers._door is not None
    (session,) = prefill.peers._door.guests
    for _ in range(10):
        middle.front.send_multipart([middle.route, write(Stranger(session))])
    room.until(lambda: middle.turn() or decode.peers.rejected["unexpected"] == 10)
    assert [*prefill.peers._door.guests] == [session]
    assert len(decode.heard(PeerUp)) == 1
    middle.close()
