"""The processes of `bench_router`: stub workers, and one router before them, ours or a peer's, on free ports of this machine.

Invariant: whatever was started is ended when its block ends, also when the start fails. A peer runs in its own Python (`--peers`), as its
project ships it; its flags are its defaults but for addresses, policy and quicker first looks at workers. Called by `bench_router`.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmark.processes import free_port, knows_all, running, wait_until
from radixpd.errors import ConfigError
from radixpd.mini_lb.pairing import Policies

__all__ = ["FAMILIES", "Fleet", "Peers", "Router", "start_fleet", "start_router"]

START = 60.0  # seconds until a process answers
STOP = 10.0
SETTLE_S = 0.3  # for tokenizers to be loaded, and for peers, which do not say what they know
FAMILIES = {"sglang-router": "sglang_router", "vllm-router": "vllm_router"}  # peers, and the module of each
BOOTSTRAP_PORT = 8998  # nobody listens there: stubs need no handoff


@dataclass(frozen=True, slots=True)
class Router:
    """One competitor. `family`: ours or a peer's; `policy`: how it chooses."""

    family: str
    policy: str

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.family} {self.policy}"


@dataclass(frozen=True, slots=True)
class Peers:
    """The Python that has the others, and which of them."""

    python: str
    families: tuple[str, ...]

    @staticmethod
    def find(python: str) -> Peers:
        """Which routers it can import; none for no Python."""
        if not python:
            return Peers("", ())
        found = [name for name, module in FAMILIES.items() if _imports(python, module)]
        return Peers(python, tuple(found))


@dataclass(frozen=True, slots=True)
class Fleet:
    """Stub workers that are up."""

    urls: tuple[str, ...]
    log: Path  # where routers write theirs

    def flush(self) -> None:
        """Empty caches and counters."""
        for url in self.urls:
            request = urllib.request.Request(url + "/flush_cache", data=b"", method="POST")
            with urllib.request.urlopen(request, timeout=START):
                pass

    def stats(self) -> list[dict[str, float]]:
        """What each worker has done since."""
        found = []
        for url in self.urls:
            with urllib.request.urlopen(url + "/stats", timeout=START) as answer:
                found.append(json.load(answer))
        return found


@contextmanager
def start_fleet(count: int, folder: Path, *, events: bool = True, flags: Sequence[str] = ()) -> Iterator[Fleet]:
    """So many stub workers; `folder` has their tokenizer."""
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            ports = ["--events", str(free_port()), "--replay", str(free_port())] if events else []
            command = [sys.executable, "-m", "benchmark.router_stub", "--tokenizer", str(folder), *ports, *flags]
            processes.append(stack.enter_context(running(command, stdout=subprocess.PIPE, stop=STOP)))
        yield Fleet(tuple(_url(process) for process in processes), folder / "routers.log")


@contextmanager
def start_router(router: Router, fleet: Fleet, peers: Peers, *, pairs: bool = False) -> Iterator[str]:
    """The router's URL, once it has answered a request through a worker, and ours knows all of them. `pairs`: the first worker is prefill,
    the others decode."""
    port = free_port()
    workers = ["--worker-urls", *fleet.urls]
    if pairs:
        workers = ["--prefill", fleet.urls[0], str(BOOTSTRAP_PORT), *(word for url in fleet.urls[1:] for word in ("--decode", url))]
    command = _command(router, peers, port, workers, pairs)
    with fleet.log.open("ab") as log, running(command, stdout=log, stderr=log, stop=STOP) as process:
        url = f"http://127.0.0.1:{port}"
        wait = partial(wait_until, name=router.name, process=process, seconds=START, why=partial(_end, fleet.log))
        wait(partial(_answers, url))
        if router.family == "radixpd":
            exact = Policies(router.policy, router.policy, router.policy).exact and not pairs
            wait(partial(knows_all, url, exact=exact))
        time.sleep(SETTLE_S)
        yield url


def _command(router: Router, peers: Peers, port: int, workers: list[str], pairs: bool) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(port)]
    match router.family:
        case "radixpd":
            more = ["--health-check-interval-secs", "0.5"]
            return [sys.executable, "-m", "radixpd.mini_lb", *where, *workers, "--policy", router.policy, *more]
        case "sglang-router":
            module, apart = "sglang_router.launch_router", ["--pd-disaggregation"]
        case "sglang mini-lb":
            mini = ["-m", "sglang_router.launch_router", "--mini-lb", "--pd-disaggregation"]
            return [peers.python, *mini, *where, *workers, "--policy", "random", "--prometheus-port", str(free_port())]
        case _:
            module, apart = "vllm_router.launch_router", ["--vllm-pd-disaggregation"]
    watched = ["--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"]
    return [peers.python, "-m", module, *where, *workers, "--policy", router.policy, *watched, *(apart if pairs else [])]


def _imports(python: str, module: str) -> bool:
    try:
        return subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=START).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--peers {python}: {error}") from None


def _url(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], START)[0]:
        raise ConfigError(f"a stub worker was not ready within {START:g} s")
    line = process.stdout.readline().decode().strip()
    if not line:
        raise ConfigError(f"a stub worker ended with code {process.wait()} before it was ready")
    return line


def _answers(url: str) -> bool:
    body = json.dumps({"model": "stub", "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except OSError:
        return False


def _end(log: Path) -> str:
    """The last words of a router."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"; it said last: {lines[-1][:500]}" if lines else ""
