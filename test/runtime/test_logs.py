"""Log lines: one record is one line, whatever a client wrote; text and JSON say the same."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from radixpd.runtime.logs import formatter

EVIL = "a\nINFO b\x1b[31m\x9b\u2028\ud800 \"q\" = 'r'"


def record(message="event", *, fields=None, error=None):
    made = logging.LogRecord("x", logging.WARNING, "x.py", 1, message, (), error)
    if fields is not None:
        made.fields = fields
    return made


def test_text_has_time_process_level_message_and_fields() -> None:
    line = formatter("api", "text").format(
        record(fields={"rid": "job-7", "tokens": 3, "seconds": 0.5, "empty": "", "words": "a b", "d": {"x": 1}})
    )
    assert line.startswith("[20")
    assert line.endswith(' api] WARNING event rid=job-7 tokens=3 seconds=0.5 empty="" words="a b" d={"x": 1}')


def test_json_has_the_same_and_a_time_with_its_zone() -> None:
    line = json.loads(formatter("runner", "json").format(record(fields={"rid": "job-7", "tokens": 3})))
    when = line.pop("time")
    assert line == {"level": "WARNING", "process": "runner", "message": "event", "rid": "job-7", "tokens": 3}
    assert when[10] == "T"
    assert when[-6] in "+-"


@pytest.mark.parametrize("kind", ["text", "json"])
def test_nothing_a_client_wrote_leaves_its_line(kind) -> None:
    line = formatter("api", kind).format(record(fields={"rid": EVIL, "nested": {"text": [EVIL]}}))
    assert line.splitlines() == [line]
    assert all(char.isprintable() for char in line)
    line.encode()
    if kind == "json":
        assert json.loads(line)["rid"] == EVIL


def test_words_of_other_languages_stay_readable_in_text() -> None:
    assert formatter("api", "text").format(record(fields={"text": "日本 ß"})).endswith('text="日本 ß"')


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_trace_comes_with_its_message(kind) -> None:
    try:
        raise KeyError("gone")
    except KeyError:
        line = formatter("api", kind).format(record("it failed", error=sys.exc_info()))
    if kind == "json":
        assert len(line.splitlines()) == 1
        line = json.loads(line)["trace"]
    assert "KeyError: 'gone'" in line
