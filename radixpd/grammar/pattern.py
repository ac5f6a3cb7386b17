"""Regular expressions as EBNF: for `regex` (the whole output) and for a JSON schema's `pattern` (inside a quoted string).

The syntax is that of Python's `re`, less what a grammar cannot say. `\\d`, `\\w` and `\\s` mean ASCII. Inside a string, what JSON must
escape is escaped where the pattern names it; `.` and negated classes never stand for such a character, which keeps masks cheap. Pure.
Raises `GrammarError`. Called by `requests` and `schema`.
"""

from __future__ import annotations

import importlib
import re
import warnings
from typing import Any

from radixpd.grammar.charset import ALL, CONTROL, Ranges, complement, literal, minus, normal, spelt, union
from radixpd.grammar.errors import GrammarError

__all__ = ["MAX_REPEAT", "STRING_CHAR", "in_string", "whole"]

MAX_REPEAT = 10_000
DEEPEST = 100

# The standard library's own parser: what a pattern means here is what it means there. It has no public name.
_parser: Any = importlib.import_module("re._parser")

REFUSED = {
    "GROUPREF": "a back-reference", "GROUPREF_EXISTS": "a back-reference", "ASSERT": "look-around", "ASSERT_NOT": "look-around",
    "FAILURE": "look-around", "ATOMIC_GROUP": "an atomic group", "POSSESSIVE_REPEAT": "a possessive repeat",
}  # fmt: skip
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
# What Unicode calls a space: none of them is "not a space" for any reader of the pattern.
ANY_SPACE: Ranges = normal(
    [(0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
     (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
)  # fmt: skip
ASCII: Ranges = ((0, 0x7F),)
CATEGORIES = {
    "CATEGORY_DIGIT": DIGIT,
    "CATEGORY_WORD": WORD,
    "CATEGORY_SPACE": SPACE,
    # Beyond ASCII, readers differ on what a digit or a letter is.
    "CATEGORY_NOT_DIGIT": minus(ASCII, DIGIT),
    "CATEGORY_NOT_WORD": minus(ASCII, WORD),
    "CATEGORY_NOT_SPACE": complement(ANY_SPACE),
}
ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
PLAIN = minus(complement(CONTROL), ((0x22, 0x22), (0x5C, 0x5C)))  # what a JSON string holds as it is
STRING_CHAR = spelt(PLAIN)


def whole(source: str) -> str:
    """EBNF of all texts that the pattern matches from end to end."""
    return _Writer(quoted=False).top(source, search=False)


def in_string(source: str) -> str:
    """EBNF of what may stand between the quotes of a JSON string in which the pattern is found."""
    return _Writer(quoted=True).top(source, search=True)


class _Writer:
    def __init__(self, *, quoted: bool) -> None:
        self._quoted = quoted
        self._any = PLAIN if quoted else ALL

    def top(self, source: str, *, search: bool) -> str:
        """The whole pattern. `search`: it may stand anywhere unless anchored."""
        tree = _parse(source)
        if tree.state.flags & (re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE):
            raise GrammarError("a pattern with flags is not offered")
        items = list(tree)
        options = items[0][1][1] if len(items) == 1 and str(items[0][0]) == "BRANCH" else [items]
        return _either([self._anchored(list(option), search=search) for option in options])

    def _anchored(self, items: list[Any], *, search: bool) -> str:
        begins = ends = False
        while items and _place(items[0]) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            items, begins = items[1:], True
        while items and _place(items[-1]) in ("AT_END", "AT_END_STRING"):
            items, ends = items[:-1], True
        rest = f"{spelt(self._any)}*"
        parts = [rest if search and not begins else "", self._sequence(items, 0), rest if search and not ends else ""]
        return " ".join(part for part in parts if part) or '""'

    def _sequence(self, items: Any, depth: int) -> str:
        if depth > DEEPEST:
            raise GrammarError(f"a pattern may be nested {DEEPEST} deep")
        parts: list[str] = []
        letters = ""
        for operation, value in items:
            if str(operation) == "LITERAL":
                letters += self._letter(value)
                continue
            if letters:
                parts.append(literal(letters))
                letters = ""
            parts.append(self._item(str(operation), value, depth))
        if letters:
            parts.append(literal(letters))
        return " ".join(part for part in parts if part != '""') or '""'

    def _item(self, name: str, value: Any, depth: int) -> str:
        if name in REFUSED:
            raise GrammarError(f"a pattern with {REFUSED[name]} is not offered")
        match name:
            case "ANY":
                return spelt(minus(self._any, ((0x0A, 0x0A),)))
            case "NOT_LITERAL":
                return spelt(minus(self._any, ((value, value),)))
            case "IN":
                return self._class(value)
            case "BRANCH":
                return f"({_either([self._sequence(option, depth + 1) for option in value[1]])})"
            case "SUBPATTERN":
                _, added, dropped, inner = value
                if added or dropped:
                    raise GrammarError("a pattern with flags is not offered")
                return f"({self._sequence(inner, depth + 1)})"
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                return self._repeat(least, most, inner, depth)
            case "AT":
                raise GrammarError("^, $ and \\b inside a pattern are not offered, only ^ and $ at its ends")
        raise GrammarError(f"a pattern with {name.lower()} is not offered")

    def _repeat(self, least: int, most: Any, inner: Any, depth: int) -> str:
        endless = most == _parser.MAXREPEAT
        if max(least, 0 if endless else most) > MAX_REPEAT:
            raise GrammarError(f"a pattern may repeat a part {MAX_REPEAT} times at most")
        part = self._sequence(inner, depth + 1)
        if part == '""' or most == 0:
            return '""'
        if len(list(inner)) > 1 or part[0] not in '[("' or " " in part:
            part = f"({part})"
        if endless:
            return part + ("*" if least == 0 else "+" if least == 1 else f"{{{least},}}")
        return part + f"{{{least},{most}}}"

    def _class(self, members: Any) -> str:
        negated, ranges = False, []
        for operation, value in members:
            match str(operation):
                case "NEGATE":
                    negated = True
                case "LITERAL":
                    ranges.append((value, value))
                case "RANGE":
                    ranges.append(value)
                case "CATEGORY":
                    ranges += CATEGORIES[str(value)]
        found = normal(ranges)
        if negated:
            found = minus(self._any, found)
            return spelt(_some(found))
        if not self._quoted:
            return spelt(_some(found))
        options = [spelt(plain)] if (plain := minus(found, complement(PLAIN))) else []
        named = [char for char in ESCAPES if any(low <= ord(char) <= high for low, high in found)]
        # A range that happens to span a quote or a backslash says less than one that names it.
        wide = union(DIGIT, WORD, SPACE) != found and sum(high - low for low, high in found) > 64
        options += [] if wide and plain else [literal(ESCAPES[char]) for char in named]
        if not options:
            raise GrammarError("a pattern asks for control characters, which are not offered")
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _letter(self, code: int) -> str:
        char = chr(code)
        if 0xD800 <= code <= 0xDFFF:
            raise GrammarError("a pattern with half a character (a surrogate) is not offered")
        if not self._quoted:
            return char
        return ESCAPES.get(char) or (f"\\u{code:04x}" if code < 0x20 else char)


def _parse(source: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _parser.parse(source)
    except (re.error, RecursionError, OverflowError) as error:
        raise GrammarError(f"the pattern cannot be read: {str(error) or 'it is nested too deeply'}") from None


def _place(item: Any) -> str:
    return str(item[1]) if str(item[0]) == "AT" else ""


def _either(options: list[str]) -> str:
    return " | ".join(dict.fromkeys(options))


def _some(ranges: Ranges) -> Ranges:
    if not ranges:
        raise GrammarError("a class of a pattern matches no character")
    return ranges
