"""Stop patterns against Python's own `re` on the whole text; bounded work and memory whatever the pattern; refusals that say why."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radixpd.text.stop_pattern import MAX_SPAN, MAX_STATES, PatternSearch, StopPattern

ATOMS = st.sampled_from(
    ["a", "b", "c", "A", ".", "[ab]", "[^a]", r"\w", r"\d", r"\n", "1", r"[\d\n-]", r"\b", r"\B", "^", "(?m:^)", "(?m:$)"]
)


def grown(inner):
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}?", "{2,}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
        inner.map(lambda p: f"(?i:{p})"),
        inner.map(lambda p: f"(?s:{p})"),
        inner.map(lambda p: f"({p})"),
    )


PATTERNS = st.recursive(ATOMS, grown, max_leaves=8)
TEXTS = st.text("abAB1\n ", max_size=10)


def compiled(source: str) -> StopPattern | None:
    """The pattern, unless it is rightly refused."""
    try:
        return StopPattern(source)
    except ValueError as error:
        reason = str(error)
    if "states" not in reason:
        assert "empty text" in reason
        assert re.fullmatch(source, "") or any(place in source for place in (r"\b", r"\B", "^", "$"))
    return None


def found(pattern: StopPattern, text: str) -> tuple[int, int] | None:
    """(end, size) of the match that ends first."""
    search = PatternSearch(pattern)
    for position, char in enumerate(text):
        if size := search.settle(char):
            return position, size
        if size := search.step(char):
            return position + 1, size
    size = search.settle(None)
    return (len(text), size) if size else None


def matches(source: str, text: str, start: int, end: int) -> bool:
    """Whether exactly this stretch matches, with the rest of the text around it."""
    around = rf"(?s:.{{{start}}})(?:{source})(?s:.{{{len(text) - end}}})"
    return re.fullmatch(around, text) is not None


def reference(source: str, text: str) -> tuple[int, int] | None:
    for end in range(1, len(text) + 1):
        for start in range(end):
            if matches(source, text, start, end):
                return end, end - start
    return None


@settings(max_examples=600, deadline=None)
@given(source=PATTERNS, text=TEXTS)
def test_the_match_that_ends_first_is_the_one_that_re_knows(source, text):
    pattern = compiled(source)
    assume(pattern is not None)
    expected, got = reference(source, text), found(pattern, text)
    if pattern.guarded:
        # An end that needs the next character is known one later: a plain end of another branch may come first. Where it ends is the same.
        assert (expected and expected[0]) == (got and got[0])
        assert got is None or matches(source, text, got[0] - got[1], got[0])
    else:
        assert got == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("(", "no regular expression"),
        ("a{3,2}", "no regular expression"),
        ("a{99999999999999}", "no regular expression"),
        ("(a)\\1", "back-reference"),
        ("(a)(?(1)b|c)", "back-reference"),
        ("a(?=b)", "look-around"),
        ("(?<!a)b", "look-around"),
        ("(?!)", "look-around"),
        ("(?>a)b", "atomic"),
        ("a*+b", "possessive"),
        ("a$", r"\$"),
        (r"a\Z", r"\\Z"),
        (r"(?a)\ba", r"\(\?a\)"),
        ("a*", "empty text"),
        ("(a|)", "empty text"),
        (r"\b", "empty text"),
        ("^", "empty text"),
        ("a{600}", "states"),
        ("(?:(?:a{30}){30}){30}", "states"),
        ("(?:a?){4000000000}b", "states"),
        ("(" * 120 + "a" + ")" * 120 + "(", "no regular expression"),
    ],
)
def test_what_cannot_be_served_says_why(source, words):
    with pytest.raises(ValueError, match=words):
        StopPattern(source)


GREEDY = ["(a+)+€", "(?:a|a)*€", "(?:a|aa)+€", ".{250}€", "(?s:.*.*.*)€", "(?:" + "|".join(["a.*"] * 40) + ")€", "[^€]{0,100}€"]


@pytest.mark.parametrize("source", GREEDY)
def test_no_pattern_backtracks(source):
    """Threads never outnumber states, however long the text: work and memory of a character are bounded."""
    pattern = StopPattern(source)
    search = PatternSearch(pattern)
    for char in "a" * 3000:
        assert not search.step(char)
        assert len(search._threads) <= len(pattern.kinds) <= MAX_STATES + 1
        assert search.held <= MAX_SPAN
    assert search.step("€") == min(3001, MAX_SPAN) or source.startswith((".{250}", "[^€]"))


def test_repeats_of_nothing_end_at_once():
    assert len(StopPattern("(?:(?:){4000000000}){4000000000}a").kinds) < 5
    assert len(StopPattern("(?:(?:a{0}){4000000000}|b){1}c").kinds) < 8


def test_held_text_is_what_a_match_may_need():
    search = PatternSearch(StopPattern("ab+c"))
    held = []
    for char in "xabbxab":
        search.step(char)
        held.append(search.held)
    assert held == [0, 1, 2, 3, 0, 1, 2]


def test_a_long_match_is_cut_to_the_span():
    search = PatternSearch(StopPattern("<[^>]*>"))
    assert [size for char in "<" + "x" * 5000 + ">" if (size := search.step(char))] == [MAX_SPAN]
