"""Two movers over two pools: pages come over bit for bit, layer by layer; everything is reported once; what is cancelled stays still."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from kv.moving import LAYOUT, TOKEN, D, P, Pair, Side, end, ids, need, send, spawn, until

from radixpd.core.handoff import CancelRoom, ExpectRoom, Failure, Landed, PeerLost, Quiet, TicketDone
from radixpd.kv.layout import KVLayout
from radixpd.kv.outbox import Job, Lane, Piece
from radixpd.kv.transport import Endpoint

BACKENDS = ("shm", "tcp", "mooncake", "nixl")
HERE = Path(__file__).parent


@pytest.fixture(params=BACKENDS)
def backend(request):
    need(request.param)
    return request.param


@pytest.fixture
def pair(backend):
    pair = Pair(backend)
    yield pair
    pair.close()


def failed(ticket, words=""):
    return lambda report: isinstance(report, TicketDone) and report.ticket == ticket and bool(report.error) and words in report.error


CASES = {
    "one page": ([3], [60]),
    "one run": (range(10, 30), range(20, 40)),
    "adjacent here alone": (range(8), [40, 3, 41, 9, 7, 5, 2, 0]),
    "adjacent there alone": ([40, 3, 41, 9, 7, 5, 2, 0], range(8)),
    "backwards": (range(63, -1, -1), range(64)),
    "all, shuffled": (np.random.default_rng(1).permutation(64), np.random.default_rng(2).permutation(64)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pages_come_over_bit_for_bit_and_nothing_else_is_touched(pair, case):
    source, target = case
    pair.expect(*target)
    pair.p.mover.begin([send(source, target)])
    pair.p.reports.wait(TicketDone(1))
    pair.d.reports.wait(Landed(7))
    assert pair.same(source, target)
    for page in set(range(64)) - {int(each) for each in target}:
        assert not any(pair.d.page(layer, page).any() for layer in range(LAYOUT.layers))
    assert pair.p.mover.counters.bytes_out == len(source) * LAYOUT.layers * LAYOUT.page_bytes
    assert pair.p.reports.all == [TicketDone(1)]
    size = len(source) * LAYOUT.layers * LAYOUT.page_bytes
    assert pair.d.reports.all == [Landed(7, raw=size, wire=size)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(backend, dtype):
    pair = Pair(backend, layout=KVLayout(layers=2, kv_heads=1, head_dim=4, page_size=1, dtype=dtype))
    pair.expect(5, 6, 1)
    pair.p.mover.begin([send([1, 2, 9], [5, 6, 1])])
    pair.d.reports.wait(Landed(7))
    assert pair.same([1, 2, 9], [5, 6, 1])
    pair.close()


def test_a_layer_lands_before_the_next_is_computed(pair):
    """The overlap itself: bytes of layer 0 are there while the last layer is not computed yet."""
    pages, target = list(range(12)), list(range(30, 42))
    pair.expect(*target)
    pair.p.mover.begin([send(pages, target, ready=5)])
    until(lambda: pair.same(pages[:5], target[:5]), "every layer of the pages that were ready")
    for layer in range(LAYOUT.layers):
        assert not any(pair.d.page(layer, page).any() for page in target[5:])
        assert pair.d.reports.all == []
        pair.p.mover.layer_done(layer)
        until(lambda layer=layer: pair.same(pages, target, [layer]), f"layer {layer}")
        target_later = range(layer + 1, LAYOUT.layers)
        assert not any(pair.d.page(later, page).any() for later in target_later for page in target[5:])
    pair.d.reports.wait(Landed(7))
    pair.p.reports.wait(TicketDone(1))


def test_several_steps_fill_one_room(pair):
    pair.expect(*range(20, 32))
    for step in range(3):
        pages = range(4 * step, 4 * step + 4)
        pair.p.mover.begin([send(pages, [20 + page for page in pages], ticket=step, ready=1)])
        for layer in range(LAYOUT.layers):
            pair.p.mover.layer_done(layer)
    pair.d.reports.wait(Landed(7))
    pair.p.reports.wait(TicketDone(0), TicketDone(1), TicketDone(2))
    assert pair.same(range(12), range(20, 32))


def test_several_rooms_in_one_step(pair):
    for room in range(8):
        pair.expect(*range(8 * room, 8 * room + 8), room=room)
    pages = np.random.default_rng(3).permutation(64)
    pair.p.mover.begin(
        [send(pages[8 * room : 8 * room + 8], range(8 * room, 8 * room + 8), room=room, ticket=room, ready=room) for room in range(8)]
    )
    for layer in range(LAYOUT.layers):
        pair.p.mover.layer_done(layer)
    pair.d.reports.wait(*(Landed(room) for room in range(8)))
    pair.p.reports.wait(*(TicketDone(room) for room in range(8)))
    assert pair.same(pages, range(64))


def test_pieces_of_a_large_layer_may_come_in_any_order(backend):
    """A layer larger than a piece goes in several, over several connections where there are some."""
    pair = Pair(backend, layout=KVLayout(layers=2, kv_heads=8, head_dim=64, page_size=64, dtype="float32"))  # 256 KiB a page
    target = np.random.default_rng(3).permutation(64)
    pair.expect(*target)
    pair.p.mover.begin([send(range(64), target)])
    pair.d.reports.wait(Landed(7))
    assert pair.same(range(64), target)
    assert pair.p.mover.counters.frames_out == 2 * 64 // 8
    pair.close()


def test_a_throttled_mover_delivers_all_the_same(backend):
    pair = Pair(backend, link_gbps=0.05)
    pair.expect(*range(64))
    pair.p.mover.begin([send(range(64), range(64), ready=60)])
    for layer in range(LAYOUT.layers):
        pair.p.mover.layer_done(layer)
    pair.d.reports.wait(Landed(7))
    assert pair.same(range(64), range(64))
    assert pair.p.mover.counters.frames_out > 60
    pair.close()


def test_first_layer_first_over_all_sends():
    lane = Lane(D, 0.0)
    one, two = (Job(send(range(6), range(6), ticket=ticket), 12) for ticket in (1, 2))
    for job in (one, two):
        for layer in (0, 1):
            lane.add(Piece(job, layer, 0, 6))
    order = []
    while lane.has_due:
        piece = lane.take(4)
        order.append((piece.job.send.ticket, piece.layer, piece.start, piece.end))
    assert order == [(ticket, layer, *part) for layer in (0, 1) for ticket in (1, 2) for part in ((0, 4), (4, 6))]


def test_what_need_not_be_sent_any_more_is_passed_over():
    lane = Lane(D, 0.0)
    one, two = (Job(send(range(6), range(6), ticket=ticket), 6) for ticket in (1, 2))
    lane.add(Piece(one, 0, 0, 6))
    lane.add(Piece(two, 1, 0, 6))
    one.settled = True
    assert lane.has_due
    assert lane.take(8).job is two
    assert not lane.has_due


def test_an_empty_send_and_an_empty_room_are_done_at_once(pair):
    pair.expect()
    pair.p.mover.begin([send([], [])])
    pair.p.reports.wait(TicketDone(1))
    pair.d.reports.wait(Landed(7))


def test_cancel_in_mid_transfer_is_quiet_and_stays_so(pair):
    pages, target = range(8), range(8)
    pair.expect(*target)
    pair.p.mover.begin([send(pages, target, ready=0)])
    pair.p.mover.layer_done(0)
    until(lambda: pair.same(pages, target, [0]))
    pair.p.mover.order(CancelRoom(7))
    pair.p.reports.wait(Quiet(7), failed(1, "cancelled"))
    before = pair.p.mover.counters.bytes_out
    for layer in range(1, LAYOUT.layers):
        pair.p.mover.layer_done(layer)
    # A plan that was under way when the room was cancelled names it once more.
    pair.p.mover.begin([send(pages, target, ticket=2)])
    pair.p.reports.wait(failed(2, "cancelled"))
    pair.d.mover.order(CancelRoom(7))
    pair.d.do(lambda: None)
    assert not any(pair.d.page(layer, page).any() for layer in range(1, LAYOUT.layers) for page in target)
    assert pair.p.mover.counters.bytes_out == before
    assert pair.d.reports.of(Landed) == []
    assert len(pair.p.reports.of(Quiet)) == 1


def test_cancelling_one_of_ten_leaves_nine_whole(pair):
    """PD-13 at the mover's level."""
    for room in range(10):
        pair.expect(*range(6 * room, 6 * room + 6), room=room)
    pair.p.mover.begin(
        [send(range(6 * room, 6 * room + 6), range(6 * room, 6 * room + 6), room=room, ticket=room, ready=3) for room in range(10)]
    )
    pair.p.mover.layer_done(0)
    pair.p.mover.order(CancelRoom(4))
    for layer in range(1, LAYOUT.layers):
        pair.p.mover.layer_done(layer)
    others = [room for room in range(10) if room != 4]
    pair.d.reports.wait(*(Landed(room) for room in others))
    pair.p.reports.wait(*(TicketDone(room) for room in others), Quiet(4))
    assert not pair.d.reports.has(Landed(4))


