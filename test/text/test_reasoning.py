"""Thoughts and answers told apart, however the output was cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.config.settings import GenerationSettings
from radixpd.text.reading import Reading
from radixpd.text.reasoning import PARSERS, Splitter, starts_inside
from radixpd.text.tool_calls.formats import FORMATS


def split(inside: bool | None, pieces: list[str]) -> tuple[str, str, int]:
    splitter = Splitter(inside=inside)
    found = [*(splitter.feed(piece) for piece in pieces), splitter.end()]
    return "".join(thought for thought, _ in found), "".join(answer for _, answer in found), splitter.read


def test_the_flag_has_exactly_these_parsers() -> None:
    assert GenerationSettings.__dataclass_fields__["reasoning_parser"].metadata["choices"] == tuple(PARSERS)


@pytest.mark.parametrize(
    ("inside", "text", "thought", "answer"),
    [
        (None, "<think>\nWell.\n</think>\n\nYes.", "Well.", "Yes."),
        (None, "\n<think></think>Yes.", "", "Yes."),
        (None, "No thought <think>here</think>", "", "No thought <think>here</think>"),
        (None, "  plain", "", "  plain"),
        (None, "<think>cut short", "cut short", ""),
        (True, "Well.\n</think>\nYes.", "Well.", "Yes."),
        (True, "<think>\nWell.</think>Yes.", "Well.", "Yes."),
        (True, "a < b </thin", "a < b </thin", ""),
        (True, "a </think> b </think>", "a", "b </think>"),
        (False, "<think>is text</think>", "", "<think>is text</think>"),
    ],
)
def test_what_is_thought_and_what_is_said(inside: bool | None, text: str, thought: str, answer: str) -> None:
    assert split(inside, [text])[:2] == (thought, answer)


parts = st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", "think>", " ", "\n", "a", "é", "<"]), max_size=10).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([None, True, False]), parts, st.lists(st.integers(0, 80), max_size=4))
def test_how_a_text_is_cut_changes_nothing(inside: bool | None, text: str, places: list[int]) -> None:
    whole = split(inside, [text])
    at = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    assert split(inside, list(text)) == whole
    assert split(inside, [text[start:stop] for start, stop in pairwise(at)]) == whole


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([None, True, False]), parts)
def test_nothing_but_marks_and_blanks_is_lost(inside: bool | None, text: str) -> None:
    def bare(text: str) -> str:
        for mark in ("<think>", "</think>", " ", "\n"):
            text = text.replace(mark, "")
        return text

    thought, answer, _ = split(inside, [text])
    assert sorted(bare(thought) + bare(answer)) == sorted(bare(text)) or "<think" in thought + answer or "</think" in thought + answer


def test_the_prompt_tells_where_an_output_begins() -> None:
    qwen, forced = PARSERS["qwen3"], PARSERS["deepseek-r1"]
    assert starts_inside(qwen, "<|im_start|>assistant\n") is None
    assert starts_inside(qwen, "<|im_start|>assistant\n<think>\n") is True
    assert starts_inside(qwen, "<|im_start|>assistant\n<think>\n\n</think>\n\n") is False
    assert starts_inside(forced, "<｜Assistant｜>") is True
    assert starts_inside(forced, "<｜Assistant｜></think>") is False
    for parser in (qwen, forced):
        assert starts_inside(parser, "", continues="<think>so far") is True
        assert starts_inside(parser, "", continues="<think>done</think> The") is False
        assert starts_inside(parser, "", continues="The") is False


def test_characters_before_the_answer_are_counted() -> None:
    text = "<think>abc</think>\n\nyes"
    assert split(None, list(text))[2] == len("<think>abc</think>")
    assert split(None, ["yes"])[2] == 0
    assert split(True, ["abc"])[2] == 3


def test_calls_count_only_behind_the_thought() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reading = Reading(Splitter(inside=None), FORMATS["qwen25"].reader(["f"]))
    for char in f"<think>maybe {call}</think>{call}":
        reading.feed(char)
    reading.feed("", last=True)
    assert (reading.thought, reading.content, len(reading.calls)) == (f"maybe {call}", "", 1)
    assert reading.called
