"""The tcp transport against a peer that we play byte by byte, and how little memory a transfer takes."""

from __future__ import annotations

import hmac
import socket
import tracemalloc

import numpy as np
import pytest
from kv.moving import LAYOUT, TOKEN, D, P, Pair, Side, ids, send, until

from radixpd.core.handoff import ExpectRoom, Landed, PeerLost
from radixpd.errors import ConfigError
from radixpd.kv import frames
from radixpd.kv.layout import KVLayout
from radixpd.kv.transport import Endpoint


@pytest.fixture
def decode():
    side = Side("tcp")
    side.mover.admit(P, TOKEN)
    side.mover.order(ExpectRoom(7, P, ids(1, 2)))
    side.do(lambda: None)
    yield side
    side.close()


def dial(side):
    host, port = side.endpoint.address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def exactly(sock, count):
    got = b""
    while len(got) < count and (more := sock.recv(count - len(got))):
        got += more
    return got


def enter(side, token=TOKEN, layout=LAYOUT):
    """A connection whose greeting is through."""
    sock = dial(side)
    magic, version, challenge = frames.GREETING.unpack(exactly(sock, frames.GREETING.size))
    assert (magic, version) == (b"rxkv", 1)
    both = challenge + b"o" * frames.CHALLENGE
    sock.sendall(both[frames.CHALLENGE :] + frames.proof(token, "sender", both, layout.fingerprint))
    assert hmac.compare_digest(exactly(sock, frames.PROOF), frames.proof(token, "receiver", both, layout.fingerprint))
    return sock


def data(layer, pages, *, room=7, number=1, verdict=frames.GOOD, fill=b"x"):
    runs = frames.runs_of(np.array(pages))
    body = fill * (len(pages) * LAYOUT.page_bytes)
    return frames.HEAD.pack(frames.DATA, layer, len(runs), room, number) + runs.tobytes() + body + verdict


def answer(sock):
    return frames.ANSWER.unpack(exactly(sock, frames.ANSWER.size))