def test_a_room_never_sent_is_quiet_at_once_and_a_receiver_forgets_without_a_word(pair):
    pair.p.mover.order(CancelRoom(99))
    pair.p.reports.wait(Quiet(99))
    pair.expect(1, 2)
    pair.d.mover.order(CancelRoom(7))
    pair.d.do(lambda: None)
    pair.p.mover.begin([send([1, 2], [1, 2])])
    pair.p.reports.wait(failed(1, "does not expect this room"))
    # Quiet is told where nobody can write any more; whether the sender had come already is chance.
    assert set(map(type, pair.d.reports.all)) <= {Quiet}
    assert pair.d.mover.counters.refused


def test_a_receiver_that_forgets_in_mid_transfer_refuses_the_rest(pair):
    pair.expect(*range(4))
    pair.p.mover.begin([send(range(4), range(4), ready=0)])
    pair.p.mover.layer_done(0)
    until(lambda: pair.same(range(4), range(4), [0]))
    pair.d.mover.order(CancelRoom(7))
    pair.d.do(lambda: None)
    pair.p.mover.layer_done(1)
    pair.p.reports.wait(failed(1))
    assert pair.d.reports.all == ([Quiet(7)] if pair.d.endpoint.transport == "tcp" else [])  # elsewhere the sender could still write


