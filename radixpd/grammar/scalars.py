"""Strings and numbers of a JSON schema as EBNF. Raises `GrammarError`. Called by `schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixpd.grammar.errors import GrammarError
from radixpd.grammar.formats import FORMATS
from radixpd.grammar.keywords import bounds, limit
from radixpd.grammar.numbers import between, decimals_between
from radixpd.grammar.pattern import STRING_CHAR, in_string
from radixpd.grammar.rules import Rules, times

__all__ = ["inside", "number", "string"]


def string(rules: Rules, schema: Mapping[str, Any], path: str) -> str:
    """A whole string."""
    given = [key for key in ("pattern", "format") if key in schema]
    bounded = [key for key in ("minLength", "maxLength") if key in schema]
    if not given and not bounded:
        return rules.use("jsonstring")
    if len(given) > 1 or (given and bounded):
        raise GrammarError(f"{given[0]} together with {(given + bounded)[1]} at {path or '/'} is not supported")
    return f'"\\"" {inside(schema, path)} "\\""'


def inside(schema: Mapping[str, Any], path: str) -> str:
    """Between the quotes of a string with a rule."""
    if "format" in schema:
        name = schema["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise GrammarError(f"format {str(name)[:60]!r} at {path or '/'} is not supported: {', '.join(sorted(FORMATS))} are")
        return f"({in_string(FORMATS[name])})"
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise GrammarError(f"pattern at {path or '/'} must be a text")
        try:
            return f"({in_string(schema['pattern'])})"
        except GrammarError as error:
            raise GrammarError(f"pattern at {path or '/'}: {error}") from None
    least, most = bounds(schema, "minLength", "maxLength", path)
    return STRING_CHAR + times(least, most)


def number(rules: Rules, schema: Mapping[str, Any], path: str, *, whole: bool) -> str:
    """A number; `whole`: an integer."""
    if schema.get("multipleOf", 1) != 1:
        raise GrammarError(f"multipleOf at {path or '/'} is not supported, except 1")
    whole = whole or "multipleOf" in schema
    low, open_low = limit(schema, "minimum", "exclusiveMinimum", path, max)
    high, open_high = limit(schema, "maximum", "exclusiveMaximum", path, min)
    if low is None and high is None:
        return rules.use("jsoninteger" if whole else "jsonnumber")
    try:
        if not whole:
            return decimals_between(low, high, open_low=open_low, open_high=open_high)
        least = None if low is None else int(low.to_integral_value("ROUND_CEILING"))
        most = None if high is None else int(high.to_integral_value("ROUND_FLOOR"))
        if open_low and least == low:
            least = int(low) + 1 if low is not None else None
        if open_high and most == high:
            most = int(high) - 1 if high is not None else None
        return between(least, most)
    except GrammarError as error:
        raise GrammarError(f"{path or '/'}: {error}") from None
