"""The nixl transport with the library itself: over TCP alone too, with peers that are paused, gone or not what they say they are."""

from __future__ import annotations

import base64
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from kv.moving import LAYOUT, TOKEN, D, P, Pair, Receiver, Side, ids, need, send, until

from radixpd.core.handoff import CancelRoom, ExpectRoom, Landed, Quiet, TicketDone
from radixpd.kv.mover import LOOK

PAGES = 2048  # 16 MiB in all: more than the sockets between two processes can hold


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    need("nixl")
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def over_tcp(monkeypatch):
    """No shared memory between processes of one host: as on two."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def failed(ticket, words=""):
    return lambda report: isinstance(report, TicketDone) and report.ticket == ticket and bool(report.error) and words in report.error


def maps():
    """Mappings of KV pools in this process."""
    return Path("/proc/self/maps").read_text().count("radixpd-kv")


def forged(endpoint, **details):
    return replace(endpoint, details=json.dumps({**json.loads(endpoint.details), **details}))


class Stuck:
    """A prefill side with a write to a receiver that has been paused."""

    def __init__(self, **options):
        self.p, self.receiver = Side("nixl", fill=True, pages=PAGES, **options), Receiver("nixl", PAGES)
        self.p.mover.connect(D, (self.receiver.endpoint,), TOKEN)
        self.receiver.expect(8, [0])
        self.p.mover.begin([send([0], [0], room=8, ticket=8)])
        self.p.reports.wait(TicketDone(8))
        self.receiver.expect(7, range(PAGES))
        self.receiver.pause()
        self.p.mover.begin([send(range(PAGES), range(PAGES))])
        until(lambda: self.p.transport._writes, "a write")


@pytest.mark.usefixtures("over_tcp")
def test_pages_come_over_tcp_bit_for_bit():
    pair = Pair("nixl", pages=PAGES)
    source, target = list(range(PAGES)), list(range(PAGES - 1, -1, -1))
    pair.expect(*target)
    pair.p.mover.begin([send(source, target)])
    pair.d.reports.wait(Landed(7))
    assert pair.same(source, target)
    pair.close()


def test_a_mover_is_asked_often_only_while_something_is_awaited():
    """The library wakes nobody up; a server at rest must not pay for that."""
    pair = Pair("nixl")

    def nap(side):
        return side.do(side.mover._timeout)

    until(lambda: nap(pair.d) == LOOK, "rest")
    pair.expect(1)
    until(lambda: nap(pair.d) < LOOK / 10, "haste")
    pair.p.mover.begin([send([1], [1])])
    pair.d.reports.wait(Landed(7))
    until(lambda: nap(pair.d) == LOOK, "rest again")
    until(lambda: nap(pair.p) == LOOK, "rest of the sender")
    pair.close()


def test_a_loopback_server_listens_on_loopback_alone(monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before = set(psutil.Process().net_connections(kind="tcp"))
    side = Side("nixl")
    new = {each.laddr.ip for each in set(psutil.Process().net_connections(kind="tcp")) - before if each.status == psutil.CONN_LISTEN}
    assert new == {"127.0.0.1"}
    side.close()


@pytest.mark.parametrize(
    ("at", "words"),
    [("%", "makes no sense"), ("", "0 bytes"), ("A" * (1 << 21), "bytes of metadata"), (base64.b64encode(b"x" * 99).decode(), "NIXL: ")],
)
def test_an_agent_that_makes_no_sense_is_refused(at, words):
    pair = Pair("nixl")
    pair.expect(1)
    pair.p.mover.connect(D, (forged(pair.d.endpoint, at=at),), TOKEN)
    pair.p.mover.begin([send([1], [1])])
    pair.p.reports.wait(failed(1, words))
    pair.p.mover.connect(D, (pair.d.endpoint,), TOKEN)
    pair.expect(1, room=8)
    pair.p.mover.begin([send([1], [1], room=8, ticket=2)])
    pair.d.reports.wait(Landed(8))
    pair.close()


def test_the_agent_itself_refuses_memory_that_is_not_the_pools():
    pair = Pair("nixl")
    size = LAYOUT.layers * 64 * LAYOUT.page_bytes
    beyond = [base + size for base in json.loads(pair.d.endpoint.details)["bases"]]
    pair.p.mover.connect(D, (forged(pair.d.endpoint, bases=beyond),), TOKEN)
    pair.p.mover.begin([send([1], [1])])
    pair.p.reports.wait(failed(1, "NIXL: "))
    assert not any(layer.any() for layer in pair.d.pool.layers)
    pair.close()


@pytest.mark.usefixtures("over_tcp")
def test_a_receiver_that_is_paused_holds_up_nobody_else_and_its_room_is_not_quiet():
    stuck, other = Stuck(stall=0.5), Side("nixl", pages=PAGES)
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


@pytest.mark.usefixtures("over_tcp")
def test_a_paused_receiver_that_is_killed_ends_the_writes():
    stuck = Stuck()
    stuck.receiver.end()
    stuck.p.reports.wait(failed(1))
    stuck.p.mover.order(CancelRoom(7))
    stuck.p.mover.disconnect(D)
    stuck.p.reports.wait(Quiet(7))
    stuck.p.close()


@pytest.mark.usefixtures("over_tcp")
def test_what_is_under_way_to_a_peer_that_is_parted_with_is_broken_off():
    stuck = Stuck()
    stuck.p.mover.disconnect(D)
    stuck.p.reports.wait(failed(1, "not served"))
    stuck.p.mover.order(CancelRoom(7))
    stuck.p.reports.wait(Quiet(7))
    assert not stuck.p.do(lambda: stuck.p.transport._wire._flying)
    stuck.p.close()
    stuck.receiver.end()


class Faulty:
    """An agent whose next transfer fails as after a network that was away: it knows the peer, and has no connection."""

    def __init__(self, agent):
        self._agent = agent
        self.broken = True

    def __getattr__(self, name):
        return getattr(self._agent, name)

    def transfer(self, handle):
        if self.broken:
            raise sys.modules["radixpd.kv.transport_nixl"].NIXL.nixlBind.nixlRemoteDisconnectError("away")
        return self._agent.transfer(handle)

    def remove_remote_agent(self, name):
        self.broken = False
        self._agent.remove_remote_agent(name)


def test_a_connection_that_has_failed_is_made_anew():
    pair = Pair("nixl")
    wire = pair.p.transport._wire
    wire._agent = Faulty(wire._agent)
    pair.expect(1)
    pair.p.mover.begin([send([1], [1])])
    pair.p.reports.wait(failed(1, "NIXL: away"))
    until(lambda: not wire._flying)
    pair.expect(1, room=8)
    pair.p.mover.begin([send([1], [1], room=8, ticket=2)])
    pair.d.reports.wait(Landed(8))
    assert pair.same([1], [1])
    pair.close()


def test_memory_and_descriptors_are_given_back():
    def turn():
        pair = Pair("nixl")
        pair.expect(1)
        pair.p.mover.begin([send([1], [1])])
        pair.d.reports.wait(Landed(7))
        pair.close()

    turn()  # what the library opens once
    gc.collect()
    before, descriptors = maps(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        turn()
    gc.collect()
    assert maps() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_receiver_that_starts_anew_is_reached_at_its_new_place():
    side = Side("nixl", fill=True)
    for turn in range(2):
        receiver = Receiver("nixl")
        side.mover.connect(D, (receiver.endpoint,), TOKEN)
        receiver.expect(turn, [1, 2])
        side.mover.begin([send([1, 2], [1, 2], room=turn, ticket=turn)])
        side.reports.wait(TicketDone(turn))
        receiver.end()
    side.close()
