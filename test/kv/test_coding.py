"""Compressed transfers, mover to mover: exactly the encoded bytes cross, staging is bounded and given back, nothing unknown is taken."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from kv.moving import LAYOUT, TOKEN, D, P, Pair, Side, ids, send, until
from kv.test_transport_tcp import answer, closed, enter

from radixpd.core.handoff import CancelRoom, ExpectRoom, Failure, Landed, PeerLost, Quiet, TicketDone
from radixpd.errors import ConfigError
from radixpd.kv import coding, frames
from radixpd.kv.codec import build_codec
from radixpd.kv.codec_choice import Speed
from radixpd.kv.coding import Coding, Encoder
from radixpd.kv.layout import KVLayout
from radixpd.kv.outbox import Job, Lane, Piece
from radixpd.kv.pool import Pool

LOSSY = ("fp8_e4m3", "int8", "int4")
WIDE = KVLayout(layers=2, kv_heads=16, head_dim=128, page_size=16, dtype="float32")  # 256 KiB a page: 8 make a piece
LARGEST = {"fp8_e4m3": 0.07, "int8": 0.02, "int4": 0.5}  # error, of numbers of size 1


def numbers(pool, seed=0):
    """Let the pool hold what a model could have put there."""
    generator = torch.Generator().manual_seed(seed)
    for layer in pool.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))


@pytest.fixture
def make():
    """Pairs over tcp whose prefill pool holds numbers; closed in the end."""
    made = []

    def pair(**options):
        made.append(Pair("tcp", **options))
        numbers(made[-1].p.pool)
        return made[-1]

    yield pair
    for each in made:
        each.close()


def through(codec, layout, pages):
    """What is left of pages after the codec."""
    codec, back = build_codec(codec, layout), torch.zeros_like(pages)
    data = torch.empty(codec.encoded_bytes(len(pages)), dtype=torch.uint8)
    codec.encode_into(pages, data)
    codec.decode_into(data, back, torch.arange(len(pages)))
    return back


def staged(side):
    """Bytes of staging memory in use, sending and receiving."""
    sending = sum(each.staging.used for each in side.mover._dispatch.encoders.values() if each.staging)
    decoder = side.mover._ground.decoder
    return side.do(lambda: sending), side.do(lambda: decoder.staging.used if decoder else 0)


def failed(ticket, words=""):
    return lambda report: isinstance(report, TicketDone) and report.ticket == ticket and words in report.error and report.error


# ---- what crosses ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pages_arrive_as_the_codec_leaves_them_and_no_byte_more_crosses(make, codec, dtype):
    layout = replace(LAYOUT, dtype=dtype)
    pair = make(codec=codec, layout=layout)
    source, target = np.random.default_rng(1).permutation(64)[:40], np.random.default_rng(2).permutation(64)[:40]
    pair.expect(*target)
    pair.p.mover.begin([send(source, target)])
    pair.p.reports.wait(TicketDone(1))
    pair.d.reports.wait(Landed(7))
    wire, raw = 4 * build_codec(codec, layout).encoded_bytes(40), 4 * 40 * layout.page_bytes
    assert pair.d.reports.all == [Landed(7, raw=raw, wire=wire, exact=False)]
    for sent, came in zip(pair.p.pool.layers, pair.d.pool.layers, strict=True):
        assert torch.equal(came[target], through(codec, layout, sent[source]))
        assert float((came[target].float() - sent[source].float()).abs().max()) < LARGEST[codec] * 4
        assert not came[np.setdiff1d(np.arange(64), target)].any()
    out, into = pair.p.mover.counters, pair.d.mover.counters
    assert (out.bytes_out, out.raw_out, into.bytes_in, into.raw_in) == (wire, raw, wire, raw)
    assert staged(pair.p) == staged(pair.d) == (0, 0)


@pytest.mark.parametrize("codec", LOSSY)
def test_layers_of_several_steps_and_pieces(make, codec):
    """Pages that were ready and pages that a step computes, more than one piece a layer; each piece has its own scales."""
    pair = make(codec=codec, layout=WIDE)
    pair.expect(*range(64))
    pair.p.mover.begin([send(range(40), range(40), ready=19)])
    for layer in range(2):
        pair.p.mover.layer_done(layer)
    pair.p.mover.begin([send(range(40, 64), range(40, 64), ticket=2)])
    pair.p.reports.wait(TicketDone(1), TicketDone(2))
    pair.d.reports.wait(Landed(7))
    pieces = [8, 8, 3, 8, 8, 5, 8, 8, 8]
    size = build_codec(codec, WIDE).encoded_bytes
    (landed,) = pair.d.reports.of(Landed)
    assert landed == Landed(7, raw=2 * 64 * WIDE.page_bytes, wire=2 * sum(map(size, pieces)), exact=False)
    assert pair.p.mover.counters.frames_out == 2 * len(pieces)
    starts = list(itertools.accumulate(pieces, initial=0))
    for sent, came in zip(pair.p.pool.layers, pair.d.pool.layers, strict=True):
        for first, end in itertools.pairwise(starts):
            assert torch.equal(came[first:end], through(codec, WIDE, sent[first:end]))


def test_plain_pages_tell_their_bytes_too_and_are_exact(make):
    """Of one that takes codecs as well."""
    pair = make(codec="none")
    other = Side("tcp", codec="int8")
    other.mover.admit(P, TOKEN)
    pair.p.mover.connect("other:1", (other.endpoint,), TOKEN)
    other.mover.order(ExpectRoom(7, P, ids(1, 2)))
    pair.p.mover.begin([send([5, 6], [1, 2], peer="other:1")])
    size = 4 * 2 * LAYOUT.page_bytes
    other.reports.wait(Landed(7))
    assert other.reports.all == [Landed(7, raw=size, wire=size, exact=True)]
    assert torch.equal(other.pool.layers[3][[1, 2]], pair.p.pool.layers[3][[5, 6]])
    other.close()


def test_a_throttled_link_is_charged_with_what_crosses(make):
    """At less than a quarter of plain bytes."""
    pair = make(codec="int4", pages=512, link_gbps=0.05)
    pair.expect(*range(512))
    charged = []
    link = pair.p.mover._dispatch.link
    carry, link.carry = link.carry, lambda size: charged.append(size) or carry(size)
    pair.p.mover.begin([send(range(512), range(512))])
    pair.d.reports.wait(Landed(7))
    (landed,) = pair.d.reports.of(Landed)
    assert sum(charged) == landed.wire == pair.p.mover.counters.bytes_out
    assert landed.wire < landed.raw / 4
    assert min(charged) >= build_codec("int4", LAYOUT).encoded_bytes(2), "32 tokens at least, however slow the link"


def test_no_bytes_objects_are_made_of_coded_pages(make):
    """Staging and scratch are torch's memory, made once or a chunk at a time; Python never holds even one page."""
    layout = KVLayout(layers=1, kv_heads=8, head_dim=64, page_size=256, dtype="float32")
    pair = make(codec="int8", layout=layout)
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
    assert peak < layout.page_bytes // 2


