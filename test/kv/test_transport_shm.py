"""The shm transport: who gets the pool's descriptor, what is mapped and for how long; and how a way to a peer is chosen."""

from __future__ import annotations

import gc
import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from kv.moving import LAYOUT, TOKEN, D, P, Pair, Side, send, until

from radixpd.core.handoff import Landed, PeerLost
from radixpd.errors import ConfigError, PeerFailed
from radixpd.kv.transport import Endpoint, boot_id, choose, create

TCP = Endpoint("tcp", "127.0.0.1:1", 64, LAYOUT.fingerprint)


def maps():
    """Mappings of KV pools in this process."""
    return Path("/proc/self/maps").read_text().count("radixpd-kv")


def test_the_socket_is_private_and_goes_with_the_mover():
    side = Side("shm")
    path = Path(side.endpoint.address)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    side.close()
    assert not path.parent.exists()


def test_a_folder_of_ones_own_is_used_and_left(tmp_path):
    side = Side("shm", folder=str(tmp_path))
    assert Path(side.endpoint.address).parent == tmp_path
    side.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="cannot be made"):
        Side("shm", folder=str(tmp_path / "missing"))


def test_strangers_get_no_descriptor():
    side = Side("shm")
    side.mover.admit(P, TOKEN)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(side.endpoint.address)
        sock.recv(24)
        sock.sendall(b"x" * 48)
        data, fds, _, _ = socket.recv_fds(sock, 64, 4)
    assert (data, fds) == (b"", [])
    assert side.mover.counters.wrong_tokens == 1
    side.close()


def test_descriptors_that_a_stranger_sends_are_closed():
    side = Side("shm")
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(side.endpoint.address)
        sock.recv(24)
        socket.send_fds(sock, [b"x" * 48], [write])
        os.close(write)
        assert sock.recv(1) == b""
    assert os.read(read, 1) == b""  # the last writer is gone
    os.close(read)
    side.close()


def test_mapped_memory_is_bounded_over_incarnations_and_gone_in_the_end():
    gc.collect()
    before, descriptors = maps(), len(os.listdir("/proc/self/fd"))
    pair = Pair("shm")
    for turn in range(10):
        pair.expect(1, room=turn)
        pair.p.mover.begin([send([1], [1], ticket=turn, room=turn)])
        pair.d.reports.wait(Landed(turn))
        assert maps() == before + 3  # two pools, and one seen by the other
        pair.d.close()
        until(lambda p=pair.p: p.transport.mapped == 0, "unmapping")
        pair.d = Side("shm")
        pair.d.mover.admit(P, TOKEN)
        pair.p.mover.connect(D, (pair.d.endpoint,), TOKEN)
    pair.close()
    del pair
    gc.collect()
    assert maps() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_pool_of_another_size_is_not_mapped():
    decode, prefill = Side("shm"), Side("shm", fill=True, connect=0.3)
    decode.mover.admit(P, TOKEN)
    prefill.mover.connect(D, (replace(decode.endpoint, pages=65),), TOKEN)
    prefill.mover.begin([send([1], [1])])
    prefill.reports.wait(lambda report: "pool has" in report.error)
    assert prefill.transport.mapped == 0
    prefill.close()
    decode.close()


def test_a_connection_that_ends_without_a_word_is_no_proof():
    """The writer's process lives, so it may still have the pool mapped."""
    pair = Pair("shm")
    pair.expect(1)
    pair.p.mover.begin([send([1], [1])])
    pair.d.reports.wait(Landed(7))
    pair.d.do(lambda: pair.d.transport._reception.dismiss(P, "cut"))
    until(lambda: pair.d.transport._reception.of(P), "another connection")
    assert pair.d.reports.of(PeerLost) == []
    pair.p.mover.disconnect(D)
    pair.d.reports.wait(PeerLost(P, "it has closed its mapping of the pool"))
    pair.close()


def test_another_host_is_refused_by_name():
    side = Side("shm")
    side.mover.connect(D, (replace(side.endpoint, boot_id="another"),), TOKEN)
    side.mover.begin([send([1], [1])])
    side.reports.wait(lambda report: "only on one host" in report.error)
    side.close()


def test_shared_memory_is_chosen_on_one_host_and_tcp_otherwise(tmp_path):
    path = tmp_path / "kv.sock"
    shm = Endpoint("shm", str(path), 64, LAYOUT.fingerprint, boot_id())
    assert choose((TCP, shm), ("shm", "tcp")) is TCP  # nobody listens there
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert choose((TCP, shm), ("tcp", "shm")) is shm
        assert choose((TCP, shm), ("tcp",)) is TCP
        assert choose((TCP, replace(shm, boot_id="another")), ("tcp", "shm")) is TCP
        with pytest.raises(PeerFailed, match="the peer offers shm, this server has tcp"):
            choose((shm,), ("tcp",))


def test_an_unknown_transport_names_the_flag():
    with pytest.raises(ConfigError, match="--disaggregation-transfer-backend is one of shm, tcp"):
        create("pigeon", None)
