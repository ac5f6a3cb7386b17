"""What the balancer reads of bodies, answers and loads, byte by byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixpd.errors import BadRequest
from radixpd.mini_lb.answers import Figures, Reader, read_figures
from radixpd.mini_lb.ask import Contact, read_ask, with_rooms
from radixpd.mini_lb.load_report import LoadReport, read_load

CONTACT = Contact("10.0.0.7", 8998)
TEXT = b'data: {"text": "a", "meta_info": {"completion_tokens": 3, "cached_tokens": 16}}\n\n'
DONE = b"data: [DONE]\n\n"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=12), VALUES, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_any_object_keeps_its_fields_and_gains_a_room(fields, indent, escaped) -> None:
    fields = {name: value for name, value in fields.items() if not name.startswith("bootstrap_")}
    raw = json.dumps(fields, indent=indent, ensure_ascii=escaped).encode() + b"\n "
    sent = json.loads(with_rooms(read_ask(raw), CONTACT))
    assert {name: value for name, value in sent.items() if not name.startswith("bootstrap_")} == fields
    assert {name for name in sent if name not in fields} == {"bootstrap_host", "bootstrap_port", "bootstrap_room"}


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"nonsense", b"[]", b"5", b'"x"', b"null", b'{"text": }', b'{"text": "a"} x', b"\xff", b"[" * 10**5]
)
def test_what_is_no_object_is_refused(raw) -> None:
    with pytest.raises(BadRequest):
        read_ask(raw)


def test_rooms_named_null_are_none() -> None:
    assert read_ask(b'{"text": "a", "bootstrap_room": null, "user": null}').prompts is None


def test_too_many_prompts_make_no_rooms() -> None:
    with pytest.raises(BadRequest, match="text may hold 4096 prompts"):
        read_ask(json.dumps({"text": ["a"] * 4097}).encode())


@pytest.mark.parametrize(
    ("body", "user"), [({"user": "u1"}, "u1"), ({"user": 5}, ""), ({"user": ["a"]}, ""), ({}, ""), ({"user": "\u00e9"}, "\u00e9")]
)
def test_the_user_is_a_text(body, user) -> None:
    assert read_ask(json.dumps({"text": "a", **body}).encode()).route.user == user


@pytest.mark.parametrize(
    ("body", "stream"), [({"stream": True}, True), ({"stream": False}, False), ({}, False), ({"stream": "yes"}, False)]
)
def test_whether_it_is_a_stream(body, stream) -> None:
    assert read_ask(json.dumps({"text": "a", **body}).encode()).route.stream is stream


def test_caches_are_kept_apart_by_what_keeps_them_apart() -> None:
    plain, salted = (read_ask(json.dumps({"text": "a", **more}).encode()).route for more in ({}, {"cache_salt": "s"}))
    assert plain.prompt == salted.prompt == b'"a"'
    assert plain.namespace != salted.namespace


@given(st.lists(st.sampled_from([TEXT, DONE, b": ping\n\n", b"data: {}\r\n\r\n"]), max_size=8), st.data())
def test_however_a_stream_is_cut_events_come_whole_and_all(events, data) -> None:
    raw = b"".join(events) + data.draw(st.sampled_from([b"", b"data: half", b"x\n"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    reader, passed = Reader(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)]):
        passed.append(reader.feed(raw[start:end]))
        assert passed[-1] == b"" or passed[-1].endswith((b"\n\n", b"\r\n\r\n"))
    assert b"".join(passed) == b"".join(events)
    assert b"".join(passed) + reader.rest() == raw
    assert reader.generated == (TEXT in events)


def test_the_last_event_with_figures_counts() -> None:
    reader = Reader()
    for part in (TEXT, b'data: {"text": "ab", "meta_info": {"completion_tokens": 9, "cached_tokens": 16}}\n\n', DONE):
        reader.feed(part)
    assert reader.figures() == Figures(9, 16)


@pytest.mark.parametrize(
    ("answer", "figures"),
    [
        ({"text": "a", "meta_info": {"completion_tokens": 4, "cached_tokens": 0}}, Figures(4, 0)),
        ([{"meta_info": {"completion_tokens": 4}}, {"meta_info": {"completion_tokens": 5, "cached_tokens": 7}}], Figures(9, 7)),
        ({"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}}, Figures(2, 32)),
        ({"usage": {"completion_tokens": 2, "prompt_tokens_details": None}}, Figures(2, None)),
        ({"error": {"message": "x"}}, Figures()),
        ({"meta_info": "odd"}, Figures()),
        ({"meta_info": {"completion_tokens": 10**400}}, Figures()),  # no float: nothing could be reckoned with it
        ({"usage": {"completion_tokens": -1}}, Figures()),
    ],
)
def test_figures_of_answers(answer, figures) -> None:
    assert read_figures(json.dumps(answer).encode()) == figures


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"text": ""}]},
        {"text": "", "output_ids": []},
        {"choices": [], "usage": {"completion_tokens": 1}},
        {"error": {"message": "x"}},
    ],
)
def test_rt_13_these_are_no_text(event) -> None:
    reader = Reader()
    reader.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert not reader.generated


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {"reasoning_content": "a"}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
        {"choices": [{"text": ""}, {"text": "b"}]},
        {"text": "", "output_ids": [5]},
        {"text": "a"},
    ],
)
def test_rt_13_these_are_text(event) -> None:
    reader = Reader()
    reader.feed(b"data:" + json.dumps(event).encode() + b"\n\n")
    assert reader.generated


def test_loads_of_ours_and_of_others() -> None:
    ours = {
        "running": 3, "waiting": 2, "parked": 1, "max_running": 8, "pages": 10, "free_pages": 4, "tree_pages": 5, "locked_pages": 2,
        "page_size": 16, "steps_total": 99, "anything": "else",
    }  # fmt: skip
    assert read_load(json.dumps(ours).encode()) == LoadReport(3, 3, 8, 160, 112, 99)
    ranks = [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2}, {"dp_rank": 1, "num_reqs": 1, "num_waiting_reqs": 0}]
    assert read_load(json.dumps(ranks).encode()) == LoadReport(running=4, waiting=2)


@pytest.mark.parametrize("figure", [10**400, -1])
@pytest.mark.parametrize("name", ["running", "waiting", "pages", "page_size", "num_reqs"])
def test_a_load_that_nobody_can_have_is_unknown(name, figure) -> None:
    assert read_load(json.dumps({"pages": 4, "page_size": 16, name: figure}).encode()) == LoadReport()


@given(st.binary(max_size=50) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_whatever_a_worker_says_is_read(raw) -> None:
    read_load(raw)
    read_figures(raw)