def test_frames_may_be_faster_than_the_brains_word(pair):
    pair.p.mover.begin([send(range(4), range(4))])
    until(lambda: any(guest.waits_for == 7 for guest in list(pair.d.reception.guests)), "a frame that waits")
    pair.expect(*range(4))
    pair.d.reports.wait(Landed(7))
    assert pair.same(range(4), range(4))


def test_a_room_that_nobody_ever_expects_is_refused_in_the_end(backend):
    pair = Pair(backend, patience=0.1)
    pair.p.mover.begin([send(range(4), range(4))])
    pair.p.reports.wait(failed(1, "does not expect this room"))
    pair.close()


def test_pages_of_somebody_else_are_refused_and_told(pair):
    pair.expect(1, 2, 3)
    pair.p.mover.begin([send([1, 2, 3], [1, 2, 4])])
    pair.p.reports.wait(failed(1, "these pages"))
    pair.d.reports.wait(lambda report: isinstance(report, Failure) and report.room == 7)
    if pair.d.endpoint.transport == "tcp":  # with shm the writer is trusted with the whole pool; what it says is checked
        assert not any(pair.d.page(layer, page).any() for layer in range(LAYOUT.layers) for page in range(64))


@pytest.mark.parametrize("page", [64, 10**6, 2**31 - 1])
def test_pages_outside_of_the_pool_are_refused(pair, page):
    pair.expect(1)
    pair.p.mover.begin([send([1], [page])])
    pair.p.reports.wait(failed(1))
    pair.p.mover.begin([send([1], [1], room=8, ticket=2)])
    pair.expect(1, room=8)
    pair.d.reports.wait(Landed(8))


