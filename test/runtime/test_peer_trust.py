"""Trust between prefill and decode servers: the secret's file, the keys, the addresses."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from radixpd.config.secret import Secret
from radixpd.errors import BadRequest, ConfigError
from radixpd.runtime.peer_trust import (
    VARIABLE,
    contact,
    is_loopback,
    load_secret,
    main_key,
    proof,
    rooms_key,
    same,
    seal,
    session_keys,
)

WORD = "sixteen letters!"


def written(path: Path, data: bytes, mode: int = 0o600) -> str:
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440])
def test_the_secret_comes_from_its_file_without_the_line_end(tmp_path: Path, end: bytes, mode: int) -> None:
    found = load_secret(written(tmp_path / "secret", WORD.encode() + end, mode), {VARIABLE: "another one, long enough"})
    assert found == Secret(WORD)
    assert WORD not in f"{found} {found!r}"


def test_the_secret_comes_from_the_environment_or_there_is_none() -> None:
    assert load_secret("", {VARIABLE: WORD}) == Secret(WORD)
    assert load_secret("", {}) is None


def test_a_secret_may_be_any_bytes(tmp_path: Path) -> None:
    data = bytes(range(200, 232))
    found = load_secret(written(tmp_path / "secret", data), {})
    assert found is not None
    assert found.reveal().encode("utf-8", "surrogateescape") == data
    assert len(main_key(found)) == 32


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o601])
def test_a_file_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=rf"mode {mode:03o}.*chmod 600"):
        load_secret(written(tmp_path / "secret", WORD.encode(), mode), {})


def test_a_secret_that_cannot_be_one_is_refused_without_showing_it(tmp_path: Path) -> None:
    short = "fifteen letters"
    for path, environment in ((written(tmp_path / "short", short.encode()), {}), ("", {VARIABLE: short}), ("", {VARIABLE: ""})):
        with pytest.raises(ConfigError, match="at least 16 are needed") as caught:
            load_secret(path, environment)
        assert short not in str(caught.value)
    with pytest.raises(ConfigError, match="more than 4096"):
        load_secret(written(tmp_path / "long", b"x" * 5000), {})
    with pytest.raises(ConfigError, match="No such file"):
        load_secret(str(tmp_path / "missing"), {})
    with pytest.raises(ConfigError, match="not a regular file"):
        load_secret(str(tmp_path), {})
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_secret(str(tmp_path / "fifo"), {})


def test_every_key_and_every_proof_depends_on_everything_it_speaks_of() -> None:
    keys = [main_key(None), main_key(Secret(WORD)), main_key(Secret(WORD + "x"))]
    made = []
    for key, (one, other) in itertools.product(keys, [(b"a", b"bc"), (b"ab", b"c"), (b"bc", b"a")]):
        session = session_keys(key, one, other, calling=True)
        made += [
            proof(key, "prefill", one, other),
            proof(key, "decode", one, other),
            session.own,
            session.theirs,
            rooms_key(key, one, other),
        ]
        for numbers, body in itertools.product([(1, 0, 0), (0, 1, 0), (0, 0, 1)], [b"", b"x"]):
            made.append(seal(key, one, other, numbers, body))
    assert len({*made}) == len(made)


def test_both_ends_derive_the_same_session() -> None:
    key = main_key(Secret(WORD))
    caller, door = session_keys(key, b"one", b"two", calling=True), session_keys(key, b"one", b"two", calling=False)
    assert (caller.session, caller.own, caller.theirs) == (door.session, door.theirs, door.own)
    assert len(caller.session) == 16
    assert caller.own.hex() not in repr(caller)
    assert repr(caller.own) not in repr(caller)
    assert same(caller.own, door.theirs)
    assert not same(caller.own, door.own)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "::ffff:10.0.0.1", "0.0.0.0", "::", "localhost", "", "2130706433", "127.1", "fe80::1%lo"])
def test_not_loopback(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize(
    ("host", "port", "peer"),
    [
        ("127.0.0.1", 80, "127.0.0.1:80"),
        ("LocalHost", 80, "localhost:80"),
        ("::1", 80, "[::1]:80"),
        ("[0:0::1]", 80, "[::1]:80"),
    ],
)
def test_a_loopback_peer_may_be_called_without_a_secret(host: str, port: int, peer: str) -> None:
    assert contact(host, port, allowed=(), secured=False) == peer


@pytest.mark.parametrize("host", ["10.0.0.1", "prefill-0.local", "0.0.0.0", "localhost.example.org", "127.0.0.1.example.org"])
def test_other_peers_need_a_secret(host: str) -> None:
    assert contact(host, 80, allowed=(), secured=True) == f"{host}:80"
    with pytest.raises(BadRequest, match="--disaggregation-secret-file") as caught:
        contact(host, 80, allowed=(), secured=False)
    assert caught.value.param == "bootstrap_host"


def test_a_list_names_hosts_or_single_ports() -> None:
    allowed = ["10.0.0.1", "Prefill-0:81", "[fd00::1]:82", "fd00::2"]
    for host, port in (("10.0.0.1", 1), ("10.0.0.1", 2), ("prefill-0", 81), ("fd00::1", 82), ("fd00::2", 9)):
        contact(host, port, allowed=allowed, secured=True)
    for host, port in (("10.0.0.2", 1), ("prefill-0", 82), ("fd00::1", 83), ("10.0.0.11", 1)):
        with pytest.raises(BadRequest, match="is none of --disaggregation-peers"):
            contact(host, port, allowed=allowed, secured=True)


@pytest.mark.parametrize("host", ["", " ", "a b", "a;tcp://b", "*", "a/b", "a:b", "[::1", "::1]", "x" * 300, "-a", "ä", "a\n", "a\x00"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(BadRequest) as caught:
        contact(host, 80, allowed=(), secured=True)
    assert caught.value.param == "bootstrap_host"


@pytest.mark.parametrize("port", [0, -1, 65_536])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(BadRequest, match="bootstrap_port"):
        contact("127.0.0.1", port, allowed=(), secured=True)
