"""Calls in Python's syntax, as Llama 4 and others write them: `[f(a=1, b="x"), g()]`. Arguments become JSON as they come.

Only literals are arguments: strings, numbers, True, False, None, lists and dictionaries with strings as keys; JSON's own words are taken
too. Used by `formats`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from radixpd.text.tool_calls.json_text import HEX, NUMBER
from radixpd.text.tool_calls.reader import END, Malformed, Reader, Steps

__all__ = ["script"]

BEGIN, END_MARK = "<|python_start|>", "<|python_end|>"
IN_NAME = "_.:-"  # besides letters and digits
FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
BEHIND = frozenset(" \t\r\n,()[]{}=:'\"")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\\": "\\", "'": "'", '"': '"'}
WIDTHS = {"x": 2, "u": 4, "U": 8}
CLOSERS = {"[": "]", "{": "}"}

Out = Callable[[str], None]


def script(reader: Reader) -> Steps[None]:
    """See `Reader`."""
    while found := (yield from reader.until(BEGIN, "[")):
        try:
            if found == BEGIN:
                yield from reader.blanks()
                yield from reader.mark("[")
            yield from _calls(reader)
        except Malformed:
            continue
        yield from reader.closing(END_MARK)


def _calls(reader: Reader) -> Steps[None]:
    """From behind the bracket on."""
    while True:
        yield from reader.blanks()
        name = reader.known((yield from _word(reader, IN_NAME)))
        yield from _take(reader, "(")
        yield from _arguments(reader, name)
        if (yield from reader.closing("]", more=",")) != ",":
            return


def _arguments(reader: Reader, name: str) -> Steps[None]:
    """Keyword arguments up to the closing parenthesis."""
    reader.begin(name)
    reader.argue("{")
    yield from reader.blanks()
    first = True
    while reader.char != ")":
        reader.hold()
        key = yield from _word(reader, "_")
        yield from reader.blanks()
        yield from _take(reader, "=")
        reader.forget()
        reader.argue(f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        first = False
        yield from reader.blanks()
        yield from _value(reader, reader.argue)
        yield from reader.blanks()
        if reader.char == ",":
            yield
            yield from reader.blanks()
        elif reader.char != ")":
            raise Malformed
    reader.argue("}")
    reader.finish()
    yield


def _value(reader: Reader, out: Out) -> Steps[None]:
    """One literal, as JSON."""
    closers: list[str] = []
    while True:
        if (closer := CLOSERS.get(reader.char)) is not None:
            out(reader.char)
            yield
            yield from reader.blanks()
            closers.append(closer)
            if reader.char != closer:
                yield from _item(reader, out, closer)
                continue
        elif reader.char in ("'", '"'):
            yield from _string(reader, out)
        else:
            yield from _scalar(reader, out)
        while closers:
            yield from reader.blanks()
            more = reader.char == ","
            if more:
                yield
                yield from reader.blanks()
            if reader.char == closers[-1]:  # also behind a last comma
                out(closers.pop())
                yield
                continue
            if not more:
                raise Malformed
            out(", ")
            yield from _item(reader, out, closers[-1])
            break
        else:
            return


def _item(reader: Reader, out: Out, closer: str) -> Steps[None]:
    """What stands before the value of an item: the key, in a dictionary."""
    if closer == "]":
        return
    if reader.char not in ("'", '"'):
        raise Malformed
    yield from _string(reader, out)
    yield from reader.blanks()
    yield from _take(reader, ":")
    out(": ")
    yield from reader.blanks()


def _string(reader: Reader, out: Out) -> Steps[None]:
    quote = reader.char
    out('"')
    yield
    while reader.char != quote:
        if reader.char == END:
            raise Malformed
        if reader.char == "\\":
            yield from _escape(reader, out)
            continue
        out(json.dumps(reader.char, ensure_ascii=False)[1:-1])
        yield
    out('"')
    yield


def _escape(reader: Reader, out: Out) -> Steps[None]:
    reader.hold()
    yield
    char = reader.char
    if char == END:
        raise Malformed
    yield
    if char == "\n":
        reader.forget()  # a string goes on in the next line
        return
    if (width := WIDTHS.get(char)) is None:
        reader.forget()
        # Python keeps the backslash of an escape that it does not know.
        out(json.dumps(ESCAPES.get(char, "\\" + char), ensure_ascii=False)[1:-1])
        return
    digits = ""
    while len(digits) < width:
        if reader.char not in HEX:
            raise Malformed
        digits += reader.char
        yield
    if int(digits, 16) > 0x10FFFF:
        raise Malformed
    reader.forget()
    out(json.dumps(chr(int(digits, 16)))[1:-1])  # in ASCII: it may be half of a character


def _scalar(reader: Reader, out: Out) -> Steps[None]:
    reader.hold()
    text = ""
    while reader.char != END and reader.char not in BEHIND:
        text += reader.char
        yield
    if text in WORDS:
        found = WORDS[text]
    elif NUMBER.fullmatch(text):
        found = text
    elif FLOAT.fullmatch(text) and math.isfinite(float(text)):
        found = repr(float(text))
    else:
        raise Malformed
    reader.forget()
    out(found)


def _word(reader: Reader, more: str) -> Steps[str]:
    """Letters, digits, and these characters."""
    text = ""
    while reader.char.isalnum() or (reader.char != END and reader.char in more):
        text += reader.char
        yield
    if not text:
        raise Malformed
    return text


def _take(reader: Reader, char: str) -> Steps[None]:
    if reader.char != char:
        raise Malformed
    yield
