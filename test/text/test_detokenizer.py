"""Stop strings and patterns in an output, against references that see the whole text at once, for every way of cutting it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.text.detokenizer import Detokenizer, StopMatch
from radixpd.text.stop import StopHit, StopMatcher, StopRules


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


def make(pieces, *, stop=(), patterns=(), keep_stop=False, tail="", least=0):
    rules = StopRules(tuple(stop), tuple(patterns))
    return Detokenizer(PieceTokenizer(pieces, tail), rules=rules, keep_stop=keep_stop, least=least)


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
    assert StopMatcher(StopRules(("abcd", "bc"))).feed("xabcd") == StopHit("bc", 4, 2)
    assert StopMatcher(StopRules(("bc", "abc"))).feed("xabcd") == StopHit("abc", 4, 3)  # both end here: the longer one
    assert StopMatcher(StopRules(("cd",), ("b.",))).feed("xabcd") == StopHit("b.", 4, 2)
    assert StopMatcher(StopRules(("bc",), ("a.c",))).feed("xabcd") == StopHit("a.c", 4, 3)


def test_finish_shows_what_was_held_and_may_still_match():
    held = make(["xST"], stop=["STOP"])
    assert held.push([0]) == "x"
    assert held.finish() == "ST"
    late = make(["x"], stop=["\ufffd"], tail="\ufffd")
    assert late.push([0]) == "x"
    assert late.finish() == ""
    assert late.match == StopMatch("\ufffd", 1)


@pytest.mark.parametrize(("keep_stop", "text"), [(False, "ab"), (True, "ab42")])
def test_a_pattern_over_two_tokens(keep_stop, text):
    detokenizer = make(["a", "b4", "2c", "d"], patterns=[r"\d\d"], keep_stop=keep_stop)
    assert detokenizer.push([0, 1]) == "ab"
    detokenizer.push([2, 3])
    assert (detokenizer.text, detokenizer.match) == (text, StopMatch(r"\d\d", 3))


def test_a_place_is_known_with_the_next_character_or_the_end():
    detokenizer = make(["an ", "END", "ed ", "END", ".x"], patterns=[r"\bEND\b"])
    assert [detokenizer.push([id]) for id in range(4)] == ["an ", "", "ENDed ", ""]
    assert detokenizer.push([4]) == ""
    assert (detokenizer.text, detokenizer.match) == ("an ENDed ", StopMatch(r"\bEND\b", 5))
    at_the_end = make(["an END"], patterns=[r"\bEND\b"], keep_stop=True)
    assert at_the_end.push([0]) == "an "
    assert at_the_end.finish() == "END"
    assert at_the_end.match == StopMatch(r"\bEND\b", 1)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(letters, max_size=14),
    patterns=st.lists(st.sampled_from(["a+b", "bb?a", "(?:ab|ba)+", "[^a]a", r"a\b", "aaa"]), max_size=2),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(1, 4), max_size=14),
    keep_stop=st.booleans(),
)
def test_patterns_do_not_depend_on_the_cuts(pieces, patterns, stops, cuts, keep_stop):
    """The same characters as single tokens, in pieces, and in calls of any size: one text and one match."""
    whole = make(list("".join(pieces)), stop=stops, patterns=patterns, keep_stop=keep_stop)
    whole.push(range(len("".join(pieces))))
    whole.finish()
    parts = make(pieces, stop=stops, patterns=patterns, keep_stop=keep_stop)
    position = 0
    for cut in [*cuts, len(pieces)]:
        parts.push(range(position, min(position + cut, len(pieces))))
        position += cut
    parts.finish()
    assert parts.text == whole.text
    assert (parts.match and parts.match.stop) == (whole.match and whole.match.stop)


@pytest.mark.parametrize("rules", [{"stop": ["ST"]}, {"patterns": ["S[T]"]}])
def test_no_match_counts_before_the_least_number_of_tokens(rules):
    detokenizer = make(["aS", "Tb", "cS", "T", "d"], least=4, **rules)
    assert detokenizer.push(range(5)) == "aSTbc"
    assert detokenizer.match.kept == 4
    assert make(["ST"], least=2, **rules).push([0]) == "ST"
    held = make(["S", "T"], least=2, **rules)  # begins before, ends in time
    assert held.push([0, 1]) == ""
    assert held.match.kept == 2


@pytest.mark.parametrize("rules", [{"stop": ["abab"]}, {"patterns": ["abab"]}])
def test_a_match_may_begin_inside_one_that_came_too_early(rules):
    detokenizer = make("ababab", least=6, **rules)
    assert detokenizer.push(range(6)) == "ab"
    assert detokenizer.match.kept == 6


def test_an_early_match_at_the_end_of_the_text_does_not_count_either():
    early = make(["END"], patterns=[r"END\b"], least=2)
    assert early.push([0]) + early.finish() == "END"
    assert early.match is None
