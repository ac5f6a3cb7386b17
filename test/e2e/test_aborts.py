"""Aborts, hang-ups, probes and a full queue.

Each test names the case of the project's list of field reports that it stands for; the default server must be alive after each.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from e2e.asks import GREEDY, body_for, raw_stream, refused, text_of
from e2e.servers import Server, together, until

pytestmark = pytest.mark.usefixtures("alive")


def test_ab_01_a_queued_request_can_be_aborted(serve: Callable[..., Server]) -> None:
    narrow = serve("--max-running-requests", "1", "--max-queued-requests", "4", "--threads", "1")
    long = narrow.stream("/generate", {"text": "long", "rid": "long", "sampling_params": {**GREEDY, "max_new_tokens": 3000}})
    next(long)

    def abort_when_queued() -> float:
        until(lambda: narrow.metric("num_queue_reqs") == 1, "the second one waits")
        narrow.post("/abort_request", {"rid": "second"})
        return time.monotonic()

    def second() -> tuple[Any, float]:
        return narrow.generate(text="second", rid="second", sampling_params={"max_new_tokens": 10}), time.monotonic()

    (answer, ended), aborted = together([second, abort_when_queued])
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert ended - aborted < 2
    assert narrow.metric("num_running_reqs") == 1
    narrow.post("/abort_request", {"rid": "long"})
    assert list(long)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(narrow.generate(text="third", sampling_params={**GREEDY, "max_new_tokens": 5})["output_ids"]) == 5
    narrow.settled()


def test_ab_01_abort_all(server: Server) -> None:
    streams = [server.stream("/generate", {"text": f"all {i}", "sampling_params": {**GREEDY, "max_new_tokens": 1500}}) for i in range(2)]
    for stream in streams:
        next(stream)
    assert server.post("/abort_request", {"abort_all": True}).json["aborted"] == 2
    assert [list(stream)[-1]["meta_info"]["finish_reason"]["type"] for stream in streams] == ["abort", "abort"]
    refused(server, "/abort_request", {})


def test_ab_02_hard_closes_end_only_their_own_requests(server: Server) -> None:
    expected = text_of(server, temperature=0, max_new_tokens=200)
    server.settled()
    aborted = server.metric("num_aborted_requests")
    gone = [raw_stream(server, 1000 + index) for index in range(3)]

    def hang_up() -> str:
        for connection in gone:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # RST, no goodbye
            connection.close()
        return expected

    kept = [lambda: text_of(server, temperature=0, max_new_tokens=200)] * 3
    assert together([*kept, hang_up]) == [expected] * 4
    server.settled()
    assert server.metric("num_aborted_requests") == aborted + 3


def test_ab_03_200_short_streams_at_once(server: Server) -> None:
    def one(index: int) -> Any:
        return list(server.stream("/generate", {"text": f"{index}", "sampling_params": {**GREEDY, "max_new_tokens": 8}}))[-1]

    found = together([lambda index=index: one(index) for index in range(200)])
    assert all(event["meta_info"]["finish_reason"] == {"type": "length", "length": 8} for event in found)


def test_ab_04_op_07_probes_leave_nothing_behind(server: Server) -> None:
    stream = server.stream("/generate", {"text": "busy", "sampling_params": {**GREEDY, "max_new_tokens": 2500}})
    next(stream)
    statuses = together([lambda: [server.get("/health").status for _ in range(10)]] * 50)
    assert {status for each in statuses for status in each} == {200}
    assert server.metric("num_running_reqs") + server.metric("num_queue_reqs") <= 1
    assert set(together([lambda: server.get("/health_generate").status] * 8)) == {200}
    assert list(stream)[-1]["meta_info"]["completion_tokens"] == 2500


def test_op_06_gauges_do_not_drift(server: Server) -> None:
    stream = server.stream("/generate", {"text": "one", "rid": "same", "sampling_params": {**GREEDY, "max_new_tokens": 600}})
    next(stream)
    assert refused(server, "/generate", {**body_for("/generate"), "rid": "same"})["code"] == "duplicate_rid"
    assert {server.post("/abort_request", {"rid": "same"}).status for _ in range(50)} == {200}
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    server.settled()
    assert server.metric("num_running_reqs") == server.metric("num_queue_reqs") == 0


def test_sc_05_a_full_queue_answers_503_at_once(serve: Callable[..., Server]) -> None:
    narrow = serve("--max-running-requests", "1", "--max-queued-requests", "4", "--threads", "1")

    def one() -> tuple[int, str | None]:
        answer = narrow.post("/generate", {"text": "many", "sampling_params": {**GREEDY, "max_new_tokens": 30}}, timeout=60)
        return answer.status, answer.headers.get("Retry-After")

    found = together([one] * 40)
    statuses = [status for status, _ in found]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 5
    assert all(int(again or 0) >= 1 for status, again in found if status == 503)
    narrow.settled()


def test_sc_06_http_answers_while_the_longest_prompt_runs(server: Server) -> None:
    def during() -> float:
        until(lambda: server.metric("num_running_reqs") > 0, "the prompt runs")
        started = time.monotonic()
        assert server.get("/v1/models").status == 200
        return time.monotonic() - started

    ids = [3 + (i * i) % 250 for i in range(4000)]
    _, seconds = together([lambda: server.generate(input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 90}), during])
    assert seconds < 1
