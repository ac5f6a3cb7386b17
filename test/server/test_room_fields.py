"""The `bootstrap_*` fields on the three generation routes: one prompt, many, samples, and what both servers answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server.events import parse_events

from radixpd.config.settings import DisaggregationSettings
from radixpd.core.handoff import Room
from radixpd.runtime.messages import Generate, Refused

HOST = "127.0.0.1"
PEER = f"{HOST}:8998"
MOST = 2**63 - 1
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
BATCHES = ("/generate", "/v1/completions")


@pytest.fixture
def make_role(make_api):
    async def make(mode: str, **fields: Any):
        return await make_api(disaggregation=DisaggregationSettings(disaggregation_mode=mode, **fields))

    return make


def body_of(path: str, text: Any = "abc", **fields: Any) -> dict[str, Any]:
    """A request; `n` and `max_tokens` where the route wants them."""
    n = fields.pop("n", 1)
    if path == "/generate":
        return {"text": text, "sampling_params": {"n": n}, **fields}
    if path == "/v1/completions":
        return {"prompt": text, "n": n, **fields}
    return {"messages": [{"role": "user", "content": text}], "n": n, **fields}


def rooms(host: Any = HOST, room: Any = 5, **fields: Any) -> dict[str, Any]:
    return {"bootstrap_host": host, "bootstrap_room": room, **{f"bootstrap_{name}": value for name, value in fields.items()}}


async def asked(api, path: str, body: dict[str, Any]) -> list[Room | None]:
    """The rooms that the scheduler heard of."""
    api.engine.seen.clear()
    await api.post(path, body)
    return [message.room for message in api.engine.of(Generate)]


async def refused(api, path: str, body: dict[str, Any], param: str, *words: str) -> None:
    api.engine.seen.clear()
    for mode in ({}, {"stream": True}):
        error = (await api.post(path, {**body, **mode}, status=400))["error"]
        assert error["param"] == param, error
        assert param in error["message"]
        assert all(word in error["message"] for word in words), error
    assert api.engine.of(Generate) == []


@pytest.mark.parametrize("path", ROUTES)
async def test_a_server_that_does_not_split(api, path) -> None:
    for name, value in (("host", HOST), ("port", 1), ("port", [1]), ("room", 0), ("host", [HOST]), ("room", [0])):
        await refused(api, path, body_of(path, **{f"bootstrap_{name}": value}), f"bootstrap_{name}", "--disaggregation-mode")
    await refused(api, path, body_of(path, **rooms()), "bootstrap_host")
    assert await asked(api, path, body_of(path, **rooms(None, None, port=None))) == [None]


@pytest.mark.parametrize("path", ROUTES)
async def test_one_prompt(make_role, path) -> None:
    prefill, decode = await make_role("prefill"), await make_role("decode")
    for body in (rooms(), rooms(port=None), rooms(port=8998), rooms([HOST], [5]), rooms([HOST], [5], port=[None])):
        assert await asked(prefill, path, body_of(path, **body)) == [Room(5)]
        assert await asked(decode, path, body_of(path, **body)) == [Room(5, PEER)]
    assert await asked(decode, path, body_of(path, **rooms("localhost", MOST, port=1))) == [Room(MOST, "localhost:1")]
    assert await asked(prefill, path, body_of(path, bootstrap_room=0)) == [Room(0)]
    for api in (prefill, decode):
        assert await asked(api, path, body_of(path)) == [None]
        await refused(api, path, body_of(path, bootstrap_host=HOST), "bootstrap_room")
        await refused(api, path, body_of(path, bootstrap_port=1), "bootstrap_room")
    await refused(decode, path, body_of(path, bootstrap_room=1), "bootstrap_host")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_pd_03_whoever_waits_for_a_room_hears_of_a_refusal(make_role, path, mode) -> None:
    api = await make_role(mode)
    await api.post(path, body_of(path, "abc" * 10**4), status=400)
    assert api.engine.of(Refused) == []
    error = (await api.post(path, body_of(path, "abc" * 10**4, **rooms()), status=400))["error"]
    await api.engine.received(Refused)
    assert api.engine.of(Refused) == [Refused(Room(5, PEER if mode == "decode" else ""), error["message"], 400)]


@pytest.mark.parametrize("path", BATCHES)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_pd_03_all_rooms_of_a_refused_batch_are_told(make_role, path, mode) -> None:
    api = await make_role(mode)
    for room in (5, [5, 6], [5, 6, -1, "x", MOST + 1]):
        api.engine.seen.clear()
        await api.post(path, body_of(path, ["abc", "abc" * 10**4], **rooms(room=room)), status=400)
        await api.engine.received(Refused, 2)
        assert [message.room.number for message in api.engine.of(Refused)] == [5, 6]
    api.engine.seen.clear()
    ids = {"input_ids": [1] * 10**5} if path == "/generate" else {"prompt": [1] * 10**5}
    await api.post(path, {**ids, **rooms(), "temperature": "hot", "sampling_params": {}}, status=400)
    await api.engine.received(Refused)
    assert [message.room.number for message in api.engine.of(Refused)] == [5]
    await api.post(path, {**ids, **rooms(host=5, port="x")}, status=400)
    assert len(api.engine.of(Refused)) == 1, "these name none"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_values_that_no_room_has(make_role, path, mode) -> None:
    api = await make_role(mode)
    for value in (-1, MOST + 1, 10**30):
        for room in (value, [value]):
            await refused(api, path, body_of(path, **rooms(room=room)), "bootstrap_room", "between 0 and 9223372036854775807")
    for value in (0, -1, 65_536):
        for port in (value, [value]):
            await refused(api, path, body_of(path, **rooms(port=port)), "bootstrap_port", "between 1 and 65535")
    for name, value in (("room", "5"), ("room", True), ("room", 0.5), ("room", [None]), ("port", "1"), ("host", 5), ("host", [None])):
        await refused(api, path, body_of(path, **{**rooms(), f"bootstrap_{name}": value}), f"bootstrap_{name}")
    for name, value in (("room", []), ("room", [1, 2]), ("host", []), ("host", [HOST, HOST]), ("port", []), ("port", [1, 1])):
        await refused(api, path, body_of(path, **{**rooms(), f"bootstrap_{name}": value}), f"bootstrap_{name}", "values for 1 prompts")
    await refused(api, path, body_of(path, **rooms("a" * 254)), "bootstrap_host", "253")


async def test_whom_decode_may_call(make_role) -> None:
    await refused(await make_role("decode"), "/generate", body_of("/generate", **rooms("10.0.0.1")), "bootstrap_host", "loopback")
    strict = await make_role("decode", disaggregation_peers=("127.0.0.1:7000",))
    await refused(strict, "/generate", body_of("/generate", **rooms()), "bootstrap_host", "--disaggregation-peers")
    assert await asked(strict, "/generate", body_of("/generate", **rooms(port=7000))) == [Room(5, "127.0.0.1:7000")]


@pytest.mark.parametrize("path", BATCHES)
async def test_many_prompts(make_role, path) -> None:
    prefill, decode = await make_role("prefill"), await make_role("decode")
    three = ["a", "b", "c"]
    lists = body_of(path, three, **rooms([HOST, "localhost", HOST], [9, 1, 4], port=[1, None, 3]))
    assert await asked(prefill, path, lists) == [Room(9), Room(1), Room(4)]
    assert await asked(decode, path, lists) == [Room(9, f"{HOST}:1"), Room(1, "localhost:8998"), Room(4, f"{HOST}:3")]
    counted = body_of(path, three, **rooms(room=7))
    assert await asked(prefill, path, counted) == [Room(7), Room(8), Room(9)]
    assert await asked(decode, path, counted) == [Room(7, PEER), Room(8, PEER), Room(9, PEER)]
    assert await asked(prefill, path, body_of(path, ["a"], **rooms(room=MOST))) == [Room(MOST)]
    assert await asked(prefill, path, body_of(path, ["a", "b"], **rooms(room=MOST - 1))) == [Room(MOST - 1), Room(MOST)]
    ids = {"input_ids" if path == "/generate" else "prompt": [[1], [2]], **rooms(room=3)}
    assert await asked(prefill, path, ids) == [Room(3), Room(4)]
    for api in (prefill, decode):
        await refused(api, path, body_of(path, ["a", "b"], **rooms(room=MOST)), "bootstrap_room", "2 prompts", "9223372036854775807")
        await refused(api, path, body_of(path, three, **rooms(room=[1, 2, 1])), "bootstrap_room", "bootstrap_room 1", "two prompts")
        await refused(api, path, body_of(path, three, **rooms(room=[1, 2])), "bootstrap_room", "2 values for 3 prompts")
        await refused(api, path, body_of(path, three, **rooms([HOST, HOST])), "bootstrap_host", "2 values for 3 prompts")
        assert await asked(api, path, body_of(path, three)) == [None] * 3


@pytest.mark.parametrize("path", ROUTES)
async def test_the_samples_of_a_prompt_share_its_room(make_role, path) -> None:
    api = await make_role("decode")
    api.engine.seen.clear()
    await api.post(path, body_of(path, n=3, **rooms()))
    (message,) = api.engine.of(Generate)
    assert (message.room, len(message.rids)) == (Room(5, PEER), 3)
    # Routers send one value for each sample of a lone prompt.
    listed = rooms([HOST] * 3, [8, 2, 6], port=[None] * 3)
    assert await asked(api, path, body_of(path, n=3, **listed)) == [Room(8, PEER)]
    await refused(api, path, body_of(path, n=2, **listed), "bootstrap_host", "3 values for 1 prompts")
    await refused(api, path, body_of(path, n=2, **rooms([HOST, "localhost"], [1, 2])), "bootstrap_host", "must be equal")
    await refused(api, path, body_of(path, n=2, **rooms(room=[1, -1])), "bootstrap_room", "between 0 and")
    if path in BATCHES:
        assert await asked(api, path, body_of(path, ["a", "b"], n=2, **rooms())) == [Room(5, PEER), Room(6, PEER)]
        await refused(api, path, body_of(path, ["a", "b"], n=2, **rooms([HOST] * 4, [1, 2, 3, 4])), "bootstrap_host", "for 2 prompts")


async def test_the_samples_that_the_best_are_taken_from_share_it_too(make_role) -> None:
    for mode, room in (("prefill", Room(5)), ("decode", Room(5, PEER))):
        api = await make_role(mode)
        api.engine.seen.clear()
        answer = await api.post("/v1/completions", {"prompt": "abc", "n": 2, "best_of": 3, **rooms()})
        (message,) = api.engine.of(Generate)
        assert (message.room, len(message.rids), len(answer["choices"])) == (room, 3, 2)


@pytest.mark.parametrize("n", [1, 2])
async def test_prefills_answer_on_the_native_route(make_role, n) -> None:
    api = await make_role("prefill")
    scores = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [3]}
    body = body_of("/generate", n=n, return_prompt_token_ids=True, **scores, **rooms())
    answers = await api.post("/generate", body)
    for answer in answers if n > 1 else [answers]:
        assert (answer["text"], answer["output_ids"], len(answer["prompt_token_ids"])) == ("", [], 3)
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 0)
        # Routers put both servers' lists together: the decode server has them all.
        for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
            assert (meta[f"input_{name}"], meta[f"output_{name}"]) == ([], [])
    events = await api.events("/generate", body)
    assert (len(events), events[-1]) == (n + 1, "[DONE]")
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [{"type": "length", "length": 0}] * n


@pytest.mark.parametrize("n", [1, 2])
async def test_prefills_answer_on_the_openai_routes(make_role, n) -> None:
    api = await make_role("prefill")
    for path, more, text in (
        ("/v1/completions", {}, ""),
        ("/v1/completions", {"logprobs": 2}, ""),
        ("/v1/completions", {"logprobs": 2, "echo": True}, "abc"),
        ("/v1/chat/completions", {}, ""),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}, ""),
    ):
        body = body_of(path, n=n, **more, **rooms())
        answer = await api.post(path, body)
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * n
        assert [choice.get("text", choice.get("message", {}).get("content")) for choice in answer["choices"]] == [text] * n
        assert answer["usage"]["completion_tokens"] == 0
        events = await api.events(path, {**body, "stream_options": {"include_usage": True}})
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == 0
        ends = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"] if choice["finish_reason"]]
        assert ends == ["length"] * n
        shown = [choice.get("text") or choice.get("delta", {}).get("content") for event in events[:-1] for choice in event["choices"]]
        assert [each for each in shown if each] == ([text] * n if text else [])


@pytest.mark.parametrize("path", ROUTES)
async def test_decodes_answer_is_the_usual_one(make_role, api, path) -> None:
    decode = await make_role("decode")
    more: dict[str, Any] = {"n": 2}
    if path == "/generate":
        more |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    elif path == "/v1/completions":
        more |= {"logprobs": 2, "echo": True}
    else:
        more |= {"logprobs": True, "top_logprobs": 2}
    assert telling(await decode.post(path, body_of(path, rid="x", **more, **rooms()))) == telling(
        await api.post(path, body_of(path, rid="x", **more))
    )
    assert telling(await decode.events(path, body_of(path, rid="x", **more, **rooms()))) == telling(
        await api.events(path, body_of(path, rid="x", **more))
    )


def telling(answer: Any) -> Any:
    """An answer without what differs from run to run."""
    if isinstance(answer, list):
        return [telling(item) for item in answer]
    if isinstance(answer, dict):
        return {name: telling(item) for name, item in answer.items() if name not in ("created", "e2e_latency", "id")}
    return answer


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("status", [400, 502, 503, 504])
async def test_a_handoff_that_fails_is_an_error_with_its_status(make_role, path, status) -> None:
    api = await make_role("decode")
    api.engine.hold()
    for stream in (False, True):
        waiting = asyncio.create_task(api.http.post(path, json=body_of(path, rid=f"r{stream}", stream=stream, **rooms())))
        await api.engine.received(Generate, 1 + stream)
        api.service.client.abort(f"r{stream}", "the prefill server gave up", status)
        response = await asyncio.wait_for(waiting, 10)
        assert response.status == status
        error = (await response.json())["error"]
        assert error["message"] == "the prefill server gave up"
        assert error["code"] == ("peer_failed" if status in (502, 504) else status)


async def test_a_handoff_that_fails_in_mid_stream_is_its_last_event(make_role) -> None:
    api = await make_role("decode")
    api.engine.hold()
    waiting = asyncio.create_task(api.http.post("/v1/completions", json=body_of("/v1/completions", rid="r", stream=True, **rooms())))
    await api.engine.received(Generate)
    api.engine.step()
    response = await asyncio.wait_for(waiting, 10)
    api.service.client.abort("r", "the prefill server is gone", 502)
    events = parse_events(await response.text())
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1]["error"]["code"] == "peer_failed"
