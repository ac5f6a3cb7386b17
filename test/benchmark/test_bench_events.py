"""Server-sent events, however the network cuts them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from benchmark.events import EventSplitter

STREAM = b'data: {"a": 1}\n\n: a comment\n\nevent: x\ndata: one\ndata: two\n\ndata:{"b": "\\n\\n"}\r\n\r\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": 1}', b"one\ntwo", b'{"b": "\\n\\n"}', b"[DONE]"]


def split(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [payload for piece in pieces for payload in splitter.feed(piece)]


def test_one_piece() -> None:
    assert split([STREAM]) == PAYLOADS


def test_byte_by_byte() -> None:
    assert split([bytes([byte]) for byte in STREAM]) == PAYLOADS


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert split([STREAM[start:stop] for start, stop in pairwise(edges)]) == PAYLOADS


def test_an_event_is_out_only_when_it_is_complete() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: x\n") == []
    assert splitter.feed(b"\n") == [b"x"]
