"""Mistral's two formats behind `[TOOL_CALLS]`: a JSON list of calls, or (from tokenizer v11 on) a name, `[ARGS]` and the arguments, where
each call has a mark of its own. Used by `formats`.
"""

from __future__ import annotations

from radixpd.text.tool_calls import json_list
from radixpd.text.tool_calls.json_text import object_value
from radixpd.text.tool_calls.reader import BLANKS, END, Malformed, Reader, Steps

__all__ = ["BEGIN", "script"]

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
BEHIND_NAME = frozenset("[{") | BLANKS


def script(reader: Reader) -> Steps[None]:
    """See `Reader`."""
    while (yield from reader.until(BEGIN)):
        try:
            yield from reader.blanks()
            if reader.char == "[":
                yield from json_list.calls(reader)
            else:
                yield from _named(reader)
        except Malformed:
            continue


def _named(reader: Reader) -> Steps[None]:
    name = yield from _word(reader)
    yield from reader.blanks()
    while reader.char == "[":
        if (yield from reader.mark(CALL_ID, ARGS)) == CALL_ID:
            yield from _word(reader)
        yield from reader.blanks()
    yield from object_value(reader, name)


def _word(reader: Reader) -> Steps[str]:
    found = ""
    while reader.char != END and reader.char not in BEHIND_NAME:
        found += reader.char
        yield
    return found
