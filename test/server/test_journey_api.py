"""Where requests are and how they went: in answers, by header, by name, and for the tenant's eyes alone."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest
from contract import Contract
from server.events import parse_events
from server.test_keys import ASK, bearer, keyed, running

from radixpd.core.journey import Journey
from radixpd.core.whereabouts import Whereabouts
from radixpd.runtime.journeys import KEPT, Ended, Journeys
from radixpd.runtime.messages import Control, Generate
from radixpd.server import openapi

CHAT = {"messages": [{"role": "user", "content": "abc"}]}
TEN = {"max_new_tokens": 10, "ignore_eos": True}


async def journey_of(api, rid: str, *, status: int = 200, key: str = ""):
    async with api.http.get(f"/journey/{rid}", headers=bearer(key) if key else {}) as response:
        assert response.status == status, await response.text()
        answer = await response.json()
        contract = Contract(api.http.server.app[openapi.DOCUMENT])
        contract.check("get", "/journey/{rid}", response.status, response.content_type, await response.read())
        return answer


async def requests_of(api, key: str = ""):
    async with api.http.get("/requests", headers=bearer(key) if key else {}) as response:
        assert response.status == 200
        Contract(api.http.server.app[openapi.DOCUMENT]).check("get", "/requests", 200, response.content_type, await response.read())
        return await response.json()


def loose(part: str, **fields) -> dict:
    return asdict(Whereabouts(**{"rid": None, "part": part, "since": 1.0, "waits_for": "d:1", "room": 7, "peer": "d:1", **fields}))


# ---- in answers -----------------------------------------------------------------------------------------------------------------------


async def test_every_native_answer_has_its_journey(api) -> None:
    api.engine.cached = 2
    journey = (await api.generate("hello"))["meta_info"]["kv_journey"]
    assert journey == asdict(Journey(prompt_tokens=5, decode_hit_tokens=2, local_computed_tokens=3, queue_ms=0.5))
    assert all(each["meta_info"]["kv_journey"]["prompt_tokens"] == 2 for each in await api.generate(["ab", "cd"], sampling={"n": 2}))


async def test_an_output_that_the_detokenizer_ends_has_one_too(api) -> None:
    api.engine.hold()
    asked = asyncio.create_task(api.generate("abcdef", rid="s", sampling={"stop": "c"}))
    await api.engine.received(Generate)
    for _ in range(4):
        api.engine.step()
    answer = await asyncio.wait_for(asked, 10)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "c"}
    assert answer["meta_info"]["kv_journey"]["local_computed_tokens"] == 6
    assert (await journey_of(api, "s"))["finish_reason"] == {"type": "stop", "matched": "c"}


async def test_a_stream_tells_it_with_the_end(api) -> None:
    events = (await api.events("/generate", {"text": "abc", "sampling_params": TEN}))[:-1]
    assert [("kv_journey" in event["meta_info"]) for event in events] == [False] * (len(events) - 1) + [True]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", CHAT)])
async def test_openai_answers_have_it_when_a_header_asks(api, path, body) -> None:
    async def usage(header: dict[str, str], **fields):
        async with api.http.post(path, json={**body, **fields}, headers=header) as response:
            assert response.status == 200
            contract = Contract(api.http.server.app[openapi.DOCUMENT])
            contract.check("post", path, 200, response.content_type, await response.read())
            if not fields.get("stream"):
                return (await response.json())["usage"]
            return [event.get("usage") for event in parse_events(await response.text())[:-1]]

    wish = {"X-Radixpd-Journey": "1"}
    assert "kv_journey" not in await usage({})
    assert "kv_journey" not in await usage({"X-Radixpd-Journey": "0"})
    found = await usage(wish)
    assert found["kv_journey"]["local_computed_tokens"] == found["kv_journey"]["prompt_tokens"] == found["prompt_tokens"]
    assert [each["prompt_tokens"] for each in (await usage(wish, n=2))["kv_journey"]] == [found["prompt_tokens"]] * 2
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = await usage(wish, stream=True, max_tokens=4, ignore_eos=True, stream_options=options)
    assert ["kv_journey" in each for each in told[:3]] == [False] * 3
    assert told[-1]["kv_journey"]["prompt_tokens"] == found["prompt_tokens"]
    assert all("kv_journey" not in (each or {}) for each in await usage(wish, stream=True))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_another_value_of_the_header_is_refused(api, path) -> None:
    async with api.http.post(path, json={"prompt": "a", **CHAT}, headers={"x-radixpd-journey": "yes"}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"], error["message"]) == (400, "X-Radixpd-Journey", "X-Radixpd-Journey must be 0 or 1, got 'yes'")


# ---- by name --------------------------------------------------------------------------------------------------------------------------


async def test_a_request_can_be_asked_for_while_it_lives_and_afterwards(api) -> None:
    api.engine.hold()
    asked = asyncio.create_task(api.generate("hello", rid="job", sampling=TEN))
    await api.engine.received(Generate)
    (listed,) = await requests_of(api)
    assert (listed["rid"], listed["part"], listed["waits_for"], listed["slot"]) == ("job", "decode", "runner", 0)
    live = await journey_of(api, "job")
    assert live == {"id": "job", "live": True, "whereabouts": listed, "finish_reason": None, "kv_journey": None}
    api.engine.step()
    assert api.engine.of(Control)[-1].args == {"rids": ["job"]}, "not the state of everybody"
    api.engine.release()
    answer = await asyncio.wait_for(asked, 10)
    ended = await journey_of(api, "job")
    assert (ended["live"], ended["whereabouts"]) == (False, None)
    assert ended["finish_reason"] == answer["meta_info"]["finish_reason"] == {"type": "length", "length": 10}
    assert ended["kv_journey"] == answer["meta_info"]["kv_journey"]
    assert await requests_of(api) == []


async def test_outputs_of_one_request_are_told_together_or_one_by_one(api) -> None:
    await api.generate("abc", rid="job", sampling={"n": 11})
    assert [each["id"] for each in await journey_of(api, "job")] == [f"job-{index}" for index in range(11)]
    assert (await journey_of(api, "job-3"))["id"] == "job-3"
    await journey_of(api, "job-11", status=404)
    api.engine.hold()
    asked = asyncio.create_task(api.generate("abc", rid="job", sampling={"n": 2, **TEN}))
    await api.engine.received(Generate, 2)
    assert [(each["id"], each["live"]) for each in await journey_of(api, "job")] == [("job-0", True), ("job-1", True)]
    await journey_of(api, "job-3", status=404)
    asked.cancel()


async def test_what_is_not_known_is_a_404_that_says_so(api) -> None:
    error = (await journey_of(api, "nobody", status=404))["error"]
    assert (error["type"], error["param"], error["code"]) == ("not_found_error", "rid", "request_not_found")
    await api.generate("abc", rid="secret", no_logs=True)
    await journey_of(api, "secret", status=404)


async def test_a_name_may_hold_slashes(api) -> None:
    await api.generate("abc", rid="a/b c")
    assert (await journey_of(api, "a%2Fb%20c"))["id"] == (await journey_of(api, "a/b c"))["id"] == "a/b c"


async def test_a_server_that_starts_says_so(make_api) -> None:
    api = await make_api(opened=False)
    assert (await api.http.get("/requests")).status == 503


def ended(rid: str, sample: int = 0) -> Ended:
    return Ended(rid, sample, None, 1, Journey(prompt_tokens=1))  # type: ignore[arg-type]


def test_only_the_last_requests_are_kept() -> None:
    journeys = Journeys(most=3)
    for name in "abcd":
        journeys.add(name, ended(name))
    assert [bool(journeys.of(name)) for name in "abcd"] == [False, True, True, True]
    journeys.begin("b")
    assert not journeys.of("b")
    for index in (1, 0):
        journeys.add("n", ended(f"n-{index}", index))
    assert [each.rid for each in journeys.of("n")] == ["n-0", "n-1"]
    assert [each.rid for each in journeys.of("n-1")] == ["n-1"]
    assert len(journeys.of("c")) == len(journeys.of("d")) == 1, "samples of one request take one place"
    assert KEPT == 1000


# ---- tenants --------------------------------------------------------------------------------------------------------------------------


async def test_tenants_see_their_own_requests_alone(make_api) -> None:
    api = await make_api(server=keyed("k1", "k2", salt_from_key=True))
    api.engine.loose = [loose("quarantine", pages=3)]
    api.engine.hold()
    tasks = [await running(api, "k1", "job", 1), await running(api, "k2", "job", 2), await running(api, "k2", "other", 3)]
    assert [each["rid"] for each in await requests_of(api, "k1")] == ["job"]
    assert [each["rid"] for each in await requests_of(api, "k2")] == ["job", "other"]
    await journey_of(api, "other", status=404, key="k1")
    api.engine.release()
    await asyncio.gather(*tasks)
    mine, theirs = (message.rids[0] for message in api.engine.of(Generate)[:2])
    assert mine != theirs
    assert (await journey_of(api, "job", key="k1"))["id"] == "job"
    for rid in ("other", theirs, mine):
        await journey_of(api, rid, status=404, key="k1")
    await asyncio.wait_for(asyncio.gather(*tasks), 10)


async def test_an_operator_sees_all_and_what_is_no_requests(make_api) -> None:
    api = await make_api(server=keyed("k1", "k2", admin="adm", salt_from_key=True))
    api.engine.loose = [loose("awaiting_body"), loose("quarantine", pages=3)]
    api.engine.hold()
    task = await running(api, "k1", "job", 1)
    name = api.engine.of(Generate)[0].rids[0]
    listed = await requests_of(api, "adm")
    assert [(each["rid"], each["part"], each["pages"]) for each in listed] == [
        (name, "decode", 0), (None, "awaiting_body", 0), (None, "quarantine", 3),
    ]  # fmt: skip
    assert (await journey_of(api, name, key="adm"))["live"]
    await journey_of(api, "job", status=404, key="adm")
    api.engine.release()
    await asyncio.wait_for(task, 10)
    assert not (await journey_of(api, name, key="adm"))["live"]


async def test_without_tenants_every_key_sees_everybody(make_api) -> None:
    api = await make_api(server=keyed("k1", "k2"))
    await (await api.http.post("/generate", json={**ASK, "rid": "job"}, headers=bearer("k1"))).read()
    assert (await journey_of(api, "job", key="k2"))["id"] == "job"
    api.engine.loose = [loose("draining")]
    assert [each["part"] for each in await requests_of(api, "k2")] == ["draining"]
