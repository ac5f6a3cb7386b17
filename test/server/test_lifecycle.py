"""Aborts, disconnects, overload, draining, failure, keys, and the routes beside generating."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest
from fake_engine import EOS, TEMPLATE
from server.events import parse_events

from radixpd.config.secret import Secret
from radixpd.config.settings import ObserveSettings, SchedulerSettings, ServerSettings
from radixpd.errors import EngineFailed
from radixpd.runtime.messages import Abort, Generate
from radixpd.server import info_api
from radixpd.server.process import open_service

ENDLESS = {"ignore_eos": True, "max_new_tokens": 400}
ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions"]


def body_for(path, **fields):
    shapes = {
        "/generate": {"text": "abc", "sampling_params": ENDLESS},
        "/v1/completions": {"prompt": "abc", "ignore_eos": True, "max_tokens": 400},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True, "max_tokens": 400},
    }
    return {**shapes[path], **fields}


async def open_stream(api, path, **fields):
    """A stream that has sent its first token and goes no further."""
    api.engine.hold()
    before = len(api.engine.of(Generate))
    task = asyncio.create_task(api.http.post(path, json=body_for(path, stream=True, **fields)))
    await api.engine.received(Generate, before + 1)
    api.engine.step()
    response = await task
    await response.content.readuntil(b"\n\n")
    return response


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_hangs_up_is_aborted(api, path, streamed) -> None:
    if streamed:
        response = await open_stream(api, path, rid="r")
        # A hard close: RST instead of FIN.
        response.connection.transport.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))
        response.close()
    else:
        api.engine.hold()
        task = asyncio.create_task(api.http.post(path, json=body_for(path, rid="r")))
        await api.engine.received(Generate)
        task.cancel()
    await api.engine.received(Abort)
    assert api.engine.of(Abort)[0].rid == "r"
    await asyncio.wait_for(api.service.client.idle(), 5)
    api.engine.release()
    await api.generate("still here")


async def test_every_sample_of_a_client_that_hangs_up_is_aborted(api) -> None:
    api.engine.hold()
    body = {"text": ["ab", "cd"], "sampling_params": {"n": 2}, "rid": ["x", "y"]}
    task = asyncio.create_task(api.http.post("/generate", json=body))
    await api.engine.received(Generate, 2)
    task.cancel()
    await api.engine.received(Abort, 4)
    assert sorted(abort.rid for abort in api.engine.of(Abort)) == ["x-0", "x-1", "y-0", "y-1"]


@pytest.mark.parametrize("name", ["r", "r-1"])
async def test_an_abort_by_rid_ends_the_answer(api, name) -> None:
    api.engine.hold()
    task = asyncio.create_task(api.generate("abc", rid="r", sampling={"n": 2}))
    await api.engine.received(Generate)
    answer = await api.post("/abort_request", {"rid": name})
    assert answer == {"aborted": 2 if name == "r" else 1}
    await api.engine.received(Abort, answer["aborted"])
    api.engine.release()
    kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in await task]
    assert kinds == (["abort", "abort"] if name == "r" else ["stop", "abort"])
    assert await api.post("/abort_request", {"rid": "unknown"}) == {"aborted": 0}
    await api.post("/abort_request", {}, status=400)


async def test_an_aborted_plain_openai_answer_is_an_error(api) -> None:
    api.engine.hold()
    task = asyncio.create_task(api.http.post("/v1/completions", json={"prompt": "abc"}))
    await api.engine.received(Generate)
    await api.post("/abort_request", {"abort_all": True})
    assert (await task).status == 499


async def test_a_live_rid_is_refused_and_free_again_after_its_end(api) -> None:
    response = await open_stream(api, "/generate", rid="r")
    error = (await api.post("/generate", {"text": "a", "rid": "r"}, status=400))["error"]
    assert (error["param"], error["code"]) == ("rid", "duplicate_rid")
    api.engine.release()
    await response.text()
    await api.post("/generate", {"text": "a", "rid": "r"})


async def test_over_the_queue_limit_is_503_at_once(make_api) -> None:
    api = await make_api(scheduler=SchedulerSettings(max_running_requests=2, max_queued_requests=4), max_running=2)
    api.engine.hold()
    tasks = [asyncio.create_task(api.http.post("/generate", json={"text": f"text {i}"})) for i in range(40)]
    _done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    while len(waiting) > 6:
        _done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    api.engine.release()
    answers = await asyncio.gather(*tasks)
    statuses = [answer.status for answer in answers]
    assert sorted(set(statuses)) == [200, 503]
    assert statuses.count(200) == 6
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status == 503)


async def test_before_the_engine_is_ready(make_api) -> None:
    api = await make_api(opened=False)
    assert (await api.http.get("/health")).status == 503
    for path in ROUTES:
        response = await api.http.post(path, json=body_for(path))
        assert response.status == 503
        assert "Retry-After" in response.headers
    assert (await api.http.get("/v1/models")).status == 200


async def test_draining_finishes_what_runs_and_refuses_the_rest(api) -> None:
    response = await open_stream(api, "/generate")
    api.service.manager.draining = True
    assert (await api.http.get("/health")).status == 503
    assert (await api.http.post("/generate", json={"text": "a"})).status == 503
    api.engine.release()
    assert parse_events(await response.text())[-2]["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("path", ROUTES)
async def test_a_failed_engine_ends_open_requests_with_one_error(api, path) -> None:
    response = await open_stream(api, path)
    plain = asyncio.create_task(api.http.post(path, json=body_for(path)))
    await api.engine.received(Generate, 2)
    api.engine.fail("the runner process was killed by signal 9")
    events = parse_events(await response.text())
    assert events[-1]["error"]["message"] == "the runner process was killed by signal 9"
    assert sum("error" in event for event in events if event != "[DONE]") == 1
    assert "[DONE]" not in events
    answer = await plain
    assert answer.status == 500
    assert (await answer.json())["error"]["message"] == "the runner process was killed by signal 9"
    assert (await api.http.post(path, json=body_for(path))).status == 500
    assert (await api.http.get("/health")).status == 503


async def test_fifty_probes_leave_nothing_behind(api) -> None:
    api.engine.hold()
    before = len(api.engine.seen)
    assert {(await api.http.get("/health")).status for _ in range(50)} == {200}
    assert len(api.engine.seen) == before


async def test_the_deep_probe_cancels_what_it_started(api, monkeypatch) -> None:
    assert (await api.http.get("/health_generate")).status == 200
    monkeypatch.setattr(info_api, "PROBE_SECONDS", 0.05)
    api.engine.hold()
    assert (await api.http.get("/health_generate")).status == 503
    await api.engine.received(Abort)
    await asyncio.wait_for(api.service.client.idle(), 5)


async def test_flush_is_refused_while_requests_run_and_works_right_after(api) -> None:
    response = await open_stream(api, "/generate")
    await api.post("/flush_cache", {}, status=400)
    api.engine.release()
    await response.text()
    for _ in range(20):
        await api.generate("abcSTx", sampling={"stop": "ST"})
        assert (await api.http.get("/flush_cache")).status == 200


async def test_health_tells_of_a_silent_scheduler(make_api, monkeypatch) -> None:
    monkeypatch.setattr("radixpd.runtime.client.TICK", 0.02)
    api = await make_api()
    async with asyncio.timeout(5):
        while not api.service.client.unresponsive:
            await asyncio.sleep(0)
    response = await api.http.get("/health")
    assert (response.status, await response.json()) == (503, {"status": "unresponsive"})
    await api.generate("it answers again")
    assert (await api.http.get("/health")).status == 200


async def test_a_warm_up_has_a_deadline(make_api) -> None:
    api = await make_api(opened=False, server=ServerSettings(watchdog_timeout=0.1))
    api.engine.hold()
    api.engine.start()
    with pytest.raises(EngineFailed, match=r"within 0\.1 s \(--watchdog-timeout\)"):
        await asyncio.wait_for(open_service(api.service), 10)
    assert (await api.http.get("/health")).status == 503


async def test_keys_cover_every_route_but_health(make_api) -> None:
    api = await make_api(server=ServerSettings(api_key=(Secret("K1-secret"), Secret("K2-secret"))))
    paths = {(route.method, route.resource.canonical) for route in api.http.app.router.routes() if route.method != "HEAD"}
    for method, path in sorted(paths | {("GET", "/nothing")}):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "K1-secret"}, {"Authorization": "Bearer "}):
            response = await api.http.request(method, path, headers=headers)
            assert response.status == (200 if path == "/health" else 401), path
    for key in ("K1-secret", "K2-secret"):
        assert (await api.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status == 200
    info = await (await api.http.get("/server_info", headers={"Authorization": "Bearer K1-secret"})).text()
    assert "-secret" not in info
    assert "api_key" not in info


async def test_information_routes(api) -> None:
    await api.generate("abc")
    for path in ("/server_info", "/get_server_info"):
        info = await (await api.http.get(path)).json()
        assert (info["page_size"], info["status"], info["internal_states"]) == (16, "ready", [{"in_flight": 0, "requests": []}])
        assert info["max_total_num_tokens"] == 4096
    model = await (await api.http.get("/get_model_info")).json()
    assert (model["model_path"], model["is_generation"]) == ("org/fake", True)
    assert (Path(model["tokenizer_path"]) / "tokenizer.json").is_file()
    assert (await (await api.http.get("/get_load")).json())["running"] == 0


async def test_metrics_are_read_from_state(api) -> None:
    await api.generate("abc")
    response = await open_stream(api, "/generate", rid="r")
    text = await (await api.http.get("/metrics")).text()
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")}
    assert values["radixpd:num_running_reqs"] == 1
    assert values["radixpd:num_queue_reqs"] == 0
    assert values["radixpd:max_total_num_tokens"] == 4096
    assert values["radixpd:time_to_first_token_seconds_count"] == 2  # without the warm-up
    assert values["radixpd:num_requests_total"] == 2
    assert 'radixpd:pages{model_name="org/fake",owner="free"} 255.0' in text
    await api.post("/abort_request", {"rid": "r"})
    await response.text()
    text = await (await api.http.get("/metrics")).text()
    assert 'radixpd:num_running_reqs{model_name="org/fake"} 0.0' in text
    assert 'radixpd:num_aborted_requests_total{model_name="org/fake"} 1.0' in text


async def test_metrics_can_be_off(make_api) -> None:
    api = await make_api(observe=ObserveSettings(enable_metrics=False))
    assert (await api.http.get("/metrics")).status == 404


async def test_tokenize_and_back(api) -> None:
    answer = await api.post("/tokenize", {"text": "größe"})
    assert answer["count"] == len(answer["tokens"]) == 7
    assert answer["max_model_len"] == 512
    assert await api.post("/detokenize", {"tokens": answer["tokens"]}) == {"text": "größe", "prompt": "größe"}
    many = await api.post("/v1/tokenize", {"prompt": ["a", "bc"]})
    assert many["count"] == [1, 2]
    assert await api.post("/v1/detokenize", {"tokens": many["tokens"]}) == {"text": ["a", "bc"], "prompt": ["a", "bc"]}
    chat = await api.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert (await api.post("/detokenize", {"tokens": chat["tokens"]}))["text"] == "<user>x\n<assistant>"
    assert await api.post("/detokenize", {"tokens": [EOS]}) == {"text": "", "prompt": "</s>"}
    shown = await api.post("/detokenize", {"tokens": [EOS], "skip_special_tokens": False})
    assert shown["text"] == "</s>"
    for bad in ({}, {"text": "a", "prompt": "b"}, {"text": 5}):
        await api.post("/tokenize", bad, status=400)
    for bad in ({"tokens": [-1]}, {"tokens": [10**9]}, {"tokens": ["a"]}, {"tokens": 5}):
        await api.post("/detokenize", bad, status=400)


@pytest.mark.parametrize("role", ["assistant", "user"])
async def test_tokenize_ends_with_the_text_of_an_open_turn(api, role) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": role, "content": "It is "}]
    open_turn = await api.post("/tokenize", {"messages": messages, "continue_final_message": True})
    assert (await api.post("/detokenize", {"tokens": open_turn["tokens"]}))["text"] == f"<user>x\n<{role}>It is "
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert (await api.post("/tokenize", both, status=400))["error"]["param"] == "continue_final_message"


async def test_tokenizer_info_is_what_a_client_needs_to_use_it(api) -> None:
    info = await (await api.http.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"], info["model_max_length"]) == (None, "</s>", 512)
    assert info["chat_template"] == TEMPLATE
    ids = (await api.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}))["tokens"]
    assert ids == [EOS]


async def test_two_hundred_parallel_streams(api) -> None:
    async def one(index):
        events = await api.events("/generate", {"text": f"stream {index}", "sampling_params": {}})
        return events[-2]["text"]

    assert await asyncio.gather(*(one(index) for index in range(200))) == [f"stream {index}" for index in range(200)]
