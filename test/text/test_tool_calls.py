"""Parsers of tool calls: what each format means, and that neither the way a text is cut nor anything in it changes that."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixpd.config.settings import GenerationSettings
from radixpd.text.reading import Reading
from radixpd.text.tool_calls.formats import FORMATS, JSON_LIST, NAMES, Format

TOOLS = ("f", "get_weather", "ns.g-2")
ALL = {**{name: FORMATS[name] for name in ("llama3", "qwen25", "mistral", "pythonic", "deepseekv3", "deepseekv31")}, "list": JSON_LIST}
MARKS = {
    "llama3": ["<|python_tag|>", '{"name": "', '", "parameters": ', "; ", "}"],
    "qwen25": ["<tool_call>", "</tool_call>", '{"name": "', '", "arguments": ', "}"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", '{"name": "', ", "],
    "pythonic": ["<|python_start|>", "[", "]", "(", ")", "a=", "'", "True", ", ", "\\x4"],
    "deepseekv3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "\n```json\n", "<｜tool▁call▁end｜>"],
    "deepseekv31": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    "list": ["[", "]", '{"name": "', '", "arguments": ', "}", ", "],
}  # fmt: skip
CALLS = [("f", {"a": 1}), ("get_weather", {"stadt": "größe 日本 </tool_call> ]})'\"", "deep": {"x": [{"y": [[], {}]}]}}), ("ns.g-2", {})]

texts = st.text(st.sampled_from("ab é日\"'\\{}[]():,\n<>/｜x1"), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6, width=32) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.sampled_from(["a", "größe", "x_1"]), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(TOOLS), arguments), min_size=1, max_size=3)


def written(format: Format, made: Any, *, ascii: bool = False) -> str:
    """Calls as a grammar would have them written."""
    wire = format.wire
    assert wire is not None
    one = [f"{wire.before}{name}{wire.middle}{json.dumps(given, ensure_ascii=ascii)}{wire.after}" for name, given in made]
    return wire.opening + wire.between.join(one) + wire.closing


def in_python(made: Any) -> str:
    return "[" + ", ".join(f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in made) + "]"


def read(format: Format, pieces: list[str]) -> Reading:
    reading = Reading(reader=format.reader(TOOLS))
    for piece in pieces:
        reading.feed(piece)
    reading.feed("", last=True)
    return reading


def found(format: Format, *pieces: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls, which are all whole."""
    reading = read(format, list(pieces))
    assert all(call.whole for call in reading.calls)
    return reading.content, [(call.name, json.loads(call.arguments)) for call in reading.calls]


def test_the_flag_has_exactly_these_formats() -> None:
    field = GenerationSettings.__dataclass_fields__["tool_call_parser"]
    assert field.metadata["choices"] == NAMES


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("count", [1, 3])
def test_calls_with_text_around_them(name: str, count: int) -> None:
    format = JSON_LIST if name == "pythonic" else ALL[name]
    text = written(format, CALLS[:count])
    assert found(format, text) == ("", CALLS[:count])
    before = "" if name in ("llama3", "list", "pythonic") else "Let me see.\n"
    assert found(format, before + text + "\nDone.") == (before.strip() + "\nDone.", CALLS[:count])


@settings(max_examples=60, deadline=None)
@given(calls, st.booleans())
@pytest.mark.parametrize("name", ALL)
def test_what_is_written_is_read_back(name: str, made: Any, ascii: bool) -> None:
    if name == "pythonic":
        assert found(ALL[name], in_python(made)) == ("", made)
    else:
        assert found(ALL[name], written(ALL[name], made, ascii=ascii)) == ("", made)


def cuts(text: str, places: list[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:stop] for start, stop in pairwise(at)]


def soup(name: str) -> st.SearchStrategy[str]:
    """Marks of the format, names, whole calls, and anything, in any order; maybe cut short."""
    whole = calls.map(lambda made: in_python(made) if name == "pythonic" else written(ALL[name], made))
    parts = st.sampled_from([*MARKS[name], "f", "get_weather", "nope", '{"a": 1}', "\n", " ", '"']) | texts | whole
    return st.tuples(st.lists(parts, max_size=8).map("".join), st.integers(0, 40)).map(lambda made: made[0][: len(made[0]) - made[1]])


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", ALL)
def test_how_a_text_is_cut_changes_nothing(name: str, data: Any) -> None:
    text = data.draw(soup(name))
    whole = read(ALL[name], [text])
    for pieces in (list(text), cuts(text, data.draw(st.lists(st.integers(0, 200), max_size=6)))):
        other = read(ALL[name], pieces)
        assert (other.content, other.calls, other.called) == (whole.content, whole.calls, whole.called)
    for call in whole.calls[:-1] if not whole.called else whole.calls:
        assert call.name in TOOLS
        if call.whole:
            assert isinstance(json.loads(call.arguments), dict)


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", ALL)
def test_what_is_no_call_is_content_to_the_last_character(name: str, data: Any) -> None:
    text = data.draw(soup(name))
    reading = read(ALL[name], [text])
    if not reading.calls:
        assert reading.content == text


