"""`LLM` on real processes, in this one: the same answers as a server, from every kind of caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.servers import Server, together

from radixpd.errors import BadRequest, ConfigError, EngineFailed
from radixpd.llm import LLM

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": 3000}
HELLO = [{"role": "user", "content": "hello"}]
SMALL = {"max_total_tokens": 4096, "threads": 1, "random_seed": 5}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(model_path=tiny, max_running_requests=8, **SMALL) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_runs(llm: LLM) -> Iterator[None]:
    """Whatever a test gave up has left the engine when it has."""
    yield
    llm.flush_cache()
    load = llm.get_server_info()["load"]
    assert (load["running"], load["waiting"], load["request_pages"], load["paused"]) == (0, 0, 0, False)


def without_times(answers: Any) -> Any:
    """What two answers to one prompt must share."""
    if isinstance(answers, list):
        return [without_times(answer) for answer in answers]
    changing = ("id", "e2e_latency", "cached_tokens", "kv_journey")
    meta = {name: value for name, value in answers["meta_info"].items() if name not in changing}
    return {**answers, "meta_info": meta}


def test_answers_are_those_of_a_server(llm: LLM, server: Server) -> None:
    for body in (
        {"text": "one", "sampling_params": GREEDY},
        {"text": ["one", "two"], "sampling_params": [GREEDY, {**GREEDY, "n": 2, "temperature": 1, "seed": 3}]},
        {"input_ids": [[5, 6, 7], [8]], "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
        {"text": "one", "sampling_params": GREEDY, "return_logprob": True, "return_text_in_logprobs": True},
    ):
        mine = dict(body)
        here = llm.generate(mine.pop("text", None), mine.pop("sampling_params"), **mine)
        there = server.generate(**body)
        assert without_times(here) == without_times(there)


def test_chat_is_the_servers_chat(llm: LLM, server: Server) -> None:
    answer = server.post("/v1/chat/completions", {"messages": HELLO, "temperature": 0, "max_tokens": 6}).json
    assert llm.chat(HELLO, {"temperature": 0, "max_new_tokens": 6})["text"] == answer["choices"][0]["message"]["content"]
    both = llm.chat([HELLO, [{"role": "user", "content": "bye"}]], GREEDY)
    assert [answer["meta_info"]["completion_tokens"] for answer in both] == [8, 8]
    with pytest.raises(BadRequest, match=r"prompt 1: messages\[0\].role must be one of"):
        llm.chat([HELLO, [{"role": "cook", "content": "x"}]], GREEDY)
    with pytest.raises(BadRequest, match="add_generation_prompt and continue_final_message exclude each other"):
        llm.chat(HELLO, GREEDY, add_generation_prompt=True, continue_final_message=True)


def test_more_prompts_than_a_request_may_have_and_a_bar(llm: LLM) -> None:
    shown: list[Any] = []

    class Bar:
        def __init__(self, *, total: int, **_: Any) -> None:
            self.n = 0
            shown.append(total)

        def set_postfix_str(self, text: str, *, refresh: bool) -> None:
            assert text.endswith(" output tokens/s")

        def update(self, count: int) -> None:
            self.n += count

        def close(self) -> None:
            shown.append(self.n)

    prompts = [[3 + index % 200, 3 + index // 200] for index in range(4500)]
    answers = llm.generate(prompts, {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}, use_tqdm=Bar)
    assert shown == [4500, 4500]
    assert len(answers) == 4500
    for index in (0, 7, 4499):
        alone = llm.generate(prompts[index], {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True})
        assert answers[index]["output_ids"] == alone["output_ids"]


def test_the_bar_stands_on_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixpd.offline.progress.DELAY", 0)
    llm.generate(["one"] * 3, GREEDY, use_tqdm=False)
    llm.generate("one", GREEDY)
    assert capsys.readouterr() == ("", "")
    llm.generate(["one"] * 3, GREEDY)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Prompts: 100%" in err
    assert "3/3" in err
    assert " output tokens/s" in err


def test_streams_grow_to_the_plain_answer(llm: LLM) -> None:
    plain = llm.generate(["one", "two"], GREEDY)
    last: dict[int, Any] = {}
    for event in llm.generate(["one", "two"], GREEDY, stream=True):
        index = event.pop("index")
        assert event["output_ids"][: len(last.get(index, {}).get("output_ids", []))] == last.get(index, {}).get("output_ids", [])
        last[index] = event
    assert without_times([last[0], last[1]]) == without_times(plain)
    for _ in llm.generate("one", LONG, stream=True):
        break
    stream = llm.generate("one", LONG, stream=True)
    next(stream)
    del stream


def test_threads_call_at_the_same_time(llm: LLM) -> None:
    alone = [llm.generate(f"{index}", GREEDY)["output_ids"] for index in range(6)]
    calls: list[Callable[[], Any]] = [lambda index=index: llm.generate(f"{index}", GREEDY) for index in range(6)]  # type: ignore[misc]
    assert [answer["output_ids"] for answer in together(calls)] == alone


def test_calls_from_a_running_loop(llm: LLM) -> None:
    plain = llm.generate(["one", "two"], GREEDY)

    async def body() -> None:
        # As in a notebook, whose cells run inside a loop.
        assert without_times(llm.generate(["one", "two"], GREEDY)) == without_times(plain)
        one, both = await asyncio.gather(llm.async_generate("one", GREEDY), llm.async_generate(["one", "two"], GREEDY))
        assert without_times([one, *both]) == without_times([plain[0], *plain])
        events = [event async for event in await llm.async_generate("one", GREEDY, stream=True)]
        assert without_times(events[-1]) == without_times(plain[0])
        async for _ in await llm.async_generate("one", LONG, stream=True):
            break
        with pytest.raises(BadRequest, match="temperature"):
            await llm.async_generate("one", {"temperature": -1})

    asyncio.run(body())


def test_a_cancelled_coroutine_leaves_nothing_running(llm: LLM) -> None:
    async def stream() -> None:
        async for _ in await llm.async_generate("one", LONG, stream=True):
            begun.set()

    async def body() -> None:
        async with asyncio.timeout(30):
            for work in (llm.async_generate(["one"] * 20, LONG), stream()):
                task = asyncio.create_task(work)
                while not llm.get_server_info()["load"]["running"]:
                    await asyncio.sleep(0.01)  # bounded by the timeout above
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                while llm.get_server_info()["load"]["running"]:
                    await asyncio.sleep(0.01)

    begun = asyncio.Event()
    asyncio.run(body())


def test_abort_by_name(llm: LLM) -> None:
    answers: list[Any] = []
    events = llm.generate("one", LONG, stream=True, rid="job")
    next(events)
    assert llm.abort("job") == 1
    answers += events
    assert answers[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert llm.abort("job") == 0
    assert llm.abort_all() == 0


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_holds_everything_up(llm: LLM, mode: str) -> None:
    plain = llm.generate("one", {**GREEDY, "max_new_tokens": 200})
    events = llm.generate("one", {**GREEDY, "max_new_tokens": 200}, stream=True)
    first = next(events)
    llm.pause_generation(mode)
    load = llm.get_server_info()["load"]
    assert (load["paused"], load["running"]) == (True, int(mode == "in_place"))
    if mode == "in_place":
        with pytest.raises(BadRequest, match="requests are running"):
            llm.flush_cache()
    else:
        llm.flush_cache()
    late: list[Any] = []
    waiting = threading.Thread(target=lambda: late.append(llm.generate("two", GREEDY)))
    waiting.start()
    while not llm.get_server_info()["load"]["waiting"] > (mode == "retract"):
        pass  # each turn asks the scheduler
    assert not late
    llm.continue_generation()
    *_, last = [first, *events]
    waiting.join(30)
    assert late[0]["meta_info"]["completion_tokens"] == 8
    if mode == "abort":
        assert last["meta_info"]["finish_reason"]["message"] == "aborted by a pause"
    else:
        assert without_times(last) == without_times(plain)
    with pytest.raises(BadRequest, match="mode must be one of"):
        llm.pause_generation("sleep")


def test_what_is_wrong_is_said_and_hurts_nobody(llm: LLM, tiny: Path) -> None:
    with pytest.raises(BadRequest, match=r"^prompt 1: .* 4096 tokens, but the request needs") as error:
        llm.generate(["fine", "x" * 5000], GREEDY)
    assert error.value.code == "context_length_exceeded"
    for settings, words in (
        ({"page_sice": 4}, "page_sice: there is no such setting; the nearest is page_size"),
        ({"page_size": 0}, "--page-size 0: it must be an integer from 1 to 512"),
        ({"port": 30000}, "port: this is for a server; an LLM inside a program takes no requests from outside"),
        ({"api_key": "sesame"}, "api_key: this is for a server"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode: this is for a server"),
        ({"max_queued_requests": 3}, "max_queued_requests: this is for a server"),
        ({"kv_events_config": {"endpoint": "tcp://256.0.0.1:1"}}, "--kv-events-config: cannot bind tcp://256.0.0.1:1"),
    ):
        with pytest.raises(ConfigError) as refused:
            LLM(model_path=tiny, **SMALL, **settings)
        assert str(refused.value).startswith(words)
    with pytest.raises(ConfigError, match="--model-path is missing"):
        LLM()


def test_two_engines_in_one_program(llm: LLM, tiny: Path) -> None:
    plain = llm.generate(["one", "two"], GREEDY)
    with LLM(model_path=tiny, page_size=4, **SMALL) as other:
        assert other.get_server_info()["page_size"] == 4
        calls: list[Callable[[], Any]] = [lambda: llm.generate(["one", "two"], GREEDY), lambda: other.generate(["one", "two"], GREEDY)]
        assert [without_times(answers) for answers in together(calls)] == [without_times(plain)] * 2
        waiting = other.generate("one", LONG, stream=True)
        next(waiting)
    with pytest.raises(EngineFailed, match="this LLM has been shut down"):
        list(waiting)
    with pytest.raises(EngineFailed, match="this LLM has been shut down"):
        other.generate("one")
    other.shutdown()
    assert without_times(llm.generate(["one", "two"], GREEDY)) == without_times(plain)


def test_server_info_shows_no_http(llm: LLM) -> None:
    info = llm.get_server_info()
    assert (info["max_running_requests"], info["max_total_num_tokens"], info["random_seed"]) == (8, 4096, 5)
    assert not info.keys() & {"host", "port", "api_key"}
    assert info["internal_states"] == [{"in_flight": 0, "requests": []}]
