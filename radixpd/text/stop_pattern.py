"""Stop patterns: regular expressions found in a text that arrives in pieces, in linear time and bounded memory.

A pattern becomes an automaton whose live states all move with each character (no backtracking), so no pattern makes a character cost more
than `MAX_STATES` steps. Of all matches the one that *ends* first counts, and of those the one that began first; greedy and lazy are
therefore the same. A match is looked at `MAX_SPAN` characters back at most: so much text is held back, and so much is trimmed.
The syntax is that of Python's `re`, less what needs memory of the text or text yet to come. Called by `stop`.
"""

from __future__ import annotations

import importlib
import re
import warnings
from functools import lru_cache
from typing import Any

__all__ = ["MAX_PATTERN", "MAX_SPAN", "MAX_STATES", "PatternSearch", "StopPattern", "stop_pattern"]

MAX_PATTERN = 256  # characters of one pattern
MAX_STATES = 256  # of all patterns of one request
MAX_SPAN = 1024  # characters
MAX_KNOWN = 8192  # answers that a pattern remembers: characters times nodes

# The standard library's own parser: what a pattern means here is what it means there. It has no public name.
_parser: Any = importlib.import_module("re._parser")

STEP, BOUNDARY, NO_BOUNDARY, TEXT_START, LINE_START, LINE_END, ACCEPT, SPLIT = range(8)
CATEGORIES = {
    "CATEGORY_DIGIT": r"\d", "CATEGORY_NOT_DIGIT": r"\D", "CATEGORY_SPACE": r"\s", "CATEGORY_NOT_SPACE": r"\S", "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}  # fmt: skip
REFUSED = {
    "GROUPREF": "a back-reference", "GROUPREF_EXISTS": "a back-reference", "ASSERT": "look-around", "ASSERT_NOT": "look-around",
    "FAILURE": "look-around", "ATOMIC_GROUP": "an atomic group", "POSSESSIVE_REPEAT": "a possessive repeat",
}  # fmt: skip
PLACES = {"AT_BOUNDARY": BOUNDARY, "AT_NON_BOUNDARY": NO_BOUNDARY, "AT_BEGINNING_STRING": TEXT_START}


class StopPattern:
    """A compiled pattern, shared by all who use it. Node n is of kind `kinds[n]` and leads to `after[n]`."""

    __slots__ = ("_known", "_tests", "after", "begin", "guarded", "kinds", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self.kinds: list[int] = [ACCEPT]
        self.after: list[tuple[int, ...]] = [()]
        self._tests: dict[int, str | re.Pattern[str]] = {}  # of nodes that take a character: that character, or a class
        self._known: dict[str, frozenset[int]] = {}
        tree = _parse(source)
        entry = self._build(tree, tree.state.flags, 0)
        self.guarded = any(BOUNDARY <= kind <= LINE_END for kind in self.kinds)
        self.begin: dict[int, int] = {}  # the threads of a match that begins at 0
        _enter(self, self.begin, set(), entry, 0)
        if 0 in self._reach(entry):
            raise ValueError("it matches the empty text, which would end every output at once")

    def takers(self, char: str) -> frozenset[int]:
        """The nodes that take this character."""
        found = self._known.get(char)
        if found is None:
            if len(self._known) * len(self._tests) >= MAX_KNOWN:
                self._known.clear()
            tests = self._tests.items()
            found = frozenset(node for node, test in tests if (test == char if isinstance(test, str) else test.fullmatch(char)))
            self._known[char] = found
        return found

    def _node(self, kind: int, after: tuple[int, ...]) -> int:
        if len(self.kinds) > MAX_STATES:
            raise ValueError(f"it needs more than {MAX_STATES} states: shorten its repeats")
        self.kinds.append(kind)
        self.after.append(after)
        return len(self.kinds) - 1

    def _build(self, tree: Any, flags: int, after: int) -> int:
        """Nodes for a parsed sequence that goes on with `after`; where it begins."""
        for operation, value in reversed(list(tree)):
            name = str(operation)
            if name in REFUSED:
                raise ValueError(f"it uses {REFUSED[name]}, which is not offered")
            if name == "BRANCH":
                after = self._node(SPLIT, tuple([self._build(option, flags, after) for option in value[1]]))
            elif name == "SUBPATTERN":
                _, added, dropped, inner = value
                after = self._build(inner, (flags | added) & ~dropped, after)
            elif name in ("MAX_REPEAT", "MIN_REPEAT"):
                least, most, inner = value
                after = self._repeat(least, most, inner, flags, after)
            elif name == "AT":
                after = self._node(_place(str(value), flags), (after,))
            else:
                after = self._step(name, value, flags, after)
        return after

    def _repeat(self, least: int, most: Any, inner: Any, flags: int, after: int) -> int:
        if most == _parser.MAXREPEAT:
            loop = self._node(SPLIT, ())
            self.after[loop] = (self._build(inner, flags, loop), after)
            after = loop
        else:
            for _ in range(most - least):
                entry = self._build(inner, flags, after)
                if entry == after:  # nothing to repeat
                    break
                after = self._node(SPLIT, (entry, after))
        for _ in range(least):
            entry = self._build(inner, flags, after)
            if entry == after:
                break
            after = entry
        return after

    def _step(self, name: str, value: Any, flags: int, after: int) -> int:
        node = self._node(STEP, (after,))
        if name == "LITERAL" and not flags & re.IGNORECASE:
            self._tests[node] = chr(value)
        else:
            self._tests[node] = re.compile(_class(name, value), flags & (re.IGNORECASE | re.DOTALL | re.ASCII))
        return node

    def _reach(self, entry: int) -> set[int]:
        """Nodes that can be reached from `entry` without a character."""
        seen, open = {entry}, [entry]
        while open:
            node = open.pop()
            if self.kinds[node] != STEP:
                fresh = set(self.after[node]) - seen
                seen |= fresh
                open += fresh
        return seen


class PatternSearch:
    """The search for one pattern in one text. `_threads`: node -> where the earliest match in it began, in ascending order of that."""

    __slots__ = ("_at", "_before", "_pattern", "_threads")

    def __init__(self, pattern: StopPattern) -> None:
        self._pattern = pattern
        self._at = 0
        self._before: str | None = None
        self._threads = pattern.begin

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a match, as far as that matters."""
        return self._size(next(iter(self._threads.values()), self._at))

    def settle(self, char: str | None) -> int:
        """Before the next character (None: the text has ended): characters of a match that is complete where that one begins, or 0."""
        if not self._pattern.guarded:
            return 0
        threads: dict[int, int] = {}
        seen: set[int] = set()
        for node, start in self._threads.items():
            _enter(self._pattern, threads, seen, node, start, edge=(self._before, char))
        return self._go_on(threads)

    def step(self, char: str) -> int:
        """Take a character; characters of the match that ends with it, or 0."""
        pattern, takers = self._pattern, self._pattern.takers(char)
        threads: dict[int, int] = {}
        if takers:
            seen: set[int] = set()
            for node, start in self._threads.items():
                if node in takers:
                    _enter(pattern, threads, seen, pattern.after[node][0], start)
        self._at += 1
        self._before = char
        for node in pattern.begin:
            threads.setdefault(node, self._at)
        return self._go_on(threads)

    def _go_on(self, threads: dict[int, int]) -> int:
        start = threads.pop(0, None)
        self._threads = threads
        return 0 if start is None else self._size(start)

    def _size(self, start: int) -> int:
        return min(self._at - start, MAX_SPAN)


def _enter(
    pattern: StopPattern,
    threads: dict[int, int],
    seen: set[int],
    node: int,
    start: int,
    *,
    edge: tuple[str | None, str | None] | None = None,
) -> None:
    """Put `node`, and what it leads to without a character, among the threads. A place is judged only with the characters around it
    (`edge`); until then it waits as a thread."""
    kinds, after = pattern.kinds, pattern.after
    open = [node]
    while open:
        node = open.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = kinds[node]
        if kind == SPLIT:
            open += after[node]
        elif kind in (STEP, ACCEPT) or edge is None:
            threads[node] = start
        elif _holds(kind, *edge):
            open += after[node]


@lru_cache(maxsize=128)
def stop_pattern(source: str) -> StopPattern:
    """Compile a pattern; a ValueError says what is wrong with it."""
    return StopPattern(source)


def _parse(source: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):
            return _parser.parse(source)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise ValueError(f"it is no regular expression: {error}") from None


def _place(name: str, flags: int) -> int:
    """The kind of node for `^`, `$` and their like."""
    if name == "AT_BEGINNING":
        return LINE_START if flags & re.MULTILINE else TEXT_START
    if name == "AT_END" and flags & re.MULTILINE:
        return LINE_END
    if name not in PLACES:
        raise ValueError(r"$ and \Z are not offered, since the end of a growing text is not known; (?m)$ is the end of a line")
    if flags & re.ASCII and PLACES[name] != TEXT_START:
        raise ValueError(r"\b and \B with (?a) are not offered")
    return PLACES[name]


def _holds(kind: int, before: str | None, char: str | None) -> bool:
    """Whether a place between two characters (None: the beginning, the end) is of this kind."""
    if kind == TEXT_START:
        return before is None
    if kind == LINE_START:
        return before is None or before == "\n"
    if kind == LINE_END:
        return char is None or char == "\n"
    return (_in_word(before) != _in_word(char)) == (kind == BOUNDARY)


def _in_word(char: str | None) -> bool:
    return char is not None and (char.isalnum() or char == "_")


def _class(name: str, value: Any) -> str:
    """The source of a pattern for one character."""
    if name == "ANY":
        return "."
    if name == "LITERAL":
        return f"\\U{value:08x}"
    if name == "NOT_LITERAL":
        return f"[^\\U{value:08x}]"
    parts = ["["]
    for operation, item in value:
        match str(operation):
            case "NEGATE":
                parts.append("^")
            case "RANGE":
                parts.append(f"\\U{item[0]:08x}-\\U{item[1]:08x}")
            case "CATEGORY":
                parts.append(CATEGORIES[str(item)])
            case _:
                parts.append(f"\\U{item:08x}")
    return "".join([*parts, "]"])
