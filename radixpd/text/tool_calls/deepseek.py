"""DeepSeek's formats, one parser for both: V3 writes `function`, a separator, the name and a fenced JSON object; V3.1 name, separator and
object. Each call has marks around it, and all of them together have marks. Used by `formats`.
"""

from __future__ import annotations

from radixpd.text.tool_calls.json_text import object_value
from radixpd.text.tool_calls.reader import BLANKS, END, Malformed, Reader, Steps

__all__ = ["ALL_BEGIN", "ALL_END", "CALL_BEGIN", "CALL_END", "SEPARATOR", "script"]

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


def script(reader: Reader) -> Steps[None]:
    """See `Reader`."""
    while found := (yield from reader.until(ALL_BEGIN, CALL_BEGIN)):
        try:
            if found == ALL_BEGIN:
                yield from reader.blanks()
                yield from reader.mark(CALL_BEGIN)
            yield from _calls(reader)
        except Malformed:
            continue


def _calls(reader: Reader) -> Steps[None]:
    """From behind the first call's mark on."""
    while True:
        yield from _call(reader)
        found = yield from reader.closing(FENCE, CALL_END, ALL_END, more=CALL_BEGIN)
        while found in (FENCE, CALL_END):
            found = yield from reader.closing(CALL_END, ALL_END, more=CALL_BEGIN)
        if found != CALL_BEGIN:
            return


def _call(reader: Reader) -> Steps[None]:
    name = yield from _up_to(reader, SEPARATOR[0])
    yield from reader.mark(SEPARATOR)
    if name == "function":
        yield from reader.blanks()
        name = yield from _up_to(reader, "\n`{")
        yield from reader.blanks()
        yield from reader.mark("```json")
    yield from reader.blanks()
    yield from object_value(reader, name)


def _up_to(reader: Reader, stops: str) -> Steps[str]:
    """Text before one of these characters, without the blanks around it."""
    found = ""
    while reader.char != END and reader.char not in stops:
        found += reader.char
        yield
    return found.strip("".join(BLANKS))
