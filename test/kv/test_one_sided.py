"""What goes on around a library that writes into the peer's pool: when it may begin, what counts, when a room is quiet."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kv.moving import LAYOUT, TOKEN, D, P, Pair, Side, send, until

from radixpd.core.handoff import CancelRoom, Landed, PeerLost, Quiet, TicketDone
from radixpd.errors import ConfigError, PeerFailed
from radixpd.kv import transport
from radixpd.kv.one_sided import Region, spans
from radixpd.kv.transport import TRANSPORTS, Endpoint, choose, create

TCP = Endpoint("tcp", "127.0.0.1:1", 64, LAYOUT.fingerprint)


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "pigeon", "kv.held_wire:transport")
    pair = Pair("pigeon")
    until(lambda: stands(pair), "a connection")
    yield pair
    pair.close()
    transport._factory.cache_clear()


def stands(pair):
    return (line := pair.p.transport._talk.line(D)) is not None and line.stands


def wire(side):
    return side.transport._wire


def begun(pair):
    return len(wire(pair.p).begun)


def finish(pair, error=""):
    pair.p.do(lambda: wire(pair.p).finish(error))


def failed(ticket, words=""):
    return lambda report: isinstance(report, TicketDone) and report.ticket == ticket and bool(report.error) and words in report.error


def start(pair, room=7, ticket=1):
    """All layers of a room are being written."""
    pair.expect(1, 2, room=room)
    pair.p.mover.begin([send([1, 2], [1, 2], room=room, ticket=ticket)])
    until(lambda: begun(pair) == LAYOUT.layers, "a write")


def test_nothing_is_told_before_the_bytes_are_in_place(pair):
    start(pair)
    pair.p.do(lambda: None)
    pair.d.do(lambda: None)
    assert pair.p.mover.counters.frames_out == 0
    assert pair.p.reports.all == pair.d.reports.all == []
    finish(pair)
    pair.d.reports.wait(Landed(7))
    pair.p.reports.wait(TicketDone(1))
    assert pair.same([1, 2], [1, 2])


def test_nothing_is_written_before_both_sides_have_proved_the_token(pair):
    """Neither at a receiver that does not know it, nor to one that is not there."""
    other = Side("pigeon", connect=0.3)
    other.mover.connect(D, (pair.d.endpoint,), TOKEN + b"!")
    other.mover.begin([send([1], [1])])
    other.reports.wait(failed(1))
    assert not wire(other).begun
    assert not wire(other).held
    other.close()


def test_nothing_is_begun_while_no_connection_stands(pair):
    pair.d.do(lambda: pair.d.reception.tokens.clear())
    pair.d.do(lambda: pair.d.reception.dismiss(P, "away"))
    until(lambda: not stands(pair), "the end of the connection")
    pair.expect(1)
    pair.p.mover.begin([send([1], [1])])
    pair.p.do(lambda: None)
    assert not begun(pair)
    pair.d.mover.admit(P, TOKEN)
    until(lambda: begun(pair), "a write")
    finish(pair)
    pair.d.reports.wait(Landed(7))


def test_a_room_that_ends_while_it_is_written_is_not_told_and_quiet_when_the_writing_ends(pair):
    start(pair)
    pair.p.mover.order(CancelRoom(7))
    pair.p.reports.wait(failed(1, "cancelled"))
    for _ in range(5):
        pair.p.do(lambda: None)
    assert pair.p.reports.of(Quiet) == []
    finish(pair)
    pair.p.reports.wait(Quiet(7))
    assert pair.p.mover.counters.frames_out == 0
    assert pair.d.reports.all == []
    assert len(pair.p.reports.all) == 2


def test_pages_that_may_have_changed_while_they_were_read_are_not_told(pair):
    """The room is not cancelled, but its source was given up: the bytes there are anything."""
    start(pair)
    pair.p.mover.void([7])
    finish(pair)
    pair.p.reports.wait(failed(1, "withdrawn"))
    assert pair.p.mover.counters.frames_out == 0
    assert pair.d.reports.all == []


def test_writes_that_have_not_begun_are_withdrawn_and_the_room_is_quiet_at_once(pair):
    wire(pair.p).begin = False
    pair.expect(1, 2)
    pair.p.mover.begin([send([1, 2], [1, 2])])
    until(lambda: len(wire(pair.p).held) == LAYOUT.layers)
    pair.p.mover.order(CancelRoom(7))
    pair.p.reports.wait(Quiet(7))
    assert not wire(pair.p).held
    assert not pair.p.transport._writes


def test_after_a_write_that_failed_a_room_is_quiet_when_the_receiver_has_forgotten_it_and_a_while_has_passed(pair):
    clock = pair.p.mover._ground.clock
    start(pair)
    finish(pair, "gone with the wind")
    pair.p.reports.wait(failed(1, "gone with the wind"))
    asked = clock()
    pair.p.mover.order(CancelRoom(7))
    pair.p.reports.wait(Quiet(7))
    assert clock() - asked >= pair.p.mover._ground.options.grace
    assert pair.d.do(lambda: pair.d.mover._ground.arrivals.find(7)) is None
    assert not pair.p.transport._doubtful
    assert not pair.p.transport._ending
    pair.expect(3, room=8)
    pair.p.mover.begin([send([3], [3], room=8, ticket=2)])
    until(lambda: begun(pair) == LAYOUT.layers)
    finish(pair)
    pair.d.reports.wait(Landed(8))


def test_a_room_whose_cancelled_write_fails_is_doubtful_too(pair):
    start(pair)
    pair.p.mover.order(CancelRoom(7))
    pair.p.reports.wait(failed(1))
    finish(pair, "gone with the wind")
    pair.p.reports.wait(Quiet(7))
    assert pair.d.do(lambda: pair.d.mover._ground.arrivals.find(7)) is None  # it was asked to forget it


def test_a_peer_that_is_parted_with_fails_tickets_at_once_and_quiet_waits_for_the_writing(pair):
    start(pair)
    pair.p.mover.disconnect(D)
    pair.p.reports.wait(failed(1, "not served"))
    pair.p.mover.order(CancelRoom(7))
    for _ in range(5):
        pair.p.do(lambda: None)
    assert pair.p.reports.of(Quiet) == []
    assert ("part", D) in wire(pair.p).calls
    finish(pair, "too late")
    pair.p.reports.wait(Quiet(7))
    assert pair.p.mover._dispatch.flying == {}


def test_quiet_comes_also_when_whoever_was_asked_to_forget_has_gone(pair):
    start(pair)
    finish(pair, "gone with the wind")
    pair.p.reports.wait(failed(1))
    pair.d.do(lambda: pair.d.reception.tokens.clear())
    pair.d.do(lambda: pair.d.reception.dismiss(P, "away"))
    pair.p.mover.order(CancelRoom(7))
    pair.p.do(lambda: None)
    assert pair.p.reports.of(Quiet) == []
    pair.p.mover.disconnect(D)
    pair.p.reports.wait(Quiet(7))


def test_a_new_process_at_the_other_end_has_nothing_of_the_old_ones_writes(pair):
    start(pair)
    pair.p.mover.order(CancelRoom(7))
    pair.p.do(lambda: None)
    assert pair.p.reports.of(Quiet) == []
    new = Side("pigeon")
    new.mover.admit(P, TOKEN + b"2")
    pair.p.mover.connect(D, (new.endpoint,), TOKEN + b"2")
    pair.p.reports.wait(Quiet(7))  # the old pool is no more
    finish(pair)  # the library's answer for it comes late
    pair.d.close()
    pair.d = new
    start(pair, room=8, ticket=2)
    finish(pair)
    pair.d.reports.wait(Landed(8))
    assert pair.same([1, 2], [1, 2])


def test_the_same_pool_under_a_new_token_still_waits_for_what_is_being_written(pair):
    start(pair)
    pair.d.mover.admit(P, TOKEN + b"2")
    pair.p.mover.connect(D, (pair.d.endpoint,), TOKEN + b"2")
    pair.p.mover.order(CancelRoom(7))
    for _ in range(5):
        pair.p.do(lambda: None)
    assert pair.p.reports.of(Quiet) == []
    finish(pair)
    pair.p.reports.wait(Quiet(7))


def test_a_sender_without_a_connection_is_lost(pair):
    start(pair)
    assert pair.p.mover.close(10.0)
    pair.d.reports.wait(lambda report: isinstance(report, PeerLost) and report.peer == P)


def test_pages_adjacent_on_both_sides_are_one_part():
    source, target = np.array([3, 4, 5, 9, 10, 2], dtype=np.int32), np.array([7, 8, 9, 1, 0, 3], dtype=np.int32)
    assert spans(1 << 46, 1 << 45, 1 << 20, source, target).tolist() == [
        [(1 << 46) + (3 << 20), (1 << 45) + (7 << 20), 3 << 20],
        [(1 << 46) + (9 << 20), (1 << 45) + (1 << 20), 1 << 20],
        [(1 << 46) + (10 << 20), 1 << 45, 1 << 20],
        [(1 << 46) + (2 << 20), (1 << 45) + (3 << 20), 1 << 20],
    ]


@pytest.mark.parametrize(
    "details",
    [
        "",
        "loft",
        "[]",
        '{"at": "loft"}',
        '{"at": "loft", "bases": 5}',
        '{"at": "loft", "bases": [1, 2, 3]}',
        '{"at": "loft", "bases": [1, 2, 3, "4"]}',
        '{"at": "loft", "bases": [1, 2, 3, 0]}',
        '{"at": "loft", "bases": [1, 2, 3, -1]}',
        json.dumps({"at": "loft", "bases": [1, 2, 3, (1 << 63) - 1]}),
        '{"at": 5, "bases": [1, 2, 3, 4]}',
    ],
)
def test_details_that_make_no_sense_are_refused(details):
    with pytest.raises(PeerFailed, match="the peer's pigeon endpoint"):
        Region.of(Endpoint("pigeon", "127.0.0.1:1", 64, LAYOUT.fingerprint, details=details), LAYOUT)


def test_details_say_where_each_layer_lies(pair):
    region = Region.of(pair.d.endpoint, LAYOUT)
    assert region.at == "loft"
    assert region.bases == tuple(layer.data_ptr() for layer in pair.d.pool.layers)


def test_a_peer_that_has_another_way_only_is_told_so():
    mooncake = replace(TCP, transport="mooncake")
    assert choose((TCP, mooncake), ("mooncake",)) is mooncake
    assert choose((TCP, mooncake), ("nixl", "mooncake", "tcp")) is mooncake
    assert choose((mooncake, TCP), ("nixl", "tcp")) is TCP
    for name in ("mooncake", "nixl"):
        with pytest.raises(PeerFailed, match=f"the peer offers tcp, this server has {name}"):
            choose((TCP,), (name,))


@pytest.mark.parametrize(("name", "module"), [("mooncake", "mooncake.engine"), ("nixl", "nixl_cu12._api")])
def test_a_missing_package_names_the_flag(monkeypatch, name, module):
    for each in (module, "nixl._api", "nixl_cu13._api"):
        monkeypatch.setitem(sys.modules, each, None)
    monkeypatch.delitem(sys.modules, f"radixpd.kv.transport_{name}", raising=False)
    transport._factory.cache_clear()
    with pytest.raises(ConfigError, match=f"--disaggregation-transfer-backend {name} needs a package that is not installed"):
        create(name, None)


def test_neither_library_is_loaded_unless_it_is_asked_for():
    code = (
        "import sys; from kv.moving import Side; Side('tcp').close(); Side('shm').close()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('mooncake', 'nixl', 'nixl_cu12', 'nixl_cu13')])"
    )
    here = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": f"{here}:{here.parent}"}, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
