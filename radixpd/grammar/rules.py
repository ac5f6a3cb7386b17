"""EBNF as it is put together: named rules, those that every JSON grammar needs, and repetitions. Called by `schema` and its parts.

Invariant: a name is given once, and a grammar's size is bounded.
"""

from __future__ import annotations

from radixpd.grammar.errors import GrammarError
from radixpd.grammar.numbers import INTEGER, NUMBER
from radixpd.grammar.pattern import STRING_CHAR

__all__ = ["BASE", "Rules", "repeated", "some", "times"]

MAX_EBNF = 256 * 1024
BASE = {
    "jsonstring": '"\\"" jsonrest',
    # Right recursion: with a star instead, masks cost a thousand times as much.
    "jsonrest": f'"\\"" | {STRING_CHAR} jsonrest | "\\\\" jsonescape jsonrest',
    "jsonescape": '["\\\\/bfnrt] | "u" ([0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2})',
    "jsonnumber": NUMBER,
    "jsoninteger": INTEGER,
    "jsonvalue": 'jsonobject | jsonarray | jsonstring | jsonnumber | "true" | "false" | "null"',
    "jsonobject": '"{" (jsonstring ": " jsonvalue (", " jsonstring ": " jsonvalue)*)? "}"',
    "jsonarray": '"[" (jsonvalue (", " jsonvalue)*)? "]"',
    "jsonkeyrest": f'"\\"" | {STRING_CHAR} jsonkeyrest',
}
NEEDS = {
    "jsonstring": ("jsonrest",), "jsonrest": ("jsonescape",), "jsonvalue": ("jsonobject", "jsonarray", "jsonstring", "jsonnumber"),
    "jsonobject": ("jsonvalue",), "jsonarray": ("jsonvalue",),
}  # fmt: skip


class Rules:
    """The named rules of one grammar so far. `letter` begins their names, so that two grammars can become one."""

    def __init__(self, letter: str = "r") -> None:
        self._letter = letter
        self._bodies: dict[str, str] = {}
        self._size = 0

    def text(self, root: str) -> str:
        """All of them, `root` first."""
        return "\n".join(f"{name} ::= {body}" for name, body in {"root": root, **self._bodies}.items())

    def use(self, name: str) -> str:
        """The name of a rule that every grammar may need, which is there from now on."""
        if name not in self._bodies:
            self._bodies[name] = BASE[name]
            for other in NEEDS.get(name, ()):
                self.use(other)
        return name

    def add(self, body: str) -> str:
        """A name for this body."""
        name = self.reserve()
        self.fill(name, body)
        return name

    def reserve(self) -> str:
        """A name for a body that is not known yet, as it may refer to itself."""
        name = f"{self._letter}{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def fill(self, name: str, body: str) -> None:
        """The body of a reserved name."""
        self._size += len(body)
        if self._size > MAX_EBNF:
            raise GrammarError(f"the schema makes a grammar of more than {MAX_EBNF} characters")
        self._bodies[name] = body


def repeated(item: str, least: int, most: int | None) -> str:
    """`least` to `most` of an item, with commas."""
    if most == 0:
        return '""'
    some = f'{item} (", " {item})' + times(max(0, least - 1), None if most is None else most - 1)
    return some if least else f"({some})?"


def some(items: list[str], least: int, more: str = "") -> str:
    """A prefix of these items, of at least `least`; `more` behind all of them."""
    text = more
    for at in range(len(items) - 1, -1, -1):
        item = items[at] if at == 0 else f'", " {items[at]}'
        body = f"{item} {text}".strip()
        text = body if at < least else f"({body})?"
    return text or '""'


def times(least: int, most: int | None) -> str:
    """How often, behind an item."""
    if most is None:
        return "*" if least == 0 else f"{{{least},}}"
    return f"{{{least},{most}}}"
