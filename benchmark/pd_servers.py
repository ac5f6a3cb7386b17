"""A prefill and a decode server for `bench_pd`, on one machine and one thread each, asked as a router would ask them.

Both are started with the same flags; `Pair.ask` sends one prompt to both and says what the decode server's stream and its journey tell.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmark.processes import free_port, healthy, running, wait_until
from radixpd.errors import EngineFailed

__all__ = ["Asked", "Pair"]

START = 300.0  # seconds until a server is ready
BY_HAND = "; start it by hand to see why"
ANSWER = 300.0  # seconds for one answer


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `times`: when each output token came, in seconds; `journey`: as the decode server tells it."""

    times: tuple[float, ...]
    journey: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers that are ready. `bootstrap`: prefill's control port."""

    prefill: str
    decode: str
    bootstrap: int

    @staticmethod
    @contextmanager
    def start(model: str, flags: Sequence[str]) -> Iterator[Pair]:
        """Raises ConfigError when a server ends before it is ready."""
        bootstrap, ports = free_port(), (free_port(), free_port())
        roles: tuple[tuple[str, list[str]], ...] = (("prefill", ["--disaggregation-bootstrap-port", str(bootstrap)]), ("decode", []))
        with ExitStack() as stack:
            found = [
                stack.enter_context(_server(model, port, ["--disaggregation-mode", role, *more, *flags]))
                for port, (role, more) in zip(ports, roles, strict=True)
            ]
            for url, process in found:
                wait_until(partial(healthy, url), "a server", process, seconds=START, why=lambda: BY_HAND)
            yield Pair(found[0][0], found[1][0], bootstrap)

    def ask(self, ids: Sequence[int], tokens: int) -> Asked:
        """`tokens` greedy output tokens after a prompt of these ids."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap,
            "bootstrap_room": secrets.randbits(63),
        }
        with ThreadPoolExecutor(1) as other:
            leg = other.submit(_post, self.prefill, body)
            times: list[float] = []
            last: dict[str, Any] = {}
            for event in _events(self.decode, {**body, "stream": True}):
                if len(event["output_ids"]) > len(times):
                    times += [time.monotonic()] * (len(event["output_ids"]) - len(times))
                last = event["meta_info"]
            leg.result(ANSWER)
        if len(times) != tokens:
            raise EngineFailed(f"{len(times)} of {tokens} tokens came: {last.get('finish_reason')}")
        return Asked(tuple(times), last["kv_journey"])


@contextmanager
def _server(model: str, port: int, flags: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "radixpd.launch_server", "--model-path", model, "--port", str(port), "--threads", "1", *flags]
    with running(command) as process:
        yield f"http://127.0.0.1:{port}", process


def _request(url: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(url + "/generate", data=json.dumps(body).encode(), headers={"content-type": "application/json"})


def _post(url: str, body: dict[str, Any]) -> Any:
    try:
        with urllib.request.urlopen(_request(url, body), timeout=ANSWER) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise EngineFailed(f"{url} answered {error.code}: {error.read()[:500].decode(errors='replace')}") from None


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with urllib.request.urlopen(_request(url, body), timeout=ANSWER) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    raise EngineFailed(f"{url}: {event['error']}")
                yield event
