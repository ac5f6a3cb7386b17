"""Settings of prefill and decode servers that cannot work are refused at start, each with its flag and what is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from config.test_resolve import SETTINGS, decide

from radixpd.config import disaggregation
from radixpd.config.disaggregation import TRANSFER_DTYPES, check_disaggregation, disaggregation_notes, transfer_dtypes
from radixpd.config.settings import CacheSettings, DisaggregationSettings
from radixpd.errors import BadRequest, ConfigError
from radixpd.kv.codec_choice import NAMES, listed
from radixpd.runtime.peer_trust import contact


def of(mode: str = "decode", **fields: Any) -> DisaggregationSettings:
    return DisaggregationSettings(disaggregation_mode=mode, **{f"disaggregation_{name}": value for name, value in fields.items()})


def fault(settings: DisaggregationSettings) -> str:
    with pytest.raises(ConfigError) as caught:
        check_disaggregation(settings)
    return str(caught.value)


SOME: dict[str, Any] = {
    "bootstrap_port": 1, "transfer_backend": "tcp", "ib_device": "mlx5_0", "advertise_host": "a", "secret_file": "s", "peers": ("a",),
    "link_gbps": 1.0, "transfer_dtype": "int8", "local_prefill_tokens": 0, "fallback": "fail", "disable_overlap": True,
    "bootstrap_timeout": 1.0, "reserve_timeout": 1.0, "transfer_timeout": 1.0,
}  # fmt: skip


def test_a_server_without_a_pair_has_no_flags_of_one() -> None:
    check_disaggregation(DisaggregationSettings())
    assert {f"disaggregation_{name}" for name in (*SOME, "mode")} == {*DisaggregationSettings.__dataclass_fields__}
    for name, value in SOME.items():
        text = fault(of("null", **{name: value}))
        assert text.startswith(f"--disaggregation-{name.replace('_', '-')} needs --disaggregation-mode")
    for mode in ("prefill", "decode"):
        check_disaggregation(of(mode, **{**SOME, "transfer_backend": "mooncake"}))


def test_flags_of_the_other_role_are_told() -> None:
    assert disaggregation_notes(DisaggregationSettings()) == disaggregation_notes(of("prefill")) == disaggregation_notes(of("decode")) == ()
    (note,) = disaggregation_notes(of("prefill", peers=("a",), fallback="fail", bootstrap_port=1, link_gbps=1.0))
    assert note.startswith("--disaggregation-peers, --disaggregation-fallback: no effect on a prefill server")
    (note,) = disaggregation_notes(of("decode", peers=("a",), bootstrap_timeout=1.0))
    assert note.startswith("--disaggregation-bootstrap-timeout: no effect on a decode server")
    assert {name for names in disaggregation.IDLE.values() for name in names} <= {*DisaggregationSettings.__dataclass_fields__}


@pytest.mark.parametrize("value", [*TRANSFER_DTYPES, "auto:int8", "auto:int8,int4", "auto:none, fp8_e4m3", "auto:none,fp8_e4m3,int8,int4"])
def test_transfer_dtypes(value: str) -> None:
    check_disaggregation(of(transfer_dtype=value))
    assert listed(value) == transfer_dtypes(value)
    assert NAMES == TRANSFER_DTYPES


@pytest.mark.parametrize(
    "value", ["", "auto", "auto:", "auto:int8,", "int8,int4", "fp8", "auto:int8,int8", "auto:auto:int8", "INT8", " int8"]
)
def test_what_is_no_transfer_dtype(value: str) -> None:
    assert fault(of(transfer_dtype=value)).startswith(f"--disaggregation-transfer-dtype {value}: ")
    with pytest.raises(ConfigError):
        listed(value)


@pytest.mark.parametrize(
    ("entry", "host", "port"),
    [
        ("node-1.example", "node-1.example", 5), ("Node:8998", "node", 8998), ("10.0.0.1", "10.0.0.1", 1),
        ("10.0.0.1:65535", "10.0.0.1", 65535), ("::1", "::1", 7), ("[::1]", "::1", 7), ("[::1]:8998", "::1", 8998),
        ("fd00::A", "fd00::a", 1),
    ],
)  # fmt: skip
def test_peers_are_written_as_they_are_compared(entry: str, host: str, port: int) -> None:
    check_disaggregation(of(peers=("other", entry)))
    assert contact(host, port, allowed=(entry,), secured=True)
    with pytest.raises(BadRequest, match="--disaggregation-peers"):
        contact("elsewhere", port, allowed=(entry,), secured=True)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("", "host or host:port"), ("a b", "host or host:port"), ("http://a", "the port must be"), ("http://a:1", "host or host:port"),
        (":8998", "host or host:port"), ("a:", "the port must be"), ("a:0", "the port must be"), ("a:65536", "the port must be"),
        ("a:08998", "the port must be"), ("a:x", "the port must be"), ("a:１", "the port must be"), ("[a]:1", "host or host:port"),
        ("[::1", "host or host:port"), ("::1]", "host or host:port"), ("0:0:0:0:0:0:0:1", "write this address as ::1"),
        ("[0::1]:5", "write this address as ::1"), ("1:2:3:4:5:6:7:8:9", "written [1:2:3:4:5:6:7:8]:9"), ("-a", "host or host:port"),
        ("a,b", "host or host:port"), ("a" * 254, "host or host:port"),
    ],
)  # fmt: skip
def test_peers_that_no_request_could_name(entry: str, words: str) -> None:
    text = fault(of(peers=("fine", entry)))
    assert text.startswith(f"--disaggregation-peers {entry}: ")
    assert words in text


def test_the_address_that_others_are_told() -> None:
    for host in ("node-1", "10.0.0.1", "::1", "Node.Example"):
        check_disaggregation(of(advertise_host=host))
    for host in ("", "0.0.0.0", "::", "*", "a:1", "http://a", "[::1]", "a b"):
        assert fault(of(advertise_host=host)).startswith(f"--disaggregation-advertise-host {host}: ")


def test_rdma_devices_are_mooncakes() -> None:
    check_disaggregation(of(transfer_backend="mooncake", ib_device="mlx5_0,mlx5_1"))
    for backend in ("auto", "shm", "tcp", "nixl"):
        assert fault(of(transfer_backend=backend, ib_device="mlx5_0")).endswith(f"mooncake, not {backend}")
    for device in ("", ",", "mlx5_0,", "mlx5 0"):
        assert fault(of(transfer_backend="mooncake", ib_device=device)).startswith(f"--disaggregation-ib-device {device}: ")


def test_the_rest_that_decode_computes_is_a_page_by_default() -> None:
    def tokens(settings: DisaggregationSettings, page: int) -> int | None:
        final = decide(replace(SETTINGS, cache=CacheSettings(page_size=page), disaggregation=settings)).settings
        return final.disaggregation.disaggregation_local_prefill_tokens

    assert (tokens(of(), 16), tokens(of("prefill"), 4), tokens(of("null"), 4)) == (16, 4, None)
    assert (tokens(of(local_prefill_tokens=0), 16), tokens(of(local_prefill_tokens=9), 1)) == (0, 9)


def test_resolving_checks_and_tells() -> None:
    with pytest.raises(ConfigError, match="--disaggregation-link-gbps needs --disaggregation-mode"):
        decide(replace(SETTINGS, disaggregation=of("null", link_gbps=1.0)))
    assert any(
        "no effect on a prefill server" in note for note in decide(replace(SETTINGS, disaggregation=of("prefill", peers=("a",)))).notes
    )