@given(calls, st.integers(0, 400))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", ALL)
def test_a_call_that_is_cut_short_keeps_what_there_is(name: str, made: Any, end: int) -> None:
    format = JSON_LIST if name == "pythonic" else ALL[name]
    text = written(format, made)[:end]
    reading = read(format, [text])
    for call, (wanted, given_) in zip(reading.calls, made):
        assert call.name == wanted
        assert json.dumps(given_, ensure_ascii=False).startswith(call.arguments)
    if reading.calls:  # what is left over is the beginning of a call that nothing is known of yet
        assert text.endswith(reading.content)
        assert reading.called or not reading.content


@pytest.mark.parametrize("name", ALL)
def test_arguments_come_as_they_are_written(name: str) -> None:
    text = in_python([("f", {"a": "x" * 50})]) if name == "pythonic" else written(ALL[name], [("f", {"a": "x" * 50})])
    reading = Reading(reader=ALL[name].reader(TOOLS))
    news = [reading.feed(char) for char in text]
    assert sum(any("x" in more for _, more in each.calls.values()) for each in news) == 50
    assert [name for each in news for name, _ in each.calls.values() if name] == ["f"]


@pytest.mark.parametrize(
    ("name", "text", "content", "made"),
    [
        ("qwen25", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", {"a": 1})]),
        ("qwen25", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ("qwen25", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ("qwen25", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]</tool_call>!', "!", [("f", {"a": 1}), ("f", {})]),
        ("qwen25", '<tool_call>{"name": "nope", "arguments": {}}</tool_call>', None, []),
        ("qwen25", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
        ("qwen25", "<tool_call>f(1)</tool_call>", None, []),
        ("qwen25", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "", [("f", {"a": "x\ny"})]),
        ("llama3", '{"answer": 42}', None, []),
        ("llama3", '{"name": "Ada", "parameters": {}}', None, []),
        ("llama3", 'So: <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "So:", [("f", {})]),
        ("llama3", '{"name": "f", "parameters": {}};{"name": "f", "parameters": {"a": 2}}', "", [("f", {}), ("f", {"a": 2})]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}', "", [("f", {"a": 1}), ("f", {})]),
        ("mistral", '[TOOL_CALLS] f{"a": 1}', "", [("f", {"a": 1})]),
        ("mistral", "[TOOL_CALLS] [1]", None, []),
        ("pythonic", "[f(a=1.5, b='it\\'s', c=[None, True,], d={'k': (1)}), f()]", None, None),
        ("pythonic", "[f(a=.5, b=1., c='\\u00e9\\n\\x41')]<|python_end|>", "", [("f", {"a": 0.5, "b": 1.0, "c": "é\nA"})]),
        ("pythonic", "<|python_start|>[f()]", "", [("f", {})]),
        ("pythonic", "As in [1], [f] and [nope()]", None, []),
        ("deepseekv3", "<｜tool▁calls▁begin｜> none", None, []),
        ("deepseekv3", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', "", [("f", {"a": 1})]),
        ("list", '  [{"name": "f", "parameters": {"a": 1}}]', "", [("f", {"a": 1})]),
        ("list", "[1, 2]", None, []),
    ],
)  # fmt: skip
def test_what_models_write(name: str, text: str, content: str | None, made: Any) -> None:
    """`content` None: the whole text is."""
    if made is None:
        assert not read(ALL[name], [text]).called
    else:
        assert found(ALL[name], text) == (text if content is None else content, made)


def test_arguments_that_break_off_are_followed_by_what_broke_them() -> None:
    reading = read(ALL["qwen25"], ['<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> and on'])
    assert [(call.name, call.arguments, call.whole) for call in reading.calls] == [("f", '{"a": ', False)]
    assert reading.content == "oops}}</tool_call> and on"
    assert not reading.called


@example("[" * 20_000)
@example('{"name": "f", "parameters": ' + '{"a":' * 20_000)
@example("<tool_call>" * 5_000)
@example(" " * 20_000)
@given(st.text(max_size=50))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("name", ALL)
def test_no_text_is_too_much(name: str, text: str) -> None:
    read(ALL[name], [text, text])
