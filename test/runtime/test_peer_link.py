"""The control link over real sockets: pairing, refusal, loss, restart. Time is the test's own; nothing sleeps."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from peer_nodes import LAYOUT, SECRET, Node, Room, identity, open_room, reserve

from radixpd.config.secret import Secret
from radixpd.core.handoff import Arrived, Drained, NotNeeded, PeerAbort, Renew, Reserve
from radixpd.errors import ConfigError
from radixpd.runtime import peer_line
from radixpd.runtime.peers import PeerGone, PeerLimits, PeerRefused, PeerUnreachable, PeerUp


@pytest.fixture
def room() -> Iterator[Room]:
    with open_room() as room:
        yield room


def pair(room: Room, **options: Any) -> tuple[Node, Node]:
    """A prefill and a decode node that have exchanged a first message."""
    prefill, decode = room.add("prefill", **options), room.add("decode", **options)
    decode.send(prefill.address, Renew(1, 2.0))
    room.until(lambda: prefill.heard(Renew) and decode.heard(PeerUp), "pairing")
    return prefill, decode


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "loopback"])
def test_a_pair_finds_each_other_and_talks_both_ways(room: Room, secret: Secret | None) -> None:
    prefill, decode = pair(room, secret=secret)
    (up,), (guest,) = decode.heard(PeerUp), prefill.heard(PeerUp)
    assert (up.incarnation, up.offers) == (prefill.incarnation, {"shm": {"of": "prefill"}})
    assert (guest.incarnation, guest.offers) == (decode.incarnation, {"shm": {"of": "decode"}})
    assert up.rooms_key == guest.rooms_key
    assert repr(up.rooms_key) not in repr(up)
    decode.send(prefill.address, reserve(7))
    prefill.send(prefill.peer(), Arrived(7, np.array([5, 6], dtype=np.int32)))
    prefill.send(prefill.peer(), Drained(7))
    room.until(lambda: decode.heard(Drained) and prefill.heard(Reserve))
    assert prefill.heard(Reserve)[0].pages.tolist() == [0, 1, 2]
    assert decode.heard(Arrived)[0].tokens.tolist() == [5, 6]
    assert [peer for peer, _ in decode.events] == [prefill.address] * 3
    assert {peer for peer, _ in prefill.events} == {f"decode:1#{decode.incarnation.hex()[:8]}"}
    assert not decode.peers.rejected
    assert not prefill.peers.rejected


def test_messages_wait_for_a_peer_that_comes_up_in_time(room: Room) -> None:
    port = free_port()
    decode = room.add("decode")
    for number in range(100):
        decode.send(f"127.0.0.1:{port}", NotNeeded(number))
    room.turns(10)
    prefill = room.add("prefill", port=port, identity=None)
    room.turns(10)
    assert not prefill.events
    prefill.peers.identify(identity("prefill"))
    room.until(lambda: len(prefill.heard(NotNeeded)) == 100)
    assert [message.room for message in prefill.heard(NotNeeded)] == list(range(100))


HINT = "a request's bootstrap_port is its --disaggregation-bootstrap-port"


def test_what_waits_too_long_is_given_back_and_the_mark_expires(room: Room) -> None:
    port = free_port()
    peer = f"127.0.0.1:{port}"
    decode = room.add("decode")
    decode.send(peer, reserve(1))
    decode.send(peer, Renew(1, 2.0))
    room.pass_time(6)
    assert [item for _, item in decode.events] == [
        PeerAbort(1, f"the prefill server {peer} could not be reached within 5 s: it does not answer ({HINT})", 502),
        Drained(1),
    ]
    decode.send(peer, reserve(2))
    room.turns(1)
    assert [item.room for item in decode.heard(Drained)] == [1, 2], "while the mark lasts, at once"
    prefill = room.add("prefill", port=port)
    room.pass_time(6)
    decode.send(peer, reserve(3))
    room.until(lambda: prefill.heard(Reserve))
    assert [message.room for message in prefill.heard(Reserve)] == [3]


FLAG = "--disaggregation-transfer-dtype"
OTHERS = [
    ({"layout": msgspec.structs.replace(LAYOUT, page_size=32, fingerprint="e" * 16)}, "page size 16 there, 32 here"),
    ({"layout": msgspec.structs.replace(LAYOUT, dtype="float32", fingerprint="e" * 16)}, "KV dtype bfloat16 there, float32 here"),
    ({"layout": msgspec.structs.replace(LAYOUT, layers=4, kv_heads=2)}, "layers 2 there, 4 here; kv heads 1 there, 2 here"),
    ({"layout": msgspec.structs.replace(LAYOUT, fingerprint="e" * 16)}, f"KV layout {'f' * 16} there, {'e' * 16} here"),
    ({"model": "m2"}, "model fingerprint m1 there, m2 here"),
    ({"tp": 2}, "tensor parallel size 1 there, 2 here"),
]


@pytest.mark.parametrize(("other", "text"), OTHERS)
def test_pd_09_pd_10_a_mismatch_is_refused_naming_both_values(room: Room, other: dict[str, Any], text: str) -> None:
    prefill, decode = room.add("prefill"), room.add("decode", identity=identity("decode", **other))
    decode.send(prefill.address, reserve(5))
    room.until(lambda: decode.heard(Drained))
    whole = f"cannot pair with the prefill server {prefill.address}: {text}"
    assert [item for _, item in decode.events] == [PeerRefused(whole), PeerAbort(5, whole, 502), Drained(5)]
    room.until(lambda: prefill.peers.rejected["refused"], "prefill's own refusal")
    assert not prefill.events
    # It is not for ever: with the right process at that address the next request works.
    decode.peers.identify(identity("decode"))
    decode.send(prefill.address, reserve(6))
    room.turns(1)
    assert decode.heard(Drained)[-1].room == 6, "while the mark lasts, at once"
    room.pass_time(6)
    decode.send(prefill.address, reserve(7))
    room.until(lambda: [message.room for message in prefill.heard(Reserve)] == [7])


SENT: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
    (("int8",), ("none",), f"{FLAG} int8 there, none here"),
    (("int8",), ("int4",), f"{FLAG} int8 there, int4 here"),
    (("none", "int8", "int4"), ("int8",), f"{FLAG} none, int8, int4 there, int8 here"),
    (("none",), ("int8",), ""),
    (("none", "int8"), ("int8",), ""),
    (("int8", "int4"), ("int4", "none", "int8"), ""),
]


@pytest.mark.parametrize(("sent", "taken", "text"), SENT)
def test_a_transfer_dtype_that_decode_does_not_take_is_refused_before_anything_is_computed(
    room: Room, sent: tuple[str, ...], taken: tuple[str, ...], text: str
) -> None:
    prefill = room.add("prefill", identity=identity("prefill", codecs=sent))
    decode = room.add("decode", identity=identity("decode", codecs=taken))
    decode.send(prefill.address, reserve(5))
    if not text:
        room.until(lambda: prefill.heard(Reserve))
        return
    room.until(lambda: decode.heard(PeerRefused) and prefill.peers.rejected["refused"], "both refuse")
    assert decode.heard(PeerRefused)[0].reason == f"cannot pair with the prefill server {prefill.address}: {text}"
    assert not prefill.heard(Reserve)


def test_another_protocol_version_is_refused_on_both_sides(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = room.add("prefill"), room.add("decode")
    monkeypatch.setattr(prefill.peers._site, "hello", other_version(prefill.peers._site.hello))
    decode.send(prefill.address, reserve(5))
    room.until(lambda: decode.heard(PeerRefused))
    assert decode.heard(PeerRefused)[0].reason.endswith("protocol version 3 there, 2 here")
    room.turns(20)
    assert not prefill.heard(PeerUp) or not decode.heard(PeerUp)


def other_version(hello: Any) -> Any:
    def newer(called: str) -> bytes:
        fields = msgspec.msgpack.decode(hello(called))
        return msgspec.msgpack.encode({"version": 3, "incarnation": fields["incarnation"], "nonce": fields["nonce"], "news": [1]})

    return newer


def test_a_server_of_the_wrong_role_is_refused(room: Room) -> None:
    prefill = room.add("prefill", identity=identity("decode"))
    decode = room.add("decode")
    decode.send(prefill.address, reserve(5))
    room.until(lambda: decode.heard(PeerRefused))
    assert decode.heard(PeerRefused)[0].reason.endswith("it is a decode server")


@pytest.mark.parametrize(
    ("there", "here", "text"),
    [
        (Secret("another secret, also long"), SECRET, "it did not prove that it knows the secret of this server"),
        (None, SECRET, "this server has a secret and it has none"),
        (SECRET, None, "this server has no secret and it has one"),
    ],
)
def test_a_peer_with_another_secret_is_not_paired_with(room: Room, there: Secret | None, here: Secret | None, text: str) -> None:
    prefill, decode = room.add("prefill", secret=there), room.add("decode", secret=here)
    decode.send(prefill.address, reserve(5))
    room.pass_time(6)
    assert text in decode.heard(PeerAbort)[0].reason
    assert decode.heard(Drained) == [Drained(5)]
    assert decode.peers.rejected["proof"] >= 1
    assert not prefill.events


def test_without_a_secret_other_hosts_are_neither_called_nor_heard(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = room.add("decode", secret=None)
    decode.send("192.0.2.1:7000", reserve(5))
    room.turns(1)
    assert "not a loopback address" in decode.heard(PeerAbort)[0].reason
    assert decode.heard(Drained) == [Drained(5)]
    assert not decode.peers.view(0.0), "no connection was opened"
    # Addresses of other machines cannot be had here: the rule is turned round, so that loopback is a foreign address.
    monkeypatch.setattr(peer_line, "is_loopback", lambda address: address == "192.0.2.1")
    prefill = room.add("prefill", secret=None)
    decode.send(prefill.address, reserve(6))
    room.until(lambda: prefill.peers.rejected["address"])
    assert not prefill.events


def test_only_listed_hosts_are_called(room: Room) -> None:
    prefill = room.add("prefill")
    decode = room.add("decode", allowed=["10.0.0.1", prefill.address])
    decode.send("127.0.0.2:7000", reserve(5))
    decode.send(prefill.address, reserve(6))
    room.until(lambda: prefill.heard(Reserve))
    assert "127.0.0.2:7000 is none of --disaggregation-peers" in decode.heard(PeerAbort)[0].reason


@pytest.mark.parametrize("peer", ["", "nonsense", "host:", ":80", "a b:80", "127.0.0.1:70000", "LOCALHOST:80", "a;b:80", "x#1:80"])
def test_what_is_no_peer_name_is_given_back(room: Room, peer: str) -> None:
    decode = room.add("decode")
    decode.send(peer, reserve(5))
    room.turns(1)
    assert decode.heard(Drained) == [Drained(5)]


def test_silence_is_told_once_and_so_is_the_return(room: Room) -> None:
    prefill, decode = pair(room)
    room.nodes.remove(prefill)  # stopped, not gone: its sockets stay
    room.pass_time(7)
    assert len(decode.heard(PeerUnreachable)) == 1
    assert not decode.heard(PeerGone)
    decode.send(prefill.address, reserve(8))
    decode.send(prefill.address, NotNeeded(9))
    room.turns(1)
    assert decode.heard(Drained) == [Drained(8)], "a silent peer gets no new rooms"
    room.nodes.append(prefill)
    room.until(lambda: prefill.heard(NotNeeded) and len(decode.heard(PeerUp)) == 2)
    assert [message.room for message in prefill.heard(NotNeeded)] == [9]
    assert not prefill.heard(PeerGone)


def test_own_standstill_is_not_the_peers_silence(room: Room) -> None:
    prefill, decode = pair(room)
    room.clock.now += 3600
    room.turns(100)
    assert not decode.heard(PeerUnreachable)
    assert not prefill.heard(PeerUnreachable)


def test_pd_07_a_restarted_prefill_server_is_a_new_peer_at_the_old_address(room: Room) -> None:
    prefill, decode = pair(room)
    again = room.restart(prefill)
    room.until(lambda: len(decode.heard(PeerUp)) == 2)
    news = [type(item) for _, item in decode.events]
    assert news.index(PeerGone) < len(news) - 1 - news[::-1].index(PeerUp)
    assert decode.heard(PeerUp)[1].incarnation == again.incarnation
    decode.send(again.address, reserve(9))
    room.until(lambda: again.heard(Reserve))


def test_a_prefill_server_that_dies_in_the_handshake_was_never_up(room: Room) -> None:
    prefill, decode = room.add("prefill"), room.add("decode")
    decode.send(prefill.address, reserve(9))
    room.until(lambda: decode.peers._calls[prefill.address].line is not None, "the welcome")
    assert not decode.heard(PeerUp), "the confirmation has not been read yet"
    again = room.restart(prefill)
    room.until(lambda: again.heard(Reserve) and decode.heard(PeerUp))
    # `PeerGone` would have had the brain free pages that the new process is about to write.
    assert [type(item) for _, item in decode.events] == [PeerUp]


def test_a_restarted_decode_server_replaces_the_one_that_fell_silent(room: Room) -> None:
    prefill, decode = pair(room)
    old = prefill.peer()
    room.remove(decode)
    again = room.add("decode")
    again.send(prefill.address, Renew(2, 1.0))
    room.until(lambda: prefill.peers.rejected["name in use"], "the first try")
    room.pass_time(3)
    room.until(lambda: len(prefill.heard(Renew)) == 2)
    assert [peer for peer, item in prefill.events if isinstance(item, PeerGone)] == [old]
    assert prefill.peer() != old
    prefill.send(old, Arrived(3, np.array([1], dtype=np.int32)))
    room.turns(1)
    assert prefill.heard(PeerAbort) == [PeerAbort(3, f"{old} is no longer connected", 502)]


def test_two_live_servers_of_one_name_do_not_push_each_other_out(room: Room) -> None:
    prefill, decode = pair(room)
    twin = room.add("decode")
    twin.send(prefill.address, Renew(2, 1.0))
    room.live(10, prefill, decode)
    assert not prefill.heard(PeerGone)
    assert prefill.peers.rejected["name in use"]
    assert len(prefill.heard(Renew)) == 1


def test_one_decode_server_may_know_a_prefill_server_by_two_names(room: Room) -> None:
    prefill, decode = pair(room)
    other = f"localhost:{prefill.peers.port}"
    decode.send(other, Renew(2, 1.0))
    room.until(lambda: len(prefill.heard(Renew)) == 2)
    decode.send(prefill.address, Renew(3, 1.0))
    decode.send(other, Renew(4, 1.0))
    room.until(lambda: len(prefill.heard(Renew)) == 4)
    names = {peer for peer, _ in prefill.events}
    assert len(names) == 2
    for peer in names:
        prefill.send(peer, Drained(5))
    room.until(lambda: len(decode.heard(Drained)) == 2)
    assert {peer for peer, item in decode.events if isinstance(item, Drained)} == {prefill.address, other}


def test_a_peer_that_has_forgotten_the_session_pairs_again(room: Room) -> None:
    prefill, decode = pair(room)
    room.nodes.remove(decode)
    room.turns(300, 2.5)
    assert not prefill.peers.view(room.clock.now)
    decode.peers._ticked = room.clock.now  # it was running, but cut off
    decode.send(prefill.address, reserve(4))
    room.nodes.append(decode)
    room.until(lambda: len(decode.heard(PeerUp)) == 2)
    assert decode.heard(PeerAbort)[0].room == 4, "whether that one came is unknown"
    assert not decode.heard(Drained)
    decode.send(prefill.address, reserve(5))
    room.until(lambda: prefill.heard(Reserve))
    assert [message.room for message in prefill.heard(Reserve)] == [5]
    assert not decode.heard(PeerGone)


def test_a_connection_that_nobody_uses_is_closed(room: Room) -> None:
    decode = room.add("decode")
    decode.send(f"127.0.0.1:{free_port()}", Renew(1, 1.0))
    room.pass_time(30)
    assert len(decode.peers.view(room.clock.now)) == 1
    room.pass_time(40)
    assert not decode.peers.view(room.clock.now)
    assert not decode.poller.sockets


def test_an_idle_pair_stays_up(room: Room) -> None:
    prefill, decode = pair(room)
    room.live(300, prefill, decode)
    for node in (prefill, decode):
        assert not node.heard(PeerUnreachable)
        assert len(node.heard(PeerUp)) == 1


def test_pd_17_a_cut_connection_loses_nothing(room: Room) -> None:
    prefill, decode = pair(room)
    socket = decode.peers._calls[prefill.address].socket
    for number in range(5):
        socket.disconnect(f"tcp://{prefill.address}")
        decode.send(prefill.address, NotNeeded(number))
        prefill.send(prefill.peer(), Drained(number))
        room.turns(3)
        socket.connect(f"tcp://{prefill.address}")
        room.until(lambda number=number: len(prefill.heard(NotNeeded)) == len(decode.heard(Drained)) == number + 1)
    assert [message.room for message in prefill.heard(NotNeeded)] == [message.room for message in decode.heard(Drained)] == list(range(5))
    for node in (prefill, decode):
        assert len(node.heard(PeerUp)) == 1, "the same session all along"


def test_nothing_piles_up_for_a_peer_that_is_not_there(room: Room) -> None:
    port = free_port()
    decode = room.add("decode")
    for _ in range(20):
        decode.send(f"127.0.0.1:{port}", Renew(1, 1.0))
        room.pass_time(2)
    listener = room.context.socket(zmq.ROUTER)
    listener.bind(f"tcp://127.0.0.1:{port}")
    room.until(lambda: listener.poll(0))
    assert len(listener.recv_multipart()) == 2
    assert not listener.poll(50)
    listener.close(linger=0)


def test_a_message_too_long_for_a_frame_ends_its_room_on_both_sides(room: Room) -> None:
    limits = PeerLimits(frame=10_000)
    prefill, decode = pair(room, limits=limits)
    prefill.send(prefill.peer(), Arrived(7, np.zeros(5000, dtype=np.int32)))
    room.until(lambda: decode.heard(PeerAbort) and prefill.heard(PeerAbort))
    assert "too long" in decode.heard(PeerAbort)[0].reason
    assert decode.heard(PeerAbort)[0].room == prefill.heard(PeerAbort)[0].room == 7


def test_a_full_queue_gives_back_what_it_cannot_take(room: Room) -> None:
    limits = PeerLimits(messages=5)
    decode = room.add("decode", limits=limits)
    peer = f"127.0.0.1:{free_port()}"
    for number in range(8):
        decode.send(peer, reserve(number))
    room.turns(1)
    assert [item.room for item in decode.heard(Drained)] == [5, 6, 7]


def test_a_taken_port_is_said_at_start(room: Room) -> None:
    prefill = room.add("prefill")
    with pytest.raises(ConfigError, match=r"--disaggregation-bootstrap-port \d+: cannot bind 127.0.0.1"):
        room.add("prefill", port=prefill.peers.port)