def test_a_peer_cannot_write_into_the_room_of_another(pair, backend):
    other = Side(backend, fill=True)
    pair.d.mover.admit("other:1", b"another-token-of-its-own")
    other.mover.connect(D, (pair.d.endpoint,), b"another-token-of-its-own")
    pair.expect(*range(4))
    other.mover.begin([send(range(4), range(4))])
    other.reports.wait(failed(1, "does not expect this room"))
    assert pair.d.reports.all == []
    pair.p.mover.begin([send(range(4), range(4))])
    pair.d.reports.wait(Landed(7))
    assert pair.same(range(4), range(4))
    other.close()


def test_the_wrong_token_opens_nothing_and_is_counted(backend):
    decode, prefill = Side(backend), Side(backend, fill=True, connect=0.3)
    decode.mover.admit(P, TOKEN)
    decode.mover.order(ExpectRoom(7, P, ids(1, 2)))
    prefill.mover.connect(D, (decode.endpoint,), TOKEN + b"!")
    prefill.mover.begin([send([1, 2], [1, 2])])
    prefill.reports.wait(failed(1))
    assert decode.mover.counters.wrong_tokens > 0
    assert decode.mover.counters.bytes_in == 0
    assert not any(decode.page(layer, page).any() for layer in range(LAYOUT.layers) for page in range(64))
    # The right one later is all that is needed.
    prefill.mover.connect(D, (decode.endpoint,), TOKEN)
    prefill.mover.begin([send([1, 2], [1, 2], ticket=2, room=8)])
    decode.mover.order(ExpectRoom(8, P, ids(1, 2)))
    decode.reports.wait(Landed(8))
    prefill.close()
    decode.close()


def test_another_layout_or_an_unknown_way_is_named_in_the_ticket(backend):
    prefill, decode = Side(backend), Side(backend, layout=KVLayout(layers=4, kv_heads=2, head_dim=8, page_size=8, dtype="float32"))
    prefill.mover.connect(D, (decode.endpoint,), TOKEN)
    prefill.mover.begin([send([1], [1])])
    prefill.reports.wait(failed(1, f"the peer's KV layout is {decode.pool.layout.fingerprint}"))
    prefill.mover.connect(D, (Endpoint("pigeon", "", 64, LAYOUT.fingerprint),), TOKEN)
    prefill.mover.begin([send([1], [1], ticket=2, room=8)])
    prefill.reports.wait(failed(2, "pigeon"))
    prefill.mover.begin([send([1], [1], ticket=3, room=9, peer="nobody:1")])
    prefill.reports.wait(failed(3, "no connection to nobody:1"))
    prefill.close()
    decode.close()


def test_a_step_that_breaks_off_fails_its_tickets(pair):
    pair.expect(*range(4))
    pair.p.mover.begin([send(range(4), range(4), ready=2)])
    pair.p.mover.layer_done(0)
    pair.p.mover.begin([])
    pair.p.reports.wait(failed(1, "step ended"))
    pair.p.mover.layer_done(1)
    pair.expect(*range(4), room=8)
    pair.p.mover.begin([send(range(4), range(4), ticket=2, room=8)])
    pair.d.reports.wait(Landed(8))


def test_pd_17_idle_connections_that_were_closed_are_opened_again(pair):
    pair.expect(1)
    pair.p.mover.begin([send([1], [1])])
    pair.d.reports.wait(Landed(7))
    for round_ in range(3):
        pair.d.do(lambda: pair.d.reception.dismiss(P, "idle too long"))
        pair.expect(1, room=8 + round_)
        pair.p.mover.begin([send([2], [1], ticket=8 + round_, room=8 + round_)])
        pair.d.reports.wait(Landed(8 + round_))
    assert pair.d.reports.of(PeerLost) == []


