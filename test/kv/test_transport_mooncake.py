"""The mooncake transport with the library itself: whom a silent peer holds up, what is refused, and when memory is given back."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kv.moving import LAYOUT, TOKEN, D, P, Pair, Receiver, Side, ids, need, send, until

from radixpd.core.handoff import CancelRoom, ExpectRoom, Landed, Quiet, TicketDone
from radixpd.errors import ConfigError

PAGES = 2048  # 16 MiB in all: more than the sockets between two processes can hold


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    need("mooncake")
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def failed(ticket, words=""):
    return lambda report: isinstance(report, TicketDone) and report.ticket == ticket and bool(report.error) and words in report.error


def maps():
    """Mappings of KV pools in this process."""
    return Path("/proc/self/maps").read_text().count("radixpd-kv")


def spare():
    """Engines that nobody uses any more: whose memory has been forgotten."""
    return sum(map(len, sys.modules["radixpd.kv.transport_mooncake"]._spare.values()))


def forged(endpoint, **details):
    return replace(endpoint, details=json.dumps({**json.loads(endpoint.details), **details}))


class Stuck:
    """A prefill side with a write to a receiver that has been paused."""

    def __init__(self, **options):
        self.p, self.receiver = Side("mooncake", fill=True, pages=PAGES, **options), Receiver("mooncake", PAGES)
        self.p.mover.connect(D, (self.receiver.endpoint,), TOKEN)
        self.receiver.expect(8, [0])
        self.p.mover.begin([send([0], [0], room=8, ticket=8)])
        self.p.reports.wait(TicketDone(8))
        self.receiver.expect(7, range(PAGES))
        self.receiver.pause()
        self.p.mover.begin([send(range(PAGES), range(PAGES))])
        until(lambda: self.p.transport._writes, "a write")


def test_the_engine_is_named_and_each_layers_address():
    side = Side("mooncake")
    details = json.loads(side.endpoint.details)
    host, port = details["at"].split(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536
    assert details["bases"] == [layer.data_ptr() for layer in side.pool.layers]
    side.close()


def test_an_rdma_device_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="--disaggregation-ib-device mlx5_99: there is no such RDMA device"):
        Side("mooncake", ib_device="mlx5_99")


@pytest.mark.parametrize("at", ["", "nowhere", "127.0.0.1:", ":7", "127.0.0.1:x"])
def test_an_engine_at_a_senseless_place_is_refused(at):
    side = Side("mooncake")
    side.mover.connect(D, (forged(side.endpoint, at=at),), TOKEN)
    side.mover.begin([send([1], [1])])
    side.reports.wait(failed(1, "no host:port"))
    side.close()


def test_the_engine_itself_refuses_memory_that_is_not_the_pools():
    pair = Pair("mooncake")
    size = LAYOUT.layers * 64 * LAYOUT.page_bytes
    beyond = [base + size for base in json.loads(pair.d.endpoint.details)["bases"]]
    pair.expect(1)
    pair.p.mover.connect(D, (forged(pair.d.endpoint, bases=beyond),), TOKEN)
    pair.p.mover.begin([send([1], [1])])
    pair.p.reports.wait(failed(1, "Mooncake: the transfer to 127.0.0.1:"))
    assert not any(layer.any() for layer in pair.d.pool.layers)
    pair.p.mover.connect(D, (pair.d.endpoint,), TOKEN)
    for room in range(8, 16):  # the library may fail a write or two that follow a refused one
        pair.expect(1, room=room)
        pair.p.mover.begin([send([1], [1], room=room, ticket=room)])
        pair.p.reports.wait(lambda report, room=room: report.ticket == room)
        if TicketDone(room) in pair.p.reports.all:
            break
    pair.d.reports.wait(Landed(room))
    assert pair.same([1], [1])
    pair.close()


def test_a_receiver_that_is_paused_holds_up_nobody_else_and_its_room_is_not_quiet():
    stuck, other = Stuck(stall=0.5), Side("mooncake", pages=PAGES)
    other.mover.admit(P, TOKEN)
    stuck.p.mover.connect("decode:2", (other.endpoint,), TOKEN)
    other.mover.order(ExpectRoom(9, P, ids(*range(PAGES))))
    stuck.p.mover.begin([send(range(PAGES), range(PAGES), room=9, ticket=9, peer="decode:2")])
    other.reports.wait(Landed(9))
    stuck.p.reports.wait(failed(1, "has taken nothing for 0.5 s"))
    stuck.p.mover.order(CancelRoom(7))
    for _ in range(20):
        stuck.p.do(lambda: None)
    assert stuck.p.reports.of(Quiet) == []
    stuck.receiver.resume()
    stuck.p.reports.wait(Quiet(7))
    stuck.p.close()
    other.close()
    stuck.receiver.end()


def test_a_paused_receiver_that_is_killed_ends_the_writes():
    stuck = Stuck()
    stuck.receiver.end()
    stuck.p.reports.wait(failed(1))
    stuck.p.mover.order(CancelRoom(7))
    stuck.p.mover.disconnect(D)
    stuck.p.reports.wait(Quiet(7))
    stuck.p.close()


def test_memory_is_given_back_also_after_a_write_that_outlived_its_mover():
    gc.collect()
    before = maps()
    pair = Pair("mooncake")
    pair.expect(1)
    pair.p.mover.begin([send([1], [1])])
    pair.d.reports.wait(Landed(7))
    pair.close()
    del pair
    gc.collect()
    assert maps() == before
    engines = spare()
    assert engines >= 2
    stuck = Stuck()
    stuck.p.close()
    assert maps() == before + 1  # it is still being read
    assert spare() == engines - 1
    stuck.receiver.end()
    until(lambda: spare() == engines, "the end of the last transfer")
    del stuck
    gc.collect()
    assert maps() == before


def test_a_receiver_that_starts_anew_is_reached_at_its_new_place():
    side = Side("mooncake", fill=True)
    for turn in range(2):
        receiver = Receiver("mooncake")
        side.mover.connect(D, (receiver.endpoint,), TOKEN)
        receiver.expect(turn, [1, 2])
        side.mover.begin([send([1, 2], [1, 2], room=turn, ticket=turn)])
        side.reports.wait(TicketDone(turn))
        receiver.end()
    side.close()
