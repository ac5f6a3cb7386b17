"""How long a text a grammar may force at a time: xgrammar looks for it to its end, which may never come, in the model's own process.

What is forced begins every way to complete the output, so it is at most as long as the shortest: what remains of each rule that is open,
in its shortest form. A rule that cannot hold itself is open once, another one as often as the output has characters. Read from xgrammar's
own form of a grammar (`Grammar.serialize_json`). Pure; called by `xgrammar` where a grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from radixpd.grammar.errors import GrammarError

__all__ = ["forces_little"]

MOST = 2**18  # characters of what all rules that are open once may leave: a tenth of a second to find
MOST_AGAIN = 64  # of one that may be open many times
BYTES, CLASS, STAR, EMPTY, RULE, SEQUENCE, CHOICES, DISPATCH, REPEAT = range(9)

Edges = dict[int, set[int]]


def forces_little(grammar: Mapping[str, Any]) -> bool:
    """Whether no output can get to a place where more is forced than can be looked for at once. Raises `GrammarError` when no text fits."""
    rules = _Rules(grammar)
    if rules.shortest[grammar["root_rule_id"]] == inf:
        raise GrammarError("the grammar allows nothing: no text fits it")
    most: dict[int, float] = {}  # what may be left from a rule down
    for circle in _circles(rules.edges):
        found = 0.0
        for target, behind in (each for rule in circle for each in rules.left(rule)):
            if target in circle and behind > MOST_AGAIN:
                return False
            found = max(found, behind + most.get(target, 0.0))
        most |= dict.fromkeys(circle, found)
    return max(most.values()) <= MOST


class _Rules:
    """`bodies`: of each rule its options, each a row of pairs: a rule and how often it comes at least, or None and so many characters."""

    def __init__(self, grammar: Mapping[str, Any]) -> None:
        self._data: list[int] = grammar["grammar_expr_data"]
        self._starts: list[int] = grammar["grammar_expr_indptr"]
        self.bodies = [list(self._options(rule[1])) for rule in grammar["rules"]]
        self.edges: Edges = {
            index: {rule for option in options for rule, _ in option if rule is not None} for index, options in enumerate(self.bodies)
        }
        self.shortest = self._lengths()

    def length(self, rule: int | None, least: int) -> float:
        """Characters of an item in its shortest form."""
        return least if rule is None else least and least * self.shortest[rule]

    def left(self, rule: int) -> Iterator[tuple[int, float]]:
        """What stands in a rule, and how much must follow it there; -1: nothing yet."""
        for option in self.bodies[rule]:
            behind = 0.0
            for target, least in reversed(option):
                if target is not None:
                    yield target, behind + (self.length(target, least - 1) if least > 1 else 0)
                behind += self.length(target, least)
            yield -1, behind

    def _lengths(self) -> list[float]:
        """The least fixed point; lengths beyond all that counts are cut, so that it comes soon."""
        found, users = [inf] * len(self.bodies), _turned(self.edges)
        self.shortest = found
        waiting = set(range(len(found)))
        while waiting:
            rule = waiting.pop()
            least = min((sum(self.length(*item) for item in option) for option in self.bodies[rule]), default=inf)
            least = least if least == inf else min(least, 2 * MOST)
            if least < found[rule]:
                found[rule] = least
                waiting |= users[rule]
        return found

    def _part(self, expression: int) -> tuple[int, list[int]]:
        start = self._starts[expression]
        return self._data[start], self._data[start + 2 : start + 2 + self._data[start + 1]]

    def _options(self, expression: int) -> Iterator[list[tuple[int | None, int]]]:
        kind, parts = self._part(expression)
        if kind == CHOICES:
            for part in parts:
                yield from self._options(part)
        elif kind == SEQUENCE:
            yield [item for part in parts for item in self._item(part)]
        else:
            yield list(self._item(expression))

    def _item(self, expression: int) -> Iterator[tuple[int | None, int]]:
        kind, parts = self._part(expression)
        if kind == RULE:
            yield parts[0], 1
        elif kind == REPEAT:
            yield parts[0], parts[1]
        elif kind not in (STAR, EMPTY, DISPATCH):  # what a dispatch leads to leaves nothing behind itself
            yield None, len(parts) if kind == BYTES else 1


def _turned(edges: Edges) -> Edges:
    turned: Edges = {index: set() for index in edges}
    for index, targets in edges.items():
        for target in targets:
            turned[target].add(index)
    return turned


def _circles(edges: Edges) -> Iterator[set[int]]:
    """Rules that can hold each other, and all others alone; each behind those that stand in it. (Tarjan's way, without recursion.)"""
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    open_: list[int] = []
    settled: set[int] = set()
    for first in edges:
        path = [] if first in number else [(first, iter(edges[first]))]
        while path:
            rule, targets = path[-1]
            if rule not in number:
                number[rule] = lowest[rule] = len(number)
                open_.append(rule)
            if (target := next((each for each in targets if each not in number), None)) is not None:
                path.append((target, iter(edges[target])))
                continue
            path.pop()
            lowest[rule] = min([lowest[rule], *(lowest[each] for each in edges[rule] if each not in settled)])
            if lowest[rule] == number[rule]:
                circle = {open_.pop()}
                while rule not in circle:
                    circle.add(open_.pop())
                settled |= circle
                yield circle
