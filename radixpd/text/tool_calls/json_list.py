"""A JSON list of calls: what a model must write that has no format of its own, and a part of Mistral's. Used by `formats`, `mistral`."""

from __future__ import annotations

import contextlib

from radixpd.text.tool_calls.json_text import call_object
from radixpd.text.tool_calls.reader import Malformed, Reader, Steps

__all__ = ["calls", "script"]


def script(reader: Reader) -> Steps[None]:
    """See `Reader`. The list stands at the beginning of the output."""
    reader.hold()
    yield from reader.blanks()
    if reader.char == "[":
        with contextlib.suppress(Malformed):  # what was kept back is content
            yield from calls(reader)
    yield from reader.until()


def calls(reader: Reader) -> Steps[None]:
    """The list, from its bracket on."""
    yield
    while True:
        yield from reader.blanks()
        yield from call_object(reader)
        if (yield from reader.closing("]", more=",")) != ",":
            return
