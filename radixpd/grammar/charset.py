"""Sets of characters as sorted ranges of code points, and how EBNF spells them. Pure: the API process imports it.

Invariant: ranges are disjoint, ascending, and hold no surrogates (no text has them). Called by `pattern` and `schema`.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ALL", "CONTROL", "Ranges", "complement", "literal", "minus", "normal", "spelt", "union"]

Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
ALL: Ranges = ((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST))
CONTROL: Ranges = ((0, 0x1F),)


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, merged, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return minus(tuple(merged), (SURROGATES,))


def minus(left: Ranges, right: Ranges) -> Ranges:
    """What `left` has and `right` lacks."""
    kept: list[tuple[int, int]] = []
    for low, high in left:
        for cut_low, cut_high in right:
            if cut_high < low or cut_low > high:
                continue
            if cut_low > low:
                kept.append((low, cut_low - 1))
            low = cut_high + 1
            if low > high:
                break
        if low <= high:
            kept.append((low, high))
    return tuple(kept)


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    return minus(ALL, ranges)


def union(*sets: Ranges) -> Ranges:
    """Whatever is in any of them."""
    return normal(each for ranges in sets for each in ranges)


def spelt(ranges: Ranges) -> str:
    """The set as an EBNF character class; the larger half of all characters is spelt by what it lacks."""
    assert ranges, "an empty class matches nothing"
    if ranges[-1][1] == LAST:
        # Surrogates are named too: a reader of bytes would take them for characters.
        return "[^" + "".join(map(_span, minus(((0, LAST),), ranges))) + "]"
    return "[" + "".join(map(_span, ranges)) + "]"


def literal(text: str) -> str:
    """A text as an EBNF string."""
    return '"' + "".join(_quoted(char) for char in text) + '"'


def _span(span: tuple[int, int]) -> str:
    low, high = span
    return _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}"


def _escaped(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    # Not \\x: some readers take more than two digits behind it.
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _quoted(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char.isprintable() else _escaped(ord(char))
