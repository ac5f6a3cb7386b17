"""A pause on a real server: streams stand still and go on as if nothing had been, and nobody takes the stillness for a death."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.servers import Server, until

SAMPLING = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 300}


@pytest.fixture
def running(server: Server) -> Iterator[Server]:
    """The shared server, which goes on whatever the test did."""
    yield server
    assert server.post("/continue_generation").status == 200
    server.settled()


class Reader(threading.Thread):
    """A client of one stream."""

    def __init__(self, server: Server, text: str) -> None:
        super().__init__(daemon=True)
        self.server, self.text = server, text
        self.events: list[Any] = []
        self.start()

    def run(self) -> None:
        for event in self.server.stream("/generate", {"text": self.text, "sampling_params": SAMPLING}):
            self.events.append(event)

    def end(self) -> Any:
        self.join(60)
        return self.events[-1]


def still(server: Server, reader: Reader) -> None:
    """No token comes while the server answers other questions."""
    before = len(reader.events)
    tokens = server.metric("generation_tokens")
    until(lambda: server.get("/get_load").json["paused"], "the load says so")
    for _ in range(20):
        assert server.get("/health").status == 200
    assert server.metric("generation_tokens") == tokens
    assert len(reader.events) <= before + 2  # what was on its way


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_stream_goes_on_after_a_pause(running: Server, mode: str) -> None:
    whole = running.generate(text="pause", sampling_params=SAMPLING)["output_ids"]
    reader = Reader(running, "pause")
    until(lambda: len(reader.events) > 3, "the stream has begun")
    assert running.post("/pause_generation", {"mode": mode}).json == {"success": True}
    still(running, reader)
    late = Reader(running, "late")
    until(lambda: running.metric("num_paused_reqs") == 2, "the late one waits too")
    assert not late.events
    load = running.get("/get_load").json
    assert (load["running"], load["waiting"]) == ((1, 1) if mode == "in_place" else (0, 2))
    assert running.post("/flush_cache").status == (400 if mode == "in_place" else 200)
    assert running.post("/continue_generation").json == {"success": True}
    assert reader.end()["output_ids"] == whole
    assert reader.end()["meta_info"]["finish_reason"]["type"] == "length"
    assert len(late.end()["output_ids"]) == 300
    assert running.metric("num_paused_reqs") == 0


def test_a_pause_may_abort(running: Server) -> None:
    reader = Reader(running, "pause")
    until(lambda: len(reader.events) > 3, "the stream has begun")
    assert running.post("/pause_generation", {}).status == 200
    finish = reader.end()["meta_info"]["finish_reason"]
    assert finish == {"type": "abort", "message": "aborted by a pause", "status_code": 499}
    assert running.metric("num_paused_reqs") == 0
    assert running.get("/get_load").json["paused"] is True


@pytest.mark.full
def test_no_watchdog_takes_a_pause_for_a_death(serve: Any) -> None:
    server = serve("--watchdog-timeout", "5")
    reader = Reader(server, "pause")
    until(lambda: len(reader.events) > 3, "the stream has begun")
    server.post("/pause_generation", {"mode": "in_place"})
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 9, "longer than the watchdog's time")
    assert server.get("/health").status == 200
    server.post("/continue_generation")
    assert len(reader.end()["output_ids"]) == 300
