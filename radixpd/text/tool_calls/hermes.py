"""Hermes' format, which Qwen 2.5 and 3 write too: `<tool_call>`, a JSON object, `</tool_call>`, for each call. Some models (SmolLM2) put
a list of objects between the marks. Used by `formats`.
"""

from __future__ import annotations

from radixpd.text.tool_calls import json_list
from radixpd.text.tool_calls.json_text import call_object
from radixpd.text.tool_calls.reader import Malformed, Reader, Steps

__all__ = ["BEGIN", "END_MARK", "script"]

BEGIN, END_MARK = "<tool_call>", "</tool_call>"


def script(reader: Reader) -> Steps[None]:
    """See `Reader`."""
    while (yield from reader.until(BEGIN)):
        try:
            yield from reader.blanks()
            yield from json_list.calls(reader) if reader.char == "[" else call_object(reader)
        except Malformed:
            continue
        yield from reader.closing(END_MARK)
