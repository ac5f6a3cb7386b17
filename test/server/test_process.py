"""The real API process, spawned as the supervisor does it, with the fake engine at the other end of its links."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from fake_engine import FakeEngine, make_resolved
from server.events import parse_events

from radixpd.config.resolve import to_json
from radixpd.config.settings import ServerSettings
from radixpd.runtime.messages import Generate, Shutdown

ENDLESS = {"text": "abc", "stream": True, "sampling_params": {"ignore_eos": True, "max_new_tokens": 400}}


class Process:
    """One API process."""

    def __init__(self, process: asyncio.subprocess.Process, engine: FakeEngine, url: str) -> None:
        self.process = process
        self.engine = engine
        self.url = url
        self.http = aiohttp.ClientSession(url)
        self.log: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())

    async def until(self, path: str, status: int) -> None:
        """Ask until the answer has this status."""
        async with asyncio.timeout(20):
            while True:
                async with self.http.get(path) as response:
                    if response.status == status:
                        return

    def tell(self, **line: str) -> None:
        """A line on the control pipe."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")

    async def exit_code(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 10)
        await self._reader
        return code

    async def open_stream(self) -> aiohttp.ClientResponse:
        """A stream that has sent its first event and goes no further."""
        self.engine.hold()
        before = len(self.engine.of(Generate))
        task = asyncio.create_task(self.http.post("/generate", json=ENDLESS))
        await self.engine.received(Generate, before + 1)
        self.engine.step()
        response = await task
        await response.content.readuntil(b"\n\n")
        return response


@pytest_asyncio.fixture
async def spawn(model_dir: Path, tmp_path: Path):
    started: list[Process] = []

    async def make(*, drain_timeout: float = 20.0, ready: bool = True, environment: dict[str, str] | None = None) -> Process:
        resolved = make_resolved(model_dir, server=ServerSettings(drain_timeout=drain_timeout))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.set_inheritable(True)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "radixpd.server.process", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                pass_fds=(listener.fileno(),), env={**os.environ, **(environment or {})},
            )  # fmt: skip
            launch = {"resolved": to_json(resolved), "directory": str(tmp_path), "parent": os.getpid(), "listen_fd": listener.fileno()}
            process.stdin.write(json.dumps(launch).encode() + b"\n")
            await process.stdin.drain()
            made = Process(process, FakeEngine(str(tmp_path)), url)
            started.append(made)
            await made.until("/health", 503)
        if ready:
            made.engine.start()
            await made.until("/health", 200)
        return made

    yield make
    for made in started:
        if made.process.returncode is None:
            made.process.kill()
            await made.process.wait()
        await made.http.close()
        made.engine.close()


async def test_it_starts_answers_and_drains(spawn) -> None:
    api = await spawn(environment={"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"})
    response = await api.open_stream()
    api.process.send_signal(signal.SIGTERM)
    await api.until("/health", 503)
    async with api.http.post("/generate", json={"text": "late"}) as late:
        assert late.status == 503
        assert "Retry-After" in late.headers
    api.engine.release()
    events = parse_events((await response.read()).decode())
    assert events[-2]["meta_info"]["finish_reason"]["type"] == "length"
    assert await api.exit_code() == 0
    assert sum("The server is fired up and ready to roll!" in line for line in api.log) == 1
    await api.engine.received(Shutdown)
    assert not [line for line in api.log if "Traceback" in line]


async def test_what_outlasts_the_drain_timeout_is_aborted(spawn) -> None:
    api = await spawn(drain_timeout=0.2)
    response = await api.open_stream()
    api.process.send_signal(signal.SIGTERM)
    events = parse_events((await response.read()).decode())
    assert "shutting down" in events[-1]["error"]["message"]
    assert await api.exit_code() == 0


async def test_a_failure_ends_requests_and_the_process(spawn) -> None:
    api = await spawn()
    response = await api.open_stream()
    api.tell(failed="the scheduler process was killed")
    events = parse_events((await response.read()).decode())
    assert events[-1]["error"]["message"] == "the scheduler process was killed"
    assert await api.exit_code() == 1


async def test_it_ends_with_its_supervisor(spawn) -> None:
    api = await spawn()
    api.process.stdin.close()
    assert await api.exit_code() == 1


@pytest.mark.parametrize("ready", [False, True])
async def test_sigterm_without_requests_ends_at_once(spawn, ready) -> None:
    api = await spawn(ready=ready)
    api.process.send_signal(signal.SIGTERM)
    assert await api.exit_code() == 0


async def test_no_torch_in_the_process(spawn) -> None:
    api = await spawn()
    maps = Path(f"/proc/{api.process.pid}/maps").read_text()
    assert "libtorch" not in maps
