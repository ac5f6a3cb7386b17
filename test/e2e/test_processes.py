"""Processes: whatever dies, clients hear of it, and nothing is left; whatever cannot start says why in one line.

Every server has a session and a TMPDIR of its own, so that a process or a directory left behind is seen.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.processes import run_to_end, session_members
from e2e.servers import Server, free_port, tiny_chat_model, until

from radixpd.runtime.process_group import REPEAT

CLIENT_SECONDS = 10.0
SMALL = ("--max-total-tokens", "4096", "--threads", "1")


class Stream(threading.Thread):
    """A client that reads one stream; `began` is set at the first event."""

    def __init__(self, server: Server, *, tokens: int, **extra: Any) -> None:
        super().__init__(daemon=True)
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
        self.server = server
        self.body = {"text": f"stream of {tokens}", "sampling_params": sampling, **extra}
        self.began = threading.Event()
        self.events: list[dict[str, Any]] = []
        self.broken = ""  # how the connection ended, if not by [DONE]
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        try:
            for event in self.server.stream("/generate", self.body):
                self.events.append(event)
                self.began.set()
        except Exception as error:  # any way a connection breaks is an answer here
            self.broken = repr(error)
        self.ended = time.monotonic()
        self.began.set()

    @property
    def failed(self) -> bool:
        """The client can tell that something went wrong."""
        return bool(self.broken) or (bool(self.events) and "error" in self.events[-1])


@pytest.fixture
def home() -> Iterator[str]:
    """A short TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="e2e-") as directory:
        yield directory