def test_close_fails_what_is_open_and_a_closed_sender_is_lost_to_its_receiver(pair):
    pair.expect(*range(4))
    pair.p.mover.begin([send(range(4), range(4), ready=0)])
    pair.p.mover.layer_done(0)
    until(lambda: pair.same(range(4), range(4), [0]))
    assert pair.p.mover.close(10.0)
    assert failed(1, "closing")(pair.p.reports.all[-1])
    pair.d.reports.wait(lambda report: isinstance(report, PeerLost) and report.peer == P)


def test_a_sender_that_closes_before_it_is_answered_is_lost_all_the_same(pair):
    pair.expect(1)
    pair.p.mover.begin([send([1], [1])])
    pair.d.reports.wait(Landed(7))
    pair.expect(*range(4), room=8)
    pair.d.do(lambda: None)
    resume = threading.Event()
    pair.d.mover.after(lambda: resume.wait(20))  # its answer comes when nobody is there to take it
    sent = pair.p.mover.counters.frames_out
    pair.p.mover.begin([send(range(4), range(4), ticket=2, room=8, ready=0)])
    pair.p.mover.layer_done(0)
    until(lambda: pair.p.mover.counters.frames_out > sent)
    assert pair.p.mover.close(10.0)
    resume.set()
    pair.d.reports.wait(lambda report: isinstance(report, PeerLost) and report.peer == P)


def test_a_receiver_that_closes_fails_tickets_within_the_deadline(backend):
    pair = Pair(backend, connect=0.3)
    pair.expect(1)
    pair.p.mover.begin([send([1], [1])])
    pair.d.reports.wait(Landed(7))
    assert pair.d.mover.close(10.0)
    pair.p.mover.begin([send([1], [1], ticket=2, room=8)])
    pair.p.reports.wait(failed(2))
    pair.close()


def test_a_new_incarnation_on_either_side_works_at_once(pair, backend):
    pair.expect(1)
    pair.p.mover.begin([send([1], [1])])
    pair.d.reports.wait(Landed(7))
    for turn in range(5):
        token = b"a-token-of-another-incarnation-%d" % turn
        pair.d.mover.admit(P, token)
        pair.p.mover.connect(D, (pair.d.endpoint,), token)
        pair.expect(2, room=8 + turn)
        pair.p.mover.begin([send([turn], [2], ticket=8 + turn, room=8 + turn)])
        pair.d.reports.wait(Landed(8 + turn))
        assert pair.same([turn], [2])
    if backend == "shm":
        assert pair.p.transport.mapped == 1
        assert len(pair.d.transport._writers[P]) == 1


def test_disconnect_takes_all_access_away(pair, backend):
    pair.expect(1, 2)
    pair.p.mover.begin([send([1], [1])])
    until(lambda: pair.same([1], [1]))
    pair.d.mover.disconnect(P)
    if backend == "tcp":  # with shm the writer's word, or its end, is what counts
        pair.d.reports.wait(lambda report: isinstance(report, PeerLost))
    pair.p.mover.disconnect(D)
    pair.p.mover.begin([send([2], [2], ticket=2, room=8)])
    pair.p.reports.wait(failed(2, "no connection"))


def test_nobody_waits_for_a_listener_that_raises(backend):
    """A report that cannot be delivered is logged; the thread lives."""
    pair = Pair(backend)
    calls = []

    def broken(report):
        calls.append(report)
        raise RuntimeError("no")

    pair.p.mover._report = broken
    pair.expect(1, 2)
    pair.p.mover.begin([send([1], [1]), send([2], [2], ticket=2)])
    pair.d.reports.wait(Landed(7))
    until(lambda: len(calls) == 2)
    pair.close()


