"""Peer messages: what goes in comes out, and bytes that are none are refused whatever they are."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixpd.core.handoff import Arrived, Drained, NotNeeded, PeerAbort, PeerMessage, PrefillShare, Renew, Reserve
from radixpd.core.step import PromptScores, TokenLogprobs
from radixpd.runtime.peer_messages import Offer, read_body, read_frame, write_body


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def plain(value: Any) -> Any:
    """Arrays as (dtype, shape, bytes), so that messages can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    if hasattr(value, "__dataclass_fields__"):
        return type(value), tuple(plain(getattr(value, name)) for name in value.__dataclass_fields__)
    return value


SCORES = PromptScores(
    3,
    floats(-1, -float("inf")),
    ids(4, 5, 6, 7).reshape(2, 2),
    floats(-1, -2, -3, -4).reshape(2, 2),
    floats().reshape(2, 0),
)
MESSAGES: list[PeerMessage | Offer] = [
    Reserve(2**63 - 1, 40, 16, ids(5, 0, 2**31 - 1), 10.0, b"d" * 32, -(2**63)),
    Reserve(0, 0, 0, ids(), 0.0, b"\0" * 32, 2**63 - 1),
    Renew(3, 2.5),
    NotNeeded(4),
    Arrived(5, ids(9)),
    Arrived(5, ids(9, 8), (None, TokenLogprobs(-0.5, ids(1), floats(-0.5), floats())), (SCORES,), PrefillShare(16, 24, 2, 0.25, 1.5)),
    Drained(6),
    PeerAbort(7, "because", 499),
    Offer({"tcp": {"port": 1, "host": "x", "deep": [1, {"a": b"\x00"}]}}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_crosses_unchanged(message: PeerMessage | Offer) -> None:
    assert plain(read_body(write_body(message))) == plain(message)


def test_what_would_not_fit_is_made_to_fit() -> None:
    abort = read_body(write_body(PeerAbort(1, "x" * 10_000, 0)))
    assert isinstance(abort, PeerAbort)
    assert (len(abort.reason), abort.status) == (2000, 502)
    renew = read_body(write_body(Renew(1, float("inf"))))
    assert isinstance(renew, Renew)
    assert renew.seconds == 86_400.0


BAD: list[Any] = [
    [],
    ["Reserve"],
    ["Unknown", 1],
    ["Renew", -1, 2.0],
    ["Renew", 2**63, 2.0],
    ["Renew", 1, -2.0],
    ["Renew", 1, float("nan")],
    ["Renew", 1, float("inf")],
    ["Renew", "1", 2.0],
    ["Reserve", 1, 16, 0, b"\x01\x00\x00", 1.0, b"d" * 32],
    ["Reserve", 1, 16, 0, b"\xff\xff\xff\xff", 1.0, b"d" * 32],
    ["Reserve", 1, 16, 0, [1, 2], 1.0, b"d" * 32],
    ["Reserve", 1, 2**31, 0, b"", 1.0, b"d" * 32],
    ["Reserve", 1, 16, 0, b"", 1.0, b"d" * 31],
    ["PeerAbort", 1, "x" * 2001, 500],
    ["PeerAbort", 1, "x", 200],
    ["Arrived", 1, b"\x01\x00\x00\x00", [[-1.0, b"\x01\x00\x00\x00", b"", b""]], [], [0, 0, 0, 0.0, 0.0]],
    ["Arrived", 1, b"\x01\x00\x00\x00", [], [[0, b"\x00" * 8, b"\x00" * 12, b"\x00" * 12, b""]], [0, 0, 0, 0.0, 0.0]],
    ["Arrived", 1, b"\x01\x00\x00\x00", [], [[0, b"", b"\x00" * 12, b"\x00" * 12, b""]], [0, 0, 0, 0.0, 0.0]],
    ["Arrived", 1, b"\x01\x00\x00\x00", [], [], [-1, 0, 0, 0.0, 0.0]],
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_a_damaged_body_is_a_validation_error(fields: Any) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_body(msgspec.msgpack.encode(fields))


def test_a_pickle_is_neither_body_nor_frame() -> None:
    for data in (pickle.dumps(MESSAGES[2]), pickle.dumps(print, protocol=0), b"", b"\xc1"):
        with pytest.raises(msgspec.MsgspecError):
            read_body(data)
        with pytest.raises(msgspec.MsgspecError):
            read_frame(data)


@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_fail(data: bytes) -> None:
    for read in (read_body, read_frame):
        try:
            read(data)
        except msgspec.MsgspecError:
            continue


@given(st.sampled_from(MESSAGES), st.data())
def test_flipped_bits_never_do_more_than_fail_or_give_a_valid_message(message: PeerMessage | Offer, data: st.DataObject) -> None:
    body = bytearray(write_body(message))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        got = read_body(bytes(body))
    except msgspec.MsgspecError:
        return
    assert plain(read_body(write_body(got))) == plain(got)
