"""Which room a request names, role by role, and that admission and the tokenizer manager hand it on."""

from __future__ import annotations

from typing import Any

import pytest

from radixpd.config.settings import DisaggregationSettings
from radixpd.core.handoff import Room
from radixpd.errors import BadRequest
from radixpd.runtime.admission import Limits, admit
from radixpd.runtime.rooms import MAX_HOST, MAX_ROOM, PORT, DecodeRooms, NoRooms, PrefillRooms, RoomRule, room_rule

HOST = "127.0.0.1"


def room(rule: RoomRule, **fields: Any) -> Room | None:
    limits = Limits(vocab_size=100, context_length=64, pool_tokens=1000, max_running=8, rooms=rule)
    return admit([1], {}, {f"bootstrap_{name}": value for name, value in fields.items()}, limits=limits, names={}).room


def refused(rule: RoomRule, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        room(rule, **fields)
    assert caught.value.param is not None
    assert caught.value.param in str(caught.value)
    return caught.value


def test_one_rule_for_each_role() -> None:
    assert room_rule("null") == NoRooms()
    assert room_rule("prefill", allowed=("a",), secured=True) == PrefillRooms()
    assert room_rule("decode", allowed=("a",), secured=True) == DecodeRooms(("a",), secured=True)
    assert [room_rule(role).read for role in ("null", "prefill", "decode")] == [False, True, True]
    with pytest.raises(KeyError):
        room_rule("both")


@pytest.mark.parametrize("rule", [NoRooms(), PrefillRooms(), DecodeRooms()])
def test_without_fields_a_request_is_served_whole(rule: RoomRule) -> None:
    assert room(rule) is None
    assert room(rule, host=None, port=None, room=None) is None


@pytest.mark.parametrize("fields", [{"host": HOST}, {"port": 1}, {"room": 0}])
def test_a_server_that_does_not_split_refuses_each_field(fields: dict[str, Any]) -> None:
    error = refused(NoRooms(), **fields)
    assert error.param == f"bootstrap_{next(iter(fields))}"
    assert "--disaggregation-mode" in str(error)
    assert error.code == "unsupported_field"


def test_prefill_looks_at_the_number_alone() -> None:
    assert room(PrefillRooms(), room=0) == Room(0, "")
    assert room(PrefillRooms(), host="far.example", port=1, room=7) == Room(7, "")
    assert refused(PrefillRooms(), host=HOST).param == "bootstrap_room"
    assert refused(PrefillRooms(), port=1).param == "bootstrap_room"


def test_decode_needs_number_and_host() -> None:
    assert room(DecodeRooms(), host=HOST, room=5) == Room(5, f"{HOST}:{PORT}") == Room(5, f"{HOST}:8998")
    assert room(DecodeRooms(), host="LocalHost", port=1, room=MAX_ROOM) == Room(MAX_ROOM, "localhost:1")
    assert room(DecodeRooms(), host="::1", port=2, room=1) == Room(1, "[::1]:2")
    assert refused(DecodeRooms(), host=HOST).param == "bootstrap_room"
    assert refused(DecodeRooms(), port=1).param == "bootstrap_room"
    assert refused(DecodeRooms(), host=HOST, port=1).param == "bootstrap_room"
    assert refused(DecodeRooms(), room=1).param == "bootstrap_host"
    assert refused(DecodeRooms(), port=1, room=1).param == "bootstrap_host"


def test_decode_calls_only_whom_it_may() -> None:
    assert "loopback" in str(refused(DecodeRooms(), host="10.0.0.1", room=1))
    assert room(DecodeRooms(secured=True), host="10.0.0.1", room=1) == Room(1, "10.0.0.1:8998")
    only = DecodeRooms(("10.0.0.1", "node:9000"), secured=True)
    assert room(only, host="10.0.0.1", port=5, room=1) == Room(1, "10.0.0.1:5")
    assert room(only, host="node", port=9000, room=1) == Room(1, "node:9000")
    for host, port in (("10.0.0.2", 9000), ("node", 9001), ("node", None)):
        error = refused(only, host=host, port=port, room=1)
        assert error.param == "bootstrap_host"
        assert "--disaggregation-peers" in str(error)


@pytest.mark.parametrize("rule", [PrefillRooms(), DecodeRooms()])
def test_ranges_are_closed(rule: RoomRule) -> None:
    for number in (-1, MAX_ROOM + 1, 10**40):
        error = refused(rule, host=HOST, port=1, room=number)
        assert (error.param, "between 0 and 9223372036854775807" in str(error)) == ("bootstrap_room", True)
    for port in (-1, 0, 65_536):
        error = refused(rule, host=HOST, port=port, room=1)
        assert (error.param, "between 1 and 65535" in str(error)) == ("bootstrap_port", True)
    for port in (1, 65_535):
        assert room(rule, host=HOST, port=port, room=1) is not None
    for host in ("", "a" * (MAX_HOST + 1)):
        error = refused(rule, host=host, port=1, room=1)
        assert (error.param, f"between 1 and {MAX_HOST} characters" in str(error)) == ("bootstrap_host", True)
    assert refused(rule, host=5, room=1).param == "bootstrap_host"
    assert refused(rule, host=HOST, port="8998", room=1).param == "bootstrap_port"
    assert refused(rule, host=HOST, room=True).param == "bootstrap_room"


@pytest.mark.parametrize("host", ["a b", "http://a", "a/b", "127.0.0.1:1", "\ud800", "a\x00", "-a", "[::1", "1:2:3"])
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    assert refused(DecodeRooms(secured=True), host=host, room=1).param == "bootstrap_host"


def test_the_port_that_a_request_need_not_say_is_the_one_that_prefill_listens_on() -> None:
    assert DisaggregationSettings().disaggregation_bootstrap_port == PORT
