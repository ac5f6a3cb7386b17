"""Real servers for end-to-end tests: `python -m radixpd.launch_server` (or `launch_pd`) in processes of its own, spoken to over HTTP.

`Server` starts one and waits for /health with a deadline; `close` drains it and fails the test if it does not exit cleanly.
`together` sends requests at once. `tiny_chat_model` writes a tiny random
model with a byte-level tokenizer and a chat template, so that every route works without any download.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["ASCII_BIAS", "ASCII_IDS", "Answer", "Server", "free_port", "tiny_chat_model", "together", "until"]

START_DEADLINE = 120.0
SETTLE_DEADLINE = 20.0
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 256 + len(SPECIALS)
ASCII_IDS = list(range(len(SPECIALS), len(SPECIALS) + 94))  # of the tiny model: "!" to "~", one token each
ASCII_BIAS = {str(token): -100 for token in range(VOCABULARY) if token not in ASCII_IDS}  # makes the tiny model write only those

Result = TypeVar("Result")


def together(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Results of calls made at the same time, in their order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def until(condition: Callable[[], Result], what: str, *, seconds: float = SETTLE_DEADLINE) -> Result:
    """Poll a real process until the condition holds (is true); its value."""
    deadline = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)  # bounded by the deadline above


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Answer:
    """One HTTP answer: status, headers and body (`json` parses it)."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Server:
    """One running server."""

    def __init__(
        self, model: str | Path, *flags: str, wait: bool = True, port: int = 0, module: str = "radixpd.launch_server", **environment: str
    ) -> None:
        self.port = port or free_port()
        self.told = False  # to end
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable,
            "-m",
            module,
            "--model-path",
            str(model),
            "--port",
            str(self.port),
            "--threads",
            "1",
            *flags,
        ]
        self.log_path = Path(os.environ["XDG_CACHE_HOME"]) / f"server-{self.port}.log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until /health answers 200; the log goes into the error when it never does."""
        deadline = time.monotonic() + START_DEADLINE
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            try:
                if self.get("/health", timeout=5).status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)  # polling a real process over HTTP, bounded by the deadline above
        raise AssertionError(f"not ready after {START_DEADLINE} s:\n{self.log}")

    @property
    def log(self) -> str:
        """Everything the server has printed."""
        return self.log_path.read_text()

    def children(self) -> dict[str, int]:
        """Process ids of the children by role: api, scheduler, runner."""
        modules = {
            "radixpd.server.process": "api",
            "radixpd.runtime.scheduler_process": "scheduler",
            "radixpd.runtime.runner_process": "runner",
        }
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            for module, name in modules.items():
                if module.encode() in words and parent == self.process.pid:
                    found[name] = int(entry.name)
        return found

    def request(self, method: str, path: str, body: Any = None, *, timeout: float = 120, headers: dict[str, str] | None = None) -> Answer:
        """One request; HTTP errors are answers too."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"content-type": "application/json", **(headers or {})}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    def get(self, path: str, **options: Any) -> Answer:
        """GET."""
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        """POST with a JSON body."""
        return self.request("POST", path, {} if body is None else body, **options)

    def generate(self, **body: Any) -> Any:
        """POST /generate, which must succeed."""
        answer = self.post("/generate", body)
        assert answer.status == 200, answer.body
        return answer.json

    def stream(self, path: str, body: Any, *, timeout: float = 120) -> Iterator[Any]:
        """Server-sent events of one request, parsed, up to `[DONE]` or an error event; an end without either is a `ConnectionError`."""
        request = urllib.request.Request(
            self.url + path, data=json.dumps({**body, "stream": True}).encode(), headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    text = line[6:].strip()
                    if text == b"[DONE]":
                        return
                    event = json.loads(text)
                    yield event
                    if "error" in event:
                        return
        raise ConnectionError("the stream ended without [DONE]")

    def server_info(self) -> Any:
        """GET /server_info."""
        return self.get("/server_info").json

    def pages(self) -> dict[str, float]:
        """KV pages by owner: free, tree, request."""
        lines = [line for line in self.get("/metrics").body.decode().splitlines() if line.startswith("radixpd:pages{")]
        return {line.split('owner="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def settled(self) -> dict[str, float]:
        """Wait until nothing runs or waits; the pages by owner then. No page may be lost or still held."""
        # The scheduler's own word: the load behind /metrics is fresh once it says so.
        until(self._idle, "no request runs or waits")
        assert self.metric("num_running_reqs") + self.metric("num_queue_reqs") == 0
        assert self.metric("num_used_tokens") == 0
        pages = self.pages()
        assert pages["request"] == 0
        assert (pages["free"] + pages["tree"]) * self.server_info()["page_size"] == self.metric("max_total_num_tokens")
        return pages

    def _idle(self) -> bool:
        """Nothing runs or waits, or holds pages; a room that only the other side has spoken of holds none."""
        (state,) = self.server_info()["internal_states"]
        return not state["in_flight"] and all(each["part"] == "awaiting_body" for each in state["requests"])

    def flush(self) -> None:
        """Empty the cache of an idle server."""
        self.settled()
        answer = self.post("/flush_cache")
        assert answer.status == 200, answer.body

    def metric(self, name: str) -> float:
        """The value of one gauge or counter of /metrics (without its prefix); samples with labels are added up."""
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in self.get("/metrics").body.decode().splitlines()
            if re.match(rf"radixpd:{name}(_total)?[ {{]", line)
        ]
        assert values, f"no metric {name}"
        return sum(values)

    def terminate(self) -> None:
        """SIGTERM, once: a second one means more."""
        if not self.told and self.process.poll() is None:
            self.told = True
            self.process.send_signal(signal.SIGTERM)

    def close(self, *, deadline: float = 30) -> int:
        """SIGTERM, and the exit code."""
        self.terminate()
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"no exit within {deadline} s of SIGTERM:\n{self.log}") from None


def tiny_chat_model(directory: Path, family: str = "llama", *, template: bool = True, **overrides: Any) -> Path:
    """A tiny random model that chats: byte-level tokenizer without merges, three special tokens, ChatML template."""
    from models.tiny import save_tiny
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index + len(SPECIALS) for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    document = json.loads(tokenizer.to_str())
    document["model"]["vocab"] |= {token: index for index, token in enumerate(SPECIALS)}
    document["added_tokens"] = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, t in enumerate(SPECIALS)
    ]
    options = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2}
    save_tiny(directory, family, **{**options, **overrides})
    (directory / "tokenizer.json").write_text(json.dumps(document))
    settings = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | ({"chat_template": TEMPLATE} if template else {})))
    return directory