def test_a_piece_never_leaves_less_behind_than_a_group_of_keys():
    lane = Lane(D, 0.0)
    lane.add(Piece(Job(send(range(25), range(25)), 25), 0, 0, 25))
    sizes = []
    while lane.has_due:
        piece = lane.take(8, 2)
        sizes.append(piece.end - piece.start)
    assert sizes == [8, 8, 7, 2]


@pytest.mark.parametrize(("page_size", "least"), [(1, 32), (16, 2), (24, 2), (32, 1), (64, 1), (512, 1)])
def test_pieces_hold_enough_tokens_for_the_scales(page_size, least):
    pool = Pool(replace(LAYOUT, page_size=page_size), 4)
    encoder = Encoder(Coding(pool, "int8"))
    assert encoder.cut("int8", 1) == (2 * least, least)
    most, _ = encoder.cut("int8", 1 << 30)
    assert most == max(2 * least, coding.PIECE // pool.layout.page_bytes)
    pool.close()


# ---- staging --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int4"])
def test_everything_comes_over_through_staging_of_a_single_piece(make, codec, monkeypatch):
    """A full ring makes the sender wait, and nothing is lost: three connections, two rooms, room for one piece on either side."""
    monkeypatch.setattr(coding, "INCOMING", 1)
    monkeypatch.setattr(coding, "OUTGOING", 1)
    pair = make(codec=codec, layout=WIDE)
    size = build_codec(codec, WIDE).encoded_bytes(8)
    assert pair.d.mover._ground.decoder.capacity == size
    for room in (7, 8):
        pair.expect(*range(32 * (room - 7), 32 * (room - 6)), room=room)
    pair.p.mover.begin(
        [send(range(32 * (room - 7), 32 * (room - 6)), range(32 * (room - 7), 32 * (room - 6)), room=room, ticket=room) for room in (7, 8)]
    )
    pair.p.reports.wait(TicketDone(7), TicketDone(8))
    pair.d.reports.wait(Landed(7), Landed(8))
    assert pair.p.mover.counters.bytes_out == 2 * 8 * size
    assert torch.equal(pair.d.pool.layers[1][56:], through(codec, WIDE, pair.p.pool.layers[1][56:]))
    assert staged(pair.p) == staged(pair.d) == (0, 0)


def test_a_sender_with_full_staging_waits_for_answers(make, monkeypatch):
    monkeypatch.setattr(coding, "OUTGOING", 1)
    pair = make(codec="int8", layout=WIDE, patience=20.0)
    pair.p.mover.begin([send(range(64), range(64))])
    until(lambda: any(guest.waits_for == 7 for guest in list(pair.d.transport._reception.guests)), "a frame that waits")
    for _ in range(20):
        pair.p.do(lambda: None)
    assert pair.p.mover.counters.frames_out == 1
    assert staged(pair.p)[0] == build_codec("int8", WIDE).encoded_bytes(8)
    pair.expect(*range(64))
    pair.d.reports.wait(Landed(7))
    pair.p.reports.wait(TicketDone(1))


@pytest.fixture
def narrow(monkeypatch):
    """A receiver that has staging memory for one piece; two pages of each of two rooms are expected."""
    monkeypatch.setattr(coding, "INCOMING", 1)
    side = Side("tcp", codec="int8", layout=WIDE)
    side.mover.admit(P, TOKEN)
    for room, pages in ((7, [1, 2, 3, 4, 5, 6]), (8, [11, 12, 13, 14, 15, 16])):
        side.mover.order(ExpectRoom(room, P, ids(*pages)))
    side.do(lambda: None)
    yield side
    side.close()


def coded(layer, pages, *, room=7, number=1, codec="int8", verdict=frames.GOOD, size=None, layout=WIDE, damage=False):
    """A frame, byte by byte."""
    made = build_codec("int8", layout)
    data = torch.empty(made.encoded_bytes(len(pages)), dtype=torch.uint8)
    shape = (len(pages), 2, layout.page_size, layout.kv_heads, layout.head_dim)
    made.encode_into(torch.ones(shape), data)
    if damage:
        data[-1] ^= 1
    runs = frames.runs_of(np.array(pages))
    head = frames.HEAD.pack(frames.CODED, layer, len(runs), room, number)
    head += frames.CODING.pack(codec.encode(), len(data) if size is None else size)
    return head + runs.tobytes() + data.numpy().tobytes() + verdict


def crowd(side):
    """Rooms of the frames that wait for staging memory."""
    return sorted(guest.crowded.room for guest in list(side.transport._reception.guests) if guest.crowded)


def test_a_frame_waits_for_staging_that_another_has_and_goes_on_when_it_is_free(narrow):
    slow, quick = enter(narrow, layout=WIDE), enter(narrow, layout=WIDE)
    frame = coded(0, [1, 2, 3, 4, 5, 6])
    slow.sendall(frame[:-1])
    until(lambda: staged(narrow)[1])
    quick.sendall(coded(0, [11, 12, 13, 14, 15, 16], room=8, number=2))
    until(lambda: crowd(narrow) == [8])
    assert not narrow.pool.layers[0].any(), "nothing is in the pool before it is whole"
    slow.sendall(frame[-1:])
    assert answer(slow) == (1, frames.TAKEN)
    assert answer(quick) == (2, frames.TAKEN)
    assert torch.allclose(narrow.pool.layers[0][[1, 6, 11, 16]], torch.ones(()), atol=0.01)


@pytest.mark.parametrize("how", ["cancel", "forget", "cut"])
def test_whoever_ends_gives_its_staging_back(narrow, how):
    slow, quick = enter(narrow, layout=WIDE), enter(narrow, layout=WIDE)
    frame = coded(0, [1, 2, 3, 4, 5, 6])
    slow.sendall(frame[: len(frame) // 2])
    until(lambda: staged(narrow)[1])
    quick.sendall(coded(0, [11, 12, 13, 14, 15, 16], room=8, number=2))
    until(lambda: crowd(narrow) == [8])
    if how == "cancel":
        narrow.mover.order(CancelRoom(7))
    elif how == "forget":
        third = enter(narrow, layout=WIDE)
        third.sendall(frames.HEAD.pack(frames.FORGET, 0, 0, 7, 9))
        assert answer(third) == (9, frames.TAKEN)
    else:
        slow.close()
    assert answer(quick) == (2, frames.TAKEN)
    assert not narrow.pool.layers[0][1:7].any()
    until(lambda: staged(narrow) == (0, 0))
    if how != "cut":  # the rest goes nowhere, and the connection lives
        slow.sendall(frame[len(frame) // 2 :])
        assert answer(slow) == (1, frames.UNKNOWN)
        assert not narrow.pool.layers[0][1:7].any()


@pytest.mark.parametrize("how", ["cancel", "cut"])
@pytest.mark.parametrize("turn", ["first in line", "second in line"])
def test_who_waits_for_staging_may_end_too(narrow, how, turn):
    slow, second, third = (enter(narrow, layout=WIDE) for _ in range(3))
    narrow.mover.order(ExpectRoom(9, P, ids(21, 22)))
    narrow.do(lambda: None)
    frame = coded(0, [1, 2, 3, 4, 5, 6])
    slow.sendall(frame[:-1])
    until(lambda: staged(narrow)[1])
    line = [(second, coded(0, [11, 12, 13], room=8, number=2), 8), (third, coded(0, [21, 22], room=9, number=3), 9)]
    rooms = []
    for sock, other, room in line if turn == "first in line" else line[::-1]:
        sock.sendall(other)
        rooms.append(room)
        until(lambda: crowd(narrow) == sorted(rooms))
    if how == "cancel":
        narrow.mover.order(CancelRoom(8))
        assert answer(second) == (2, frames.UNKNOWN)
    else:
        waiting = [each for each in narrow.transport._reception.guests if each.crowded and each.crowded.room == 8]
        narrow.do(lambda: waiting[0].stream.close("cut"))
    assert crowd(narrow) == [9]
    slow.sendall(frame[-1:])
    assert answer(slow) == (1, frames.TAKEN)
    assert answer(third) == (3, frames.TAKEN)
    assert staged(narrow) == (0, 0)
    assert not narrow.pool.layers[0][11:17].any()


def test_a_lost_peer_leaves_no_staging_behind(narrow):
    sock = enter(narrow, layout=WIDE)
    sock.sendall(coded(0, [1, 2, 3, 4, 5, 6])[:-1])
    until(lambda: staged(narrow)[1])
    sock.close()
    narrow.reports.wait(lambda report: isinstance(report, PeerLost) and report.peer == P)
    assert staged(narrow) == (0, 0)
    assert not narrow.pool.layers[0].any()


def test_cancel_in_mid_transfer_gives_the_senders_staging_back(make):
    pair = make(codec="int8", layout=WIDE, patience=20.0)
    pair.p.mover.begin([send(range(64), range(64))])
    until(lambda: any(guest.waits_for == 7 for guest in list(pair.d.transport._reception.guests)), "a frame that waits")
    assert staged(pair.p)[0]
    pair.p.mover.order(CancelRoom(7))
    pair.p.reports.wait(failed(1, "cancelled"))
    pair.d.do(lambda: pair.d.mover._ground.arrivals.end(7))
    pair.p.reports.wait(Quiet(7))
    until(lambda: staged(pair.p) == staged(pair.d) == (0, 0))
    assert not any(layer.any() for layer in pair.d.pool.layers)
    pair.expect(*range(8), room=8)
    pair.p.mover.begin([send(range(8), range(8), ticket=2, room=8)])
    pair.d.reports.wait(Landed(8))


def test_a_receiver_that_goes_gives_the_senders_staging_back():
    pair = Pair("tcp", codec="int4", layout=WIDE, connect=0.3, patience=20.0)
    numbers(pair.p.pool)
    pair.p.mover.begin([send(range(64), range(64))])
    until(lambda: any(guest.waits_for == 7 for guest in list(pair.d.transport._reception.guests)), "a frame that waits")
    pair.d.close()
    pair.p.reports.wait(failed(1))
    until(lambda: staged(pair.p) == (0, 0))
    pair.p.close()


# ---- what is not taken ----------------------------------------------------------------------------------------------------------


def test_a_receiver_that_does_not_take_the_codec_says_so_on_both_sides(make):
    sender, receiver = make(codec="int8"), make(codec="auto:int4")
    sender.p.mover.connect("other:1", (receiver.d.endpoint,), TOKEN)
    receiver.expect(1, 2)
    sender.p.mover.begin([send([1, 2], [1, 2], peer="other:1")])
    sender.p.reports.wait(failed(1, "does not take this transfer dtype (--disaggregation-transfer-dtype there) (sent as int8)"))
    receiver.d.reports.wait(Failure(7, f"{P} sends int8, which this server does not take (--disaggregation-transfer-dtype)"))
    assert not any(layer.any() for layer in receiver.d.pool.layers)
    receiver.expect(1, 2, room=8)
    receiver.p.mover.begin([send([1, 2], [1, 2], room=8)])  # plain: its link is not measured yet
    receiver.d.reports.wait(Landed(8))


@pytest.mark.parametrize("takes", ["none", "int8"])
@pytest.mark.parametrize("name", ["zstd", "none", "\xff" * 8])
def test_a_codec_that_nobody_knows_is_refused_and_the_connection_lives(takes, name):
    side = Side("tcp", codec=takes)
    side.mover.admit(P, TOKEN)
    for room in (7, 8):
        side.mover.order(ExpectRoom(room, P, ids(1, 2)))
    side.do(lambda: None)
    sock = enter(side)
    head = frames.HEAD.pack(frames.CODED, 0, 1, 7, 1) + frames.CODING.pack(name.encode("latin1"), 5)
    sock.sendall(head + np.array([[1, 2]], dtype="<u4").tobytes() + b"12345" + frames.GOOD)
    assert answer(sock) == (1, frames.CODEC)
    side.reports.wait(lambda report: isinstance(report, Failure) and report.room == 7 and "does not take" in report.reason)
    sock.sendall(frames.HEAD.pack(frames.DATA, 0, 1, 8, 2) + np.array([[1, 2]], dtype="<u4").tobytes())
    sock.sendall(b"x" * (2 * LAYOUT.page_bytes) + frames.GOOD)
    assert answer(sock) == (2, frames.TAKEN)
    side.close()


def test_damaged_bytes_end_the_room_and_never_reach_the_pool(narrow):
    sock = enter(narrow, layout=WIDE)
    sock.sendall(coded(0, [1, 2, 3, 4, 5, 6], damage=True))
    assert answer(sock) == (1, frames.DAMAGED)
    narrow.reports.wait(lambda report: isinstance(report, Failure) and report.room == 7 and "cannot be decoded" in report.reason)
    assert not narrow.pool.layers[0].any()
    assert staged(narrow) == (0, 0)
    sock.sendall(coded(0, [11, 12], room=8, number=2))
    assert answer(sock) == (2, frames.TAKEN)


def test_a_void_frame_counts_for_nothing_and_is_not_decoded(narrow):
    sock = enter(narrow, layout=WIDE)
    sock.sendall(coded(0, [1, 2], verdict=frames.VOID))
    assert answer(sock) == (1, frames.WITHDRAWN)
    assert not narrow.pool.layers[0].any()
    assert staged(narrow) == (0, 0)


@pytest.mark.parametrize("wrong", [{"size": 100}, {"size": 2**32 - 1}])
def test_a_size_that_is_not_the_codecs_closes_the_connection(narrow, wrong):
    sock = enter(narrow, layout=WIDE)
    frame = coded(0, [1, 2], **wrong)
    sock.sendall(frame[: frames.HEAD.size + frames.CODING.size + 8])
    assert closed(sock)
    again = enter(narrow, layout=WIDE)
    again.sendall(coded(0, [1, 2]))
    assert answer(again) == (1, frames.TAKEN)


def test_a_frame_that_staging_cannot_hold_closes_the_connection(narrow, caplog):
    narrow.mover.order(ExpectRoom(9, P, ids(*range(20, 40))))
    narrow.do(lambda: None)
    sock = enter(narrow, layout=WIDE)
    frame = coded(0, list(range(20, 40)), room=9)
    sock.sendall(frame[: frames.HEAD.size + frames.CODING.size + 8])
    assert closed(sock)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("codec", ["int8", "auto:int8,none"])
def test_shared_memory_and_a_codec_are_refused_at_the_start(codec):
    with pytest.raises(ConfigError, match=r"--disaggregation-transfer-dtype .* needs --disaggregation-transfer-backend tcp"):
        Side("shm", codec=codec)


def test_a_codec_that_does_not_exist_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"--disaggregation-transfer-dtype fp4: fp4 is not a transfer dtype"):
        Side("tcp", codec="fp4")


def test_a_fault_of_a_codec_fails_its_ticket_alone(make, monkeypatch):
    pair = make(codec="int8")
    pair.expect(1, 2)
    codec = pair.p.mover._coding.codecs["int8"]
    encode = codec.encode_into
    monkeypatch.setattr(codec, "encode_into", lambda pages, out: 1 / 0)
    pair.p.mover.begin([send([1, 2], [1, 2])])
    pair.p.reports.wait(failed(1, "an internal fault (ZeroDivisionError)"))
    assert staged(pair.p) == (0, 0)
    monkeypatch.setattr(codec, "encode_into", encode)
    pair.expect(1, 2, room=8)
    pair.p.mover.begin([send([1, 2], [1, 2], ticket=2, room=8)])
    pair.d.reports.wait(Landed(8))


# ---- auto -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def speeds(monkeypatch):
    """Codecs as fast as the test says, in bytes a second."""

    def as_fast(rate):
        ratios = {"none": 1.0, "fp8_e4m3": 0.25, "int8": 0.27, "int4": 0.16}
        monkeypatch.setattr(
            coding, "measure", lambda codec, layout, pages: Speed(codec.name, encode=rate, decode=rate, ratio=ratios[codec.name])
        )

    return as_fast


def used(pair, ticket):
    """The codec of a send of all pages; 'none' if what came is exact."""
    pair.expect(*range(512), room=ticket)
    pair.p.mover.begin([send(range(512), range(512), ticket=ticket, room=ticket)])
    pair.d.reports.wait(Landed(ticket))
    landed = next(each for each in pair.d.reports.of(Landed) if each.room == ticket)
    assert landed.exact == (landed.wire == landed.raw)
    return "none" if landed.exact else f"{landed.wire / landed.raw:.2f}"


def test_auto_compresses_on_a_slow_link_once_it_knows_it(make, speeds):
    speeds(1e9)
    pair = make(codec="auto:int4", pages=512, link_gbps=0.2)  # 4 MiB at 25 MB/s
    assert used(pair, 1) == "none"
    assert pair.p.do(lambda: pair.p.mover._dispatch.encoders[D].speed.now) < 50e6
    assert float(used(pair, 2)) < 0.25
    assert float(used(pair, 3)) < 0.25


def test_auto_sends_plain_pages_where_the_codecs_are_slower_than_the_link(make, speeds):
    speeds(1e6)
    pair = make(codec="auto:int8,int4", pages=512)
    assert [used(pair, ticket) for ticket in (1, 2, 3)] == ["none"] * 3


def test_auto_follows_the_clock_from_send_to_send(speeds):
    """One peer's encoder on a clock of our own: unknown, slow, slow but codec-bound for long, fast."""
    speeds(1e9)
    pool = Pool(WIDE, 16)
    encoder = Encoder(Coding(pool, "auto:fp8_e4m3,int8"))
    now = 100.0

    def transfer(count, rate):
        nonlocal now
        for _ in range(count):
            job = Job(send(range(8), range(8)), 8, name)
            parcel = encoder.wrap(Piece(job, 0, 0, 8), now)
            now += parcel.size / rate
            encoder.unwrap(parcel, now, arrived=True)

    name = encoder.choose(8)
    assert name == "none"
    transfer(10, 10e6)
    name = encoder.choose(8)
    assert name == "fp8_e4m3"
    transfer(10, 10e6)
    assert encoder.choose(8) == "fp8_e4m3"
    transfer(600, 240e6)  # what the codec itself brings onto a wire: nothing is known of the link any more
    name = encoder.choose(8)
    assert name == "none"
    transfer(10, 2e9)
    assert encoder.choose(8) == "none"
    assert encoder.staging.used == 0
    pool.close()


def test_only_what_is_listed_is_measured_and_chosen(speeds):
    speeds(1e9)
    pool = Pool(WIDE, 2)
    made = Coding(pool, "auto:int8")
    assert list(made.speeds) == ["none", "int8"]
    assert list(made.codecs) == ["int8"]
    assert Coding(pool, "auto:none").codecs == {}
    pool.close()