@pytest.fixture
def lonely(tiny: Path, home: str, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that this test may hurt; the parameter, if any, is more flags."""
    server = Server(tiny, *SMALL, *getattr(request, "param", ()), TMPDIR=home)
    yield server
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def nothing_left(server: Server) -> bool:
    return not session_members(server.process.pid)


@pytest.mark.parametrize("victim", ["api", "scheduler", "runner"])
def test_kill_9_of_a_child_ends_the_group(lonely: Server, home: str, victim: str) -> None:
    streams = [Stream(lonely, tokens=1200 + index) for index in range(3)]
    for stream in streams:
        assert stream.began.wait(30)
    os.kill(lonely.children()[victim], signal.SIGKILL)
    killed = time.monotonic()
    for stream in streams:
        stream.join(CLIENT_SECONDS)
        assert stream.ended, "the client still waits"
        assert stream.ended - killed < CLIENT_SECONDS
        assert stream.failed, stream.events[-1]
    assert lonely.process.wait(CLIENT_SECONDS) not in (0, None)
    until(lambda: nothing_left(lonely), "no process is left", seconds=5)
    assert os.listdir(home) == []
    assert f"the {victim} process was killed by signal 9" in lonely.log
    if victim != "api":
        # The API process lives long enough to say what happened.
        assert all(stream.events[-1]["error"]["message"] for stream in streams)


def test_op_02_kill_9_of_the_supervisor_leaves_no_orphan(lonely: Server) -> None:
    stream = Stream(lonely, tokens=3000)
    assert stream.began.wait(30)
    children = lonely.children()
    assert set(children) == {"api", "scheduler", "runner"}
    os.kill(lonely.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    assert lonely.process.wait(5) == -signal.SIGKILL
    until(lambda: nothing_left(lonely), "no process is left", seconds=5)
    stream.join(CLIENT_SECONDS)
    assert stream.ended - killed < CLIENT_SECONDS
    assert stream.failed


@pytest.mark.parametrize("lonely", [("--watchdog-timeout", "8")], indirect=True)
def test_a_stopped_scheduler_is_noticed(lonely: Server, home: str) -> None:
    stream = Stream(lonely, tokens=3500)
    assert stream.began.wait(30)
    os.kill(lonely.children()["scheduler"], signal.SIGSTOP)
    health = until(lambda: (answer := lonely.get("/health")).status != 200 and answer, "/health tells", seconds=20)
    assert health
    assert (health.status, health.json) == (503, {"status": "unresponsive"})
    stream.join(20)
    assert not stream.broken
    assert stream.events[-1]["error"]["message"] == "the scheduler process has not answered for 8 s (--watchdog-timeout)"
    assert lonely.process.wait(CLIENT_SECONDS) == 1
    until(lambda: nothing_left(lonely), "no process is left", seconds=5)
    assert os.listdir(home) == []


@pytest.mark.parametrize("how", ["one", "group", "group and forwarded"])
def test_op_01_sigterm_lets_streams_finish(lonely: Server, home: str, how: str) -> None:
    streams = [Stream(lonely, tokens=600 + index) for index in range(4)]
    for stream in streams:
        assert stream.began.wait(30)
    (os.kill if how == "one" else os.killpg)(lonely.process.pid, signal.SIGTERM)
    until(lambda: refused(lonely), "new requests are refused", seconds=5)
    if how == "group and forwarded":
        lonely.process.terminate()
    assert not all(stream.ended for stream in streams), "the streams were too short to prove anything"
    for index, stream in enumerate(streams):
        stream.join(60)
        assert not stream.broken
        assert stream.events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 600 + index}
        assert len(stream.events[-1]["output_ids"]) == 600 + index
    assert lonely.process.wait(10) == 0
    assert nothing_left(lonely)
    assert os.listdir(home) == []


def refused(server: Server) -> bool:
    """Whether a new request is turned away, and /health too."""
    try:
        answer = server.post("/generate", {"text": "late", "sampling_params": {"max_new_tokens": 1}})
        health = server.get("/health").status
    except (ConnectionError, urllib.error.URLError):
        return True
    if answer.status == 200:
        return False
    assert (answer.status, health) == (503, 503)
    assert int(answer.headers["Retry-After"]) > 0
    return True


def test_a_later_signal_ends_streams_with_an_error(lonely: Server, home: str) -> None:
    stream = Stream(lonely, tokens=3500)
    assert stream.began.wait(30)
    os.kill(lonely.children()["runner"], signal.SIGSTOP)  # the stream stays open
    lonely.process.terminate()
    until(lambda: lonely.get("/health").status == 503, "draining", seconds=5)
    drained = time.monotonic()
    until(lambda: time.monotonic() - drained > REPEAT, "the next signal is another one")
    assert not stream.ended
    asked = time.monotonic()
    lonely.process.terminate()
    assert lonely.process.wait(10) != 0
    assert time.monotonic() - asked < 5
    stream.join(CLIENT_SECONDS)
    assert not stream.broken
    assert stream.events[-1]["error"]["message"] == "the server was told to stop at once"
    assert sum("error" in event for event in stream.events) == 1
    assert nothing_left(lonely)
    assert os.listdir(home) == []


def test_op_03_busy_port_is_told_before_weights_load(tiny: Path, home: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # A folder without weights: had they been looked at first, the error would speak of them.
        ended = run_to_end("--model-path", "/nonexistent/model", "--port", str(port), TMPDIR=home)
        own = float(run_to_end("--version").seconds)
    assert ended.code == 2
    assert str(port) in ended.error
    assert "--port" in ended.error
    assert "model" not in ended.error
    assert ended.seconds - own < 2
    assert ended.left == {}
    assert os.listdir(home) == []


def broken_model(directory: Path, what: str) -> Path:
    """A model folder that lacks something or holds nonsense."""
    tiny_chat_model(directory)
    if what == "config":
        (directory / "config.json").unlink()
    elif what == "weights":
        (directory / "model.safetensors").unlink()
    elif what == "tokenizer":
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer_config.json").unlink()
    else:
        config = json.loads((directory / "config.json").read_text())
        config["architectures"] = ["BananaForCausalLM"]
        config["model_type"] = "banana"
        (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model-path", "/nonexistent/model"), ("/nonexistent/model", "--model-path")),
        (("--model-path", "{tiny}", "--max-total-tokens", "2000000000"), ("--max-total-tokens", "2000000000", "memory")),
        (("--model-path", "{tiny}", "--context-length", "100000"), ("--context-length", "100000", "4096")),
        (("--model-path", "{tiny}", "--chunked-prefill-sice", "32"), ("--chunked-prefill-sice", "--chunked-prefill-size")),
        (("--model-path", "{tiny}", "--speculative-algorithm", "EAGLE"), ("--speculative-algorithm", "radixpd")),
        (("--model-path", "{tiny}", "--tp-size", "2"), ("--tp-size", "2")),
        (("--model-path", "{tiny}", "--page-size", "many"), ("--page-size", "many")),
        (
            ("--model-path", "{tiny}", "--chunked-prefill-size", "-1", "--enable-mixed-chunk"),
            ("--enable-mixed-chunk", "--chunked-prefill-size"),
        ),
        (("--model-path", "{tiny}", "--kv-events-config", '{"endpoint": "tcp://256.0.0.1:1"}'), ("--kv-events-config", "256.0.0.1")),
        (("--model-path", "{tiny}", "--host", "203.0.113.7"), ("--host", "203.0.113.7")),
        (("--port", "1"), ("--model-path",)),
    ],
    ids=["path", "pool", "context", "misspelt", "known", "value", "number", "pair", "events", "host", "no-model"],
)
def test_op_05_start_errors_are_one_line(tiny: Path, home: str, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    port = () if "--port" in flags else ("--port", str(free_port()))
    ended = run_to_end(*(str(tiny) if flag == "{tiny}" else flag for flag in flags), *port, TMPDIR=home)
    assert ended.code not in (0, None)
    assert ended.error.startswith("radixpd: error: ")
    for word in words:
        assert word in ended.error
    assert ended.seconds < 10
    assert ended.left == {}
    assert os.listdir(home) == []


@pytest.mark.parametrize(
    ("what", "words"),
    [("config", ("config.json",)), ("weights", ("safetensors",)), ("tokenizer", ("tokenizer",)), ("architecture", ("BananaForCausalLM",))],
)
def test_op_05_broken_model_folders_are_one_line(tmp_path: Path, home: str, what: str, words: tuple[str, ...]) -> None:
    model = broken_model(tmp_path, what)
    ended = run_to_end("--model-path", str(model), "--port", str(free_port()), *SMALL, TMPDIR=home)
    assert ended.code not in (0, None)
    assert str(model) in ended.error
    for word in words:
        assert word in ended.error
    assert ended.left == {}
    assert os.listdir(home) == []


def test_op_04_a_dead_proxy_does_not_matter(tiny: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    server = Server(tiny, *SMALL, http_proxy=dead, HTTP_PROXY=dead, https_proxy=dead, all_proxy=dead, no_proxy="")
    assert len(server.generate(text="a", sampling_params={"max_new_tokens": 3, "ignore_eos": True})["output_ids"]) == 3
    assert server.close() == 0