def closed(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_frames_are_answered_and_the_last_one_lands_the_room(decode):
    sock = enter(decode)
    for layer in range(LAYOUT.layers):
        assert decode.reports.all == []
        sock.sendall(data(layer, [1, 2], number=10 + layer))
        assert answer(sock) == (10 + layer, frames.TAKEN)
    decode.reports.wait(Landed(7))
    assert (decode.page(3, 2) == ord("x")).all()
    assert not decode.page(3, 3).any()


def test_a_page_that_comes_twice_counts_once(decode):
    sock = enter(decode)
    for number in range(2 * LAYOUT.layers):
        sock.sendall(data(number % LAYOUT.layers, [1], number=number))
        assert answer(sock) == (number, frames.TAKEN)
    assert decode.reports.all == []


def test_a_void_frame_counts_for_nothing(decode):
    sock = enter(decode)
    for layer in range(LAYOUT.layers):
        sock.sendall(data(layer, [1, 2], verdict=frames.VOID))
        assert answer(sock) == (1, frames.WITHDRAWN)
    assert decode.reports.all == []


def test_a_frame_without_its_end_counts_for_nothing(decode):
    socks = [enter(decode) for _ in range(LAYOUT.layers)]
    for layer, sock in enumerate(socks):
        sock.sendall(data(layer, [1, 2])[:-1])
    until(lambda: (decode.page(LAYOUT.layers - 1, 2) == ord("x")).all())
    for sock in socks:
        sock.close()
    decode.reports.wait(lambda report: isinstance(report, PeerLost) and report.peer == P)
    assert len(decode.reports.all) == 1


def test_forgetting_a_room_stops_a_frame_that_is_on_its_way(decode):
    """What proves quiet to a sender: after the answer not a byte is written, whatever the other connections still bring."""
    slow, quick = enter(decode), enter(decode)
    frame = data(0, [1, 2])
    slow.sendall(frame[: len(frame) // 2])
    until(lambda: decode.page(0, 1).any())
    quick.sendall(frames.HEAD.pack(frames.FORGET, 0, 0, 7, 5))
    assert answer(quick) == (5, frames.TAKEN)
    decode.pool.layers[0].zero_()
    slow.sendall(frame[len(frame) // 2 :])
    assert answer(slow) == (1, frames.UNKNOWN)
    assert not decode.pool.layers[0].any()


def test_nobody_forgets_the_room_of_another(decode):
    decode.mover.admit("other:1", b"another-token-of-its-own")
    decode.do(lambda: None)
    other, sock = enter(decode, b"another-token-of-its-own"), enter(decode)
    other.sendall(frames.HEAD.pack(frames.FORGET, 0, 0, 7, 5) + data(0, [1, 2], fill=b"y"))
    assert answer(other) == (5, frames.TAKEN)
    assert answer(other) == (1, frames.UNKNOWN)
    assert not decode.page(0, 1).any()
    for layer in range(LAYOUT.layers):
        sock.sendall(data(layer, [1, 2]))
    decode.reports.wait(Landed(7))


def test_a_landed_room_takes_nothing_more(decode):
    slow, quick = enter(decode), enter(decode)
    late = data(0, [1], fill=b"z")
    slow.sendall(late[:-100])
    until(lambda: (decode.page(0, 1) == ord("z")).any())
    for layer in range(LAYOUT.layers):
        quick.sendall(data(layer, [1, 2]))
    decode.reports.wait(Landed(7))
    decode.pool.layers[0].zero_()
    slow.sendall(late[-100:])
    assert answer(slow) == (1, frames.UNKNOWN)
    assert not decode.pool.layers[0].any()


@pytest.mark.parametrize(
    "frame",
    [
        frames.HEAD.pack(9, 0, 1, 7, 1),
        frames.HEAD.pack(frames.DATA, 4, 1, 7, 1),
        frames.HEAD.pack(frames.DATA, 0, 0, 7, 1),
        frames.HEAD.pack(frames.DATA, 0, 2**32 - 1, 7, 1),
        frames.HEAD.pack(frames.DATA, 0, 1, 7, 1) + np.array([[1, 2**32 - 1]], dtype="<u4").tobytes(),
        frames.HEAD.pack(frames.DATA, 0, 1, 7, 1) + np.array([[1, 0]], dtype="<u4").tobytes(),
        frames.HEAD.pack(frames.DATA, 0, 2, 7, 1) + np.array([[1, 2**31], [1, 2**31]], dtype="<u4").tobytes(),
    ],
    ids=["kind", "layer", "no runs", "many runs", "huge run", "empty run", "sum that wraps"],
)
def test_nonsense_closes_the_connection_and_nothing_else(decode, frame):
    sock = enter(decode)
    sock.sendall(frame)
    assert closed(sock)
    again = enter(decode)
    for layer in range(LAYOUT.layers):
        again.sendall(data(layer, [1, 2]))
    decode.reports.wait(Landed(7))


@pytest.mark.parametrize("first", [64, 2**32 - 1, 63])
def test_a_run_out_of_the_pool_is_refused_without_a_byte(decode, first):
    sock = enter(decode)
    runs = np.array([[first, 2]], dtype="<u4").tobytes()
    sock.sendall(frames.HEAD.pack(frames.DATA, 0, 1, 7, 1) + runs + b"x" * (2 * LAYOUT.page_bytes) + frames.GOOD)
    assert answer(sock) == (1, frames.FOREIGN)
    assert not decode.pool.layers[0].any()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, b"\0" * 48, TOKEN * 4])
def test_strangers_get_in_by_no_word(decode, said):
    sock = dial(decode)
    exactly(sock, frames.GREETING.size)
    sock.sendall(said)
    assert closed(sock)
    assert decode.mover.counters.wrong_tokens == 1


def test_an_answer_to_another_challenge_is_worth_nothing(decode):
    old, new = dial(decode), dial(decode)
    challenge = frames.GREETING.unpack(exactly(old, frames.GREETING.size))[2]
    own = b"o" * frames.CHALLENGE
    exactly(new, frames.GREETING.size)
    new.sendall(own + frames.proof(TOKEN, "sender", challenge + own, LAYOUT.fingerprint))
    assert closed(new)
    assert decode.mover.counters.wrong_tokens == 1


def test_strangers_that_say_nothing_are_shown_out_and_do_not_crowd_the_door():
    side = Side("tcp", connect=0.3)
    side.mover.admit(P, TOKEN)
    silent = [dial(side) for _ in range(80)]
    for sock in silent:
        while sock.recv(64):  # the greeting, then the end
            pass
    until(lambda: not side.transport._reception.guests, "an empty door")
    enter(side)
    side.close()


def test_an_impostor_gets_no_page():
    """Whoever listens at the peer's address without its token hears no KV."""
    listener = socket.create_server(("127.0.0.1", 0))
    prefill = Side("tcp", fill=True, connect=0.5)
    prefill.mover.connect(D, (Endpoint("tcp", f"127.0.0.1:{listener.getsockname()[1]}", 64, LAYOUT.fingerprint),), TOKEN)
    prefill.mover.begin([send([1], [1])])
    sock, _ = listener.accept()
    sock.settimeout(10)
    sock.sendall(frames.GREETING.pack(frames.MAGIC, frames.VERSION, b"c" * 16))
    exactly(sock, frames.CHALLENGE + frames.PROOF)
    sock.sendall(b"w" * frames.PROOF)
    assert sock.recv(1) == b""
    prefill.reports.wait(lambda report: "no" in report.error or "token" in report.error)
    assert prefill.mover.counters.bytes_out == 0
    prefill.close()
    listener.close()


def test_a_cut_connection_fails_its_tickets_and_the_next_room_works():
    pair = Pair("tcp")
    pair.expect(*range(4))
    pair.p.mover.begin([send(range(4), range(4))])
    pair.d.reports.wait(Landed(7))
    # The receiver cuts a frame that has started: its room is not known, so it waits there.
    pair.p.mover.begin([send(range(4), range(4), ticket=2, room=8)])
    until(lambda: any(guest.waits_for == 8 for guest in list(pair.d.transport._reception.guests)))
    pair.d.do(lambda: pair.d.transport._reception.dismiss(P, "cut"))
    pair.p.reports.wait(lambda report: report.ticket == 2 and "clos" in report.error + "closed" * ("cut" in report.error))
    pair.expect(*range(4), room=9)
    pair.p.mover.begin([send(range(4), range(4), ticket=3, room=9)])
    pair.d.reports.wait(Landed(9))
    assert pair.d.reports.of(PeerLost) == []
    pair.close()


def test_no_bytes_objects_are_made_of_pages():
    """While 64 pages of 1 MiB, scattered on both sides, come over, Python never holds memory for even one of them."""
    layout = KVLayout(layers=1, kv_heads=8, head_dim=64, page_size=256, dtype="float32")
    assert layout.page_bytes == 1 << 20
    pair = Pair("tcp", layout=layout)
    source, target = np.random.default_rng(1).permutation(64), np.random.default_rng(2).permutation(64)
    pair.expect(*target)
    until(lambda: len(pair.d.transport._reception.of(P)) == 3)
    tracemalloc.start()
    try:
        pair.p.mover.begin([send(source, target)])
        pair.d.reports.wait(Landed(7))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pair.same(source, target)
    assert pair.p.mover.counters.bytes_out == 64 << 20
    assert peak < layout.page_bytes // 2
    pair.close()


def test_adjacent_pages_are_one_run():
    assert frames.runs_of(np.array([3, 4, 5, 9, 8, 20, 21])).tolist() == [[3, 3], [9, 1], [8, 1], [20, 2]]
    assert frames.pages_of(frames.runs_of(np.array([3, 4, 5, 9, 8, 20, 21]))).tolist() == [3, 4, 5, 9, 8, 20, 21]


def test_a_taken_port_is_a_config_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot be opened on 127"):
        Side("tcp", port=taken.getsockname()[1])


def test_a_short_token_or_a_senseless_address_is_refused():
    side = Side("tcp")
    for ticket, (endpoint, token, words) in enumerate(
        [
            (Endpoint("tcp", "127.0.0.1:1", 64, LAYOUT.fingerprint), b"short", "at least 16 bytes"),
            (Endpoint("tcp", "nowhere", 64, LAYOUT.fingerprint), TOKEN, "makes no sense"),
            (Endpoint("tcp", "127.0.0.1:1", 0, LAYOUT.fingerprint), TOKEN, "0 pages"),
        ]
    ):
        side.mover.connect(D, (endpoint,), token)
        side.mover.begin([send([1], [1], ticket=ticket)])
        side.reports.wait(lambda report, ticket=ticket, words=words: report.ticket == ticket and words in report.error)
    side.close()