# ---- a peer that is a process of its own ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A killed process leaves its socket behind: here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_killed_sender_is_lost_and_its_rooms_are_over(backend):
    decode, child = Side(backend), spawn("prefill", backend)
    decode.mover.admit(P, TOKEN)
    decode.mover.order(ExpectRoom(7, P, ids(0, 1, 2, 3)))
    child.stdin.write(json.dumps({name: getattr(decode.endpoint, name) for name in Endpoint.__dataclass_fields__}) + "\n")
    child.stdin.flush()
    until(lambda: all(decode.page(0, page).any() for page in range(4)), "layer 0")
    assert decode.reports.all == []
    child.send_signal(signal.SIGSTOP)  # paused: it may go on any time, so it is not lost
    decode.do(lambda: None)
    assert decode.reports.all == []
    end(child)
    decode.reports.wait(lambda report: isinstance(report, PeerLost) and report.peer == P)
    assert decode.do(lambda: decode.mover._ground.arrivals.all()) == []
    assert len(decode.reports.all) == 1
    decode.close()


def test_a_killed_receiver_fails_tickets_and_is_unmapped(backend):
    prefill, child = Side(backend, fill=True, connect=0.5), spawn("decode", backend)
    prefill.mover.connect(D, (Endpoint(**json.loads(child.stdout.readline())),), TOKEN)
    child.stdin.write("7 0 1 2 3\n")
    child.stdin.flush()
    assert child.stdout.readline() == "expected\n"
    prefill.mover.begin([send(range(4), range(4), ready=0)])
    prefill.mover.layer_done(0)
    until(lambda: prefill.mover.counters.frames_out == 1)
    end(child)
    prefill.mover.layer_done(1)
    prefill.reports.wait(failed(1))
    if backend == "shm":
        until(lambda: prefill.transport.mapped == 0, "unmapping")
    prefill.close()


def test_quiet_waits_until_a_paused_tcp_receiver_has_forgotten_the_room():
    layout_pages = 2048  # 16 MiB: more than the sockets between the two can hold
    prefill, child = Side("tcp", fill=True, pages=layout_pages, stall=0.5), spawn("decode", "tcp", layout_pages)
    prefill.mover.connect(D, (Endpoint(**json.loads(child.stdout.readline())),), TOKEN)
    child.stdin.write("7 " + " ".join(map(str, range(layout_pages))) + "\n")
    child.stdin.flush()
    assert child.stdout.readline() == "expected\n"
    until(lambda: any(each.open for each in prefill.transport._lines[D]._members), "a connection")
    child.send_signal(signal.SIGSTOP)
    prefill.mover.begin([send(range(layout_pages), range(layout_pages))])
    prefill.reports.wait(failed(1, "has taken nothing for 0.5 s"))
    prefill.mover.order(CancelRoom(7))
    for _ in range(20):
        prefill.do(lambda: None)
    assert prefill.reports.of(Quiet) == []
    child.send_signal(signal.SIGCONT)
    prefill.reports.wait(Quiet(7))
    end(child)
    prefill.close()


def test_the_source_may_change_as_soon_as_a_ticket_has_failed():
    """A frame that was half sent when its ticket failed goes on with other bytes, and must not count."""
    pages = 2048
    pair = Pair("tcp", pages=pages, stall=0.5)
    pair.expect(*range(pages))
    stop = pair.d.transport._reception
    until(lambda: len(stop.of(P)) == 3, "all connections")
    for guest in stop.of(P):
        pair.d.do(lambda guest=guest: hold(guest.stream))
    pair.p.mover.begin([send(range(pages), range(pages))])
    pair.p.reports.wait(failed(1, "has taken nothing"))
    for layer in pair.p.pool.layers:
        layer.view(torch.uint8).fill_(255)
    for guest in stop.of(P):
        pair.d.do(lambda guest=guest: let_go(guest.stream))
    until(lambda: not pair.p.mover._dispatch.flying, "an answer to every frame")
    assert pair.d.reports.of(Landed) == []
    pair.p.mover.order(CancelRoom(7))
    pair.p.reports.wait(Quiet(7))
    assert pair.d.reports.of(Landed) == []
    pair.close()


def hold(stream):
    stream._receive_later, stream._receive = stream._receive, lambda: None
    stream._selector.unregister(stream.sock)
    stream._events = 0
    stream._interest = lambda: None


def let_go(stream):
    stream._receive = stream._receive_later
    del stream._interest
    stream._interest()
