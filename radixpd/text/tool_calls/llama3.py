"""Llama 3's format: JSON objects with `parameters`, separated by semicolons, at the beginning of the output or behind `<|python_tag|>`.
Used by `formats`.
"""

from __future__ import annotations

from radixpd.text.tool_calls.json_text import call_object
from radixpd.text.tool_calls.reader import Malformed, Reader, Steps

__all__ = ["BEGIN", "script"]

BEGIN = "<|python_tag|>"


def script(reader: Reader) -> Steps[None]:
    """See `Reader`."""
    reader.hold()
    yield from reader.blanks()
    if reader.char == "{":
        yield from _calls(reader)
    while (yield from reader.until(BEGIN)):
        yield from _calls(reader)


def _calls(reader: Reader) -> Steps[None]:
    try:
        while True:
            yield from reader.blanks()
            yield from call_object(reader)
            if not (yield from reader.closing(more=";")):
                return
    except Malformed:
        return
