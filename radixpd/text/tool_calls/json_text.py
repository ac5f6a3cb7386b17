"""JSON one character at a time: values that pass through as they come, and the object that stands for a call in most formats.

Invariant: what is passed on of a value is the beginning of valid JSON; at the first character that cannot belong to it `Malformed` is
raised and the character is left. A raw control character in a string, which models write and JSON forbids, is passed on escaped. Called
by the scripts of the formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from radixpd.text.tool_calls.reader import BLANKS, END, Malformed, Reader, Steps

__all__ = ["HEX", "NUMBER", "call_object", "object_value", "text_value", "value"]

Out = Callable[[str], None]

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
IN_NUMBER = frozenset("-+.eE0123456789")
ESCAPES = frozenset('"\\/bfnrt')
HEX = frozenset("0123456789abcdefABCDEF")
WORDS = {"t": "true", "f": "false", "n": "null"}
CLOSERS = {"{": "}", "[": "]"}
BEFORE_NAME = frozenset(("type", "id", "index"))
ARGUMENTS = frozenset(("arguments", "parameters"))


def call_object(reader: Reader) -> Steps[None]:
    """`{"name": ..., "arguments": {...}}`. Arguments that come before the name, or as a text, wait until the call is known."""
    name, early, begun = "", "", False
    yield from _take(reader, "{")
    yield from reader.blanks()
    while True:
        key = yield from _key(reader)
        if key == "name" and not name:
            name = reader.known((yield from text_value(reader)))
        elif key in ARGUMENTS and not begun and not early:
            if begun := bool(name) and reader.char == "{":
                reader.begin(name)
                yield from value(reader, reader.argue)
            else:
                early = yield from _collected(reader)
        elif not name and key not in BEFORE_NAME:
            raise Malformed
        else:
            yield from value(reader, _nowhere)
        yield from reader.blanks()
        if reader.char == "}":
            break
        yield from _take(reader, ",")
        yield from reader.blanks()
    if not begun:
        arguments = _as_object(early)
        reader.begin(reader.known(name))
        reader.argue(arguments)
    reader.finish()
    yield


def object_value(reader: Reader, name: str) -> Steps[None]:
    """The arguments alone, of a function whose name is known."""
    if reader.char != "{":
        raise Malformed
    reader.begin(reader.known(name))
    yield from value(reader, reader.argue)
    reader.finish()


def value(reader: Reader, out: Out) -> Steps[None]:
    """One value."""
    closers: list[str] = []
    while True:
        if (closer := CLOSERS.get(reader.char)) is not None:
            yield from _pass(reader, out)
            yield from _blanks(reader, out)
            closers.append(closer)
            if reader.char != closer:
                if closer == "}":
                    yield from _member(reader, out)
                continue
        elif reader.char == '"':
            yield from _string(reader, out)
        else:
            yield from _scalar(reader, out)
        while closers:  # a value has ended, or an empty one is about to
            yield from _blanks(reader, out)
            if reader.char == closers[-1]:
                closers.pop()
                yield from _pass(reader, out)
                continue
            if reader.char != ",":
                raise Malformed
            yield from _pass(reader, out)
            yield from _blanks(reader, out)
            if closers[-1] == "}":
                yield from _member(reader, out)
            break
        else:
            return


def text_value(reader: Reader) -> Steps[str]:
    """The text that a string stands for."""
    found: list[str] = []
    yield from _string(reader, found.append)
    text: str = json.loads("".join(found))
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise Malformed  # half a character
    return text


def _collected(reader: Reader) -> Steps[str]:
    """A value as text; of a string what it says."""
    if reader.char == '"':
        return (yield from text_value(reader))
    found: list[str] = []
    yield from value(reader, found.append)
    return "".join(found)


def _as_object(text: str) -> str:
    """Arguments that were written another way; none is an empty object."""
    text = text.strip()
    if text in ("", "null"):
        return "{}"
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(found, dict):
        raise Malformed
    return text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _nowhere(_: str) -> None:
    """What nobody asks for."""


def _pass(reader: Reader, out: Out) -> Steps[None]:
    out(reader.char)
    yield


def _take(reader: Reader, char: str) -> Steps[None]:
    if reader.char != char:
        raise Malformed
    yield


def _blanks(reader: Reader, out: Out) -> Steps[None]:
    while reader.char in BLANKS:
        yield from _pass(reader, out)


def _key(reader: Reader) -> Steps[str]:
    key = yield from text_value(reader)
    yield from reader.blanks()
    yield from _take(reader, ":")
    yield from reader.blanks()
    return key


def _member(reader: Reader, out: Out) -> Steps[None]:
    """A key up to its value."""
    yield from _string(reader, out)
    yield from _blanks(reader, out)
    if reader.char != ":":
        raise Malformed
    yield from _pass(reader, out)
    yield from _blanks(reader, out)


def _string(reader: Reader, out: Out) -> Steps[None]:
    if reader.char != '"':
        raise Malformed
    yield from _pass(reader, out)
    while (char := reader.char) != '"':
        if char == END:
            raise Malformed
        if char == "\\":
            yield from _escape(reader, out)
            continue
        out(char if char >= " " else json.dumps(char)[1:-1])
        yield
    yield from _pass(reader, out)


def _escape(reader: Reader, out: Out) -> Steps[None]:
    yield from _pass(reader, out)
    if reader.char in ESCAPES:
        yield from _pass(reader, out)
        return
    if reader.char != "u":
        raise Malformed
    yield from _pass(reader, out)
    for _ in range(4):
        if reader.char not in HEX:
            raise Malformed
        yield from _pass(reader, out)


def _scalar(reader: Reader, out: Out) -> Steps[None]:
    if (word := WORDS.get(reader.char)) is not None:
        for char in word:
            if reader.char != char:
                raise Malformed
            yield from _pass(reader, out)
        return
    found = ""
    while reader.char in IN_NUMBER:
        found += reader.char
        yield from _pass(reader, out)
    if not NUMBER.fullmatch(found):
        raise Malformed
