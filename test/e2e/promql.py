"""Reads PromQL as far as a test needs: which series a query selects, by which labels it matches and groups.

Not a parser of the whole language: a word before a bracket is a function or an aggregation and must be one that is known, a word behind
`by` and its like is a label, a word in braces is a label, and every other word is the name of a series. Used by the tests of dashboards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["Query", "read"]

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\$?[A-Za-z_:][A-Za-z0-9_:]*|\$\{\w+\}|\d+(?:\.\d+)?(?:ms|[smhdwy])?|[<>=!]=|[=!]~|\S')
FUNCTIONS = {
    "rate",
    "increase",
    "irate",
    "histogram_quantile",
    "clamp_max",
    "clamp_min",
    "label_values",
    "sum",
    "avg",
    "max",
    "min",
    "count",
    "topk",
}
GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
OPERATORS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
WORD = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")


@dataclass
class Query:
    """`series`: (name, labels it is matched by), in order; `groups`: labels of `by` and its like."""

    series: list[tuple[str, set[str]]] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)


def read(text: str) -> Query:
    """What a query is about. Raises ValueError for a function that is not known and for brackets that do not close."""
    tokens = TOKEN.findall(text)
    query, at = Query(), 0
    if any(tokens.count(left) != tokens.count(right) for left, right in ("()", "[]", "{}")):
        raise ValueError(f"brackets do not close: {text}")
    while at < len(tokens):
        token, following = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else ""
        at += 1
        if token == "[":  # a range: a duration or a variable
            at = tokens.index("]", at)
        elif not WORD.fullmatch(token):
            continue
        elif token in GROUPING and following == "(":
            end = tokens.index(")", at)
            query.groups |= {word for word in tokens[at:end] if WORD.fullmatch(word)}
            at = end
        elif following == "(" or following in GROUPING:
            if token not in FUNCTIONS:
                raise ValueError(f"unknown function {token}: {text}")
        elif token not in OPERATORS:
            end = tokens.index("}", at) if following == "{" else at
            matched = {word for word, after in zip(tokens[at:end], tokens[at + 1 : end + 1]) if after in ("=", "!=", "=~", "!~")}
            query.series.append((token, matched))
            at = end
    return query
