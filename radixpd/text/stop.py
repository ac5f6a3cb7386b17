"""What ends an output by its text: stop strings and stop patterns, searched character by character.

Invariant: the match does not depend on how the text was cut into pieces. The match that *ends* first wins (of two that end together, the
longer one), and only characters that may belong to a match are held back. `StopRules` is what a request asks for, compiled once and shared
by its samples; a `StopMatcher` is the search in one output. Built by admission, used by the detokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixpd.text.stop_pattern import MAX_STATES, PatternSearch, stop_pattern

__all__ = ["StopHit", "StopMatcher", "StopRules"]


@dataclass(frozen=True, slots=True)
class StopHit:
    """A match of `size` characters of the whole text, that ends `end` characters into the text that was fed last."""

    rule: str
    end: int
    size: int


class StopRules:
    """Stop strings and patterns of one request. A pattern that cannot be served is a ValueError that says why."""

    __slots__ = ("firsts", "patterns", "strings", "tables")

    def __init__(self, strings: tuple[str, ...] = (), patterns: tuple[str, ...] = ()) -> None:
        # Longest first: of two matches that end at the same character the longer one is found first.
        self.strings = sorted((text for text in dict.fromkeys(strings) if text), key=len, reverse=True)
        self.tables = [_failures(text) for text in self.strings]
        self.firsts = frozenset(text[0] for text in self.strings)
        self.patterns = [stop_pattern(source) for source in dict.fromkeys(patterns)]
        if sum(len(pattern.kinds) for pattern in self.patterns) > MAX_STATES:
            raise ValueError(f"together they need more than {MAX_STATES} states: give fewer or shorter ones")


class StopMatcher:
    """Strings by Knuth-Morris-Pratt, one state for each; patterns by a `PatternSearch` each."""

    __slots__ = ("_rules", "_searches", "_states")

    def __init__(self, rules: StopRules) -> None:
        self._rules = rules
        self._states = [0] * len(rules.strings)
        self._searches = [(pattern.source, PatternSearch(pattern)) for pattern in rules.patterns]

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a match."""
        return max(max(self._states, default=0), max((search.held for _, search in self._searches), default=0))

    def feed(self, text: str, *, armed: bool = True) -> StopHit | None:
        """Take more text; the first match. Unless `armed`, matches that end in this text are passed over."""
        if not self._searches and self._rules.firsts.isdisjoint(text) and not any(self._states):
            return None  # no string begins here: nearly every piece of text
        for position, char in enumerate(text):
            if (hit := self._settled(char, position)) is not None and armed:
                return hit
            hits = [*self._string_hits(char, position + 1), *self._pattern_hits(char, position + 1)]
            if hits and armed:
                return max(hits, key=lambda hit: hit.size)
        return None

    def finish(self) -> StopHit | None:
        """The text has ended; a match that only its end completes."""
        return self._settled(None, 0)

    def _settled(self, char: str | None, end: int) -> StopHit | None:
        hits = [StopHit(source, end, size) for source, search in self._searches if (size := search.settle(char))]
        return max(hits, key=lambda hit: hit.size, default=None)

    def _pattern_hits(self, char: str, end: int) -> list[StopHit]:
        return [StopHit(source, end, size) for source, search in self._searches if (size := search.step(char))]

    def _string_hits(self, char: str, end: int) -> list[StopHit]:
        hits: list[StopHit] = []
        states = self._states
        for index, (stop, table) in enumerate(zip(self._rules.strings, self._rules.tables)):
            state = states[index]
            while state and stop[state] != char:
                state = table[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                hits.append(StopHit(stop, end, state))
                state = table[state - 1]
            states[index] = state
        return hits


def _failures(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
