"""Stop strings against a reference that sees the whole text at once, for every way of cutting it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.text.detokenizer import Detokenizer, StopMatch, StopMatcher


class PieceStream:
    """Token i of a script stands for its i-th piece."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, id):
        return self.pieces[id]

    def flush(self):
        return ""


class PieceTokenizer:
    """Only what the detokenizer uses."""

    def __init__(self, pieces, tail=""):
        self.pieces, self.tail = pieces, tail

    def stream(self, context=(), *, skip_special=True):
        stream = PieceStream(self.pieces)
        stream.flush = lambda: self.tail
        return stream


def make(pieces, *, stop=(), keep_stop=False, tail=""):
    return Detokenizer(PieceTokenizer(pieces, tail), stop=tuple(stop), keep_stop=keep_stop)


def reference(pieces, stops, keep_stop):
    """(text, match) by looking at the whole text."""
    text = "".join(pieces)
    hits = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not hits:
        return text, None
    end, _, stop = min(hits)
    covered, kept = 0, 0
    while covered < end:
        covered += len(pieces[kept])
        kept += 1
    return text[: end if keep_stop else end - len(stop)], StopMatch(stop, kept)


def longest_partial(text, stops):
    return max((size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0)


letters = st.text("ab", max_size=3)


@settings(max_examples=600, deadline=None)
@given(pieces=st.lists(letters, max_size=14), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), data=st.data())
def test_equals_the_reference_for_every_split(pieces, stops, data):
    keep_stop = data.draw(st.booleans())
    detokenizer = make(pieces, stop=stops, keep_stop=keep_stop)
    shown, position = "", 0
    while position < len(pieces):
        size = data.draw(st.integers(1, 4))
        shown += detokenizer.push(range(position, min(position + size, len(pieces))))
        position += size
        if detokenizer.match is None:
            so_far = "".join(pieces[:position])
            # Only a real beginning of a stop string is held back, and all of it.
            assert shown == so_far[: len(so_far) - longest_partial(so_far, stops)]
    shown += detokenizer.finish()
    assert (shown, detokenizer.match) == reference(pieces, stops, keep_stop)
    assert detokenizer.text == shown


def test_a_stop_string_that_never_occurs_lets_text_flow():
    detokenizer = make(["He", "llo", "!"], stop=["Z"])
    assert [detokenizer.push([id]) for id in range(3)] == ["He", "llo", "!"]


@pytest.mark.parametrize(("keep_stop", "text"), [(False, "x"), (True, "xSTOP")])
def test_a_stop_string_over_two_tokens(keep_stop, text):
    detokenizer = make(["x", "ST", "OPy", "z"], stop=["STOP"], keep_stop=keep_stop)
    assert detokenizer.push([0, 1]) == "x"
    detokenizer.push([2, 3])
    assert detokenizer.text == text
    assert detokenizer.match == StopMatch("STOP", 3)
    assert detokenizer.push([3]) == ""
    assert detokenizer.finish() == ""


def test_the_match_that_ends_first_wins():
    assert StopMatcher(("abcd", "bc")).feed("xabcd") == (4, "bc")
    assert StopMatcher(("bc", "abc")).feed("xabcd") == (4, "abc")  # both end here: the longer one


def test_finish_shows_what_was_held_and_may_still_match():
    held = make(["xST"], stop=["STOP"])
    assert held.push([0]) == "x"
    assert held.finish() == "ST"
    late = make(["x"], stop=["\ufffd"], tail="\ufffd")
    assert late.push([0]) == "x"
    assert late.finish() == ""
    assert late.match == StopMatch("\ufffd", 1)
