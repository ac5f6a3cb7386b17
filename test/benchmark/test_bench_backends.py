"""What is sent to each route, and what is read from its answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from benchmark.backends import BACKENDS, Ask, Reader
from benchmark.timeline import Record

NATIVE, COMPLETIONS, CHAT = (BACKENDS[name] for name in ("radixpd", "radixpd-oai", "radixpd-oai-chat"))


def read(backend: str, *events: dict[str, Any], step: float = 1.0) -> tuple[Record, Reader]:
    """The record of a stream whose events come one second apart, the first at 1."""
    record = Record()
    reader = BACKENDS[backend].reader(record)
    for number, event in enumerate(events, start=1):
        reader.event(msgspec.json.encode(event), number * step)
    reader.close()
    return record, reader


def test_native_body() -> None:
    ask = Ask(extra={"sampling_params": {"temperature": 0.7}, "cache_salt": "x"})
    assert NATIVE.body(ask, (), "hi", 8) == {
        "text": "hi",
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 8, "ignore_eos": True},
        "stream": True,
        "cache_salt": "x",
    }
    assert NATIVE.body(Ask(), [([1], [2, 3])], [4], 8)["input_ids"] == [1, 2, 3, 4]


def test_openai_bodies() -> None:
    ask = Ask(model="m", ignore_eos=False, extra={"temperature": 1})
    assert COMPLETIONS.body(ask, [("a", "b")], "c", 8) == {
        "model": "m",
        "prompt": "abc",
        "max_tokens": 8,
        "temperature": 1,
        "ignore_eos": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "stream_options" not in CHAT.body(Ask(stream=False), (), "c", 8)
    assert CHAT.body(ask, (), "c", 8)["messages"] == [{"role": "user", "content": "c"}]


def native(text: str, tokens: int, finish: Any = None, cached: int = 3) -> dict[str, Any]:
    meta = {"prompt_tokens": 7, "completion_tokens": tokens, "cached_tokens": cached, "finish_reason": finish}
    return {"text": text, "output_ids": list(range(tokens)), "meta_info": meta}


def test_a_native_stream_tells_the_tokens_of_each_chunk() -> None:
    record, reader = read("radixpd", native("a", 1), native("abc", 3), native("abcd", 4, {"type": "length", "length": 4}))
    assert (record.times, record.counts) == ([1.0, 2.0, 3.0], [1, 2, 1])
    assert (record.text, record.output_ids, record.end) == ("abcd", [0, 1, 2, 3], 3.0)
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 4, 3)
    assert reader.finished


def test_a_native_event_without_new_tokens_is_no_chunk() -> None:
    record, _ = read("radixpd", native("a", 1), native("a", 1, {"type": "stop", "matched": "b"}))
    assert (record.times, record.end) == ([1.0], 2.0)


def test_a_native_abort_is_a_failure() -> None:
    record, _ = read("radixpd", native("a", 1, {"type": "abort", "message": "gone", "status_code": 499}))
    assert record.failure is not None
    assert (record.failure.kind, record.failure.detail) == ("aborted by the server", "gone")


def chunk(text: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}}


def test_a_completion_stream() -> None:
    # The second chunk holds back half a character: a token came all the same. The last brings nothing but the end.
    record, reader = read("radixpd-oai", chunk("a"), chunk(""), chunk("bc"), chunk("", "length"), USAGE)
    assert (record.times, record.end, record.text) == ([1.0, 2.0, 3.0], 4.0, "abc")
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 5, 3)
    assert reader.finished
    assert record.counted_by_server


def test_a_chat_stream_begins_with_content_not_with_the_role() -> None:
    record, reader = read("vllm-chat", delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop"), USAGE)
    assert (record.times, record.end, record.text) == ([2.0, 3.0], 4.0, "ab")
    assert reader.finished


def test_reasoning_is_output_too() -> None:
    record, _ = read("sglang-oai-chat", delta(role="assistant"), delta(reasoning_content="hm"), delta("stop", content="yes"), USAGE)
    assert (record.times, record.text) == ([2.0, 3.0], "hmyes")


def test_a_server_without_usage_is_counted_in_chunks_and_that_is_told() -> None:
    record, _ = read("vllm", chunk("a"), chunk("b"), chunk("", "stop"))
    assert (record.completion_tokens, record.counted_by_server, record.cached_tokens) == (2, False, None)


def test_usage_without_details_tells_no_cached_tokens() -> None:
    record, _ = read("vllm", chunk("a", "stop"), {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    assert (record.completion_tokens, record.cached_tokens) == (1, None)


@pytest.mark.parametrize("backend", ["radixpd", "radixpd-oai", "radixpd-oai-chat"])
def test_an_error_event_is_a_failure(backend: str) -> None:
    record, reader = read(backend, {"error": {"message": "the engine failed", "code": 500}})
    assert record.failure is not None
    assert record.failure.detail == "the engine failed"
    assert not reader.finished


@pytest.mark.parametrize(
    ("backend", "answer"),
    [
        ("radixpd", native("ab", 5, {"type": "length", "length": 5})),
        ("radixpd-oai", {"choices": [{"text": "ab", "finish_reason": "length"}], "usage": USAGE["usage"]}),
        ("radixpd-oai-chat", {"choices": [{"message": {"content": "ab"}, "finish_reason": "length"}], "usage": USAGE["usage"]}),
    ],
)
def test_whole_answers(backend: str, answer: dict[str, Any]) -> None:
    record = Record(streamed=False)
    reader = BACKENDS[backend].reader(record)
    reader.whole(msgspec.json.encode(answer), 2.0)
    reader.close()
    assert (record.text, record.completion_tokens, record.cached_tokens, record.end) == ("ab", 5, 3, 2.0)
    assert (record.times, record.counts, reader.finished) == ([], [], True)
