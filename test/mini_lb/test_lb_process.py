"""The load balancer as a process: how it starts, drains and ends, and what it does not load."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from mini_lb.lb_stubs import event, events_of, stream, until

from radixpd.mini_lb import __main__ as process

ROOT = Path(__file__).parents[2]
TEXT, DONE = event({"text": "x"}), b"data: [DONE]\n\n"
FILES = (("--workers-file", "/nowhere/file"), ("--request-log", "/nowhere/file"))


class Process:
    """`python -m radixpd.mini_lb` with a port of its own choice."""

    def __init__(self, running: asyncio.subprocess.Process) -> None:
        self.running = running
        self.log = ""
        self.url = ""

    async def read_until(self, words: str) -> str:
        assert self.running.stderr is not None
        async with asyncio.timeout(20):
            while not (found := re.search(words, self.log)):
                line = await self.running.stderr.readline()
                assert line, self.log
                self.log += line.decode()
        return found[1]

    async def end(self) -> int:
        async with asyncio.timeout(20):
            assert self.running.stderr is not None
            self.log += (await self.running.stderr.read()).decode()
            return await self.running.wait()


@pytest_asyncio.fixture
async def launch():
    made = []

    async def start(*flags: str, ready: bool = True) -> Process:
        running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "radixpd.mini_lb", "--health-check-interval-secs", "0.05", *flags),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        made.append(Process(running))
        if ready:
            made[-1].url = await made[-1].read_until(r"listens on (http://\S+)")
            await made[-1].read_until("(is up)")
        return made[-1]

    yield start
    for each in made:
        if each.running.returncode is None:
            each.running.kill()
            await each.running.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_drains(stubs, launch, number) -> None:
    go = asyncio.Event()

    async def script(request, visit):
        return await stream(request, TEXT, go, DONE)

    (a,) = await stubs("a", script=script)
    lb = await launch("--worker-urls", a.url, "--port", "0")
    async with aiohttp.ClientSession() as http, http.post(lb.url + "/generate", json={"text": "q"}) as response:
        assert await response.content.readuntil(b"\n\n") == TEXT
        lb.running.send_signal(number)
        await lb.read_until("(draining: 1 requests are open)")
        async with http.get(lb.url + "/health") as health:
            assert health.status == 503
        go.set()
        assert await response.read() == DONE
    assert await lb.end() == 0


async def test_what_outlives_the_drain_timeout_is_told(stubs, launch) -> None:
    never = asyncio.Event()

    async def script(request, visit):
        return await stream(request, TEXT, never)

    (a,) = await stubs("a", script=script)
    lb = await launch("--worker-urls", a.url, "--port", "0", "--drain-timeout", "0.1")
    async with aiohttp.ClientSession() as http, http.post(lb.url + "/generate", json={"text": "q"}) as response:
        await response.content.readuntil(b"\n\n")
        lb.running.terminate()
        (last,) = events_of(await response.read())
    assert last["error"]["message"] == "the load balancer is shutting down"
    assert await lb.end() == 0
    await until(lambda: a.visits[0].end == "gone", "the worker was told")


async def test_a_later_second_signal_ends_the_drain(stubs, launch) -> None:
    never = asyncio.Event()

    async def script(request, visit):
        return await stream(request, TEXT, never)

    (a,) = await stubs("a", script=script)
    lb = await launch("--worker-urls", a.url, "--port", "0")
    async with aiohttp.ClientSession() as http, http.post(lb.url + "/generate", json={"text": "q"}) as response:
        await response.content.readuntil(b"\n\n")
        lb.running.terminate()
        await lb.read_until("(draining)")
        lb.running.terminate()  # the same one, again
        await asyncio.sleep(process.REPEAT + 0.2)  # what is tested is a time
        lb.running.terminate()
        assert "error" in events_of(await response.read())[-1]
    assert await lb.end() == 0


async def test_a_port_that_is_taken_is_one_line(launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lb = await launch("--port", str(port), ready=False)
        assert await lb.end() == 2
    assert lb.log == (f"radixpd: error: port {port} on 127.0.0.1 is in use: stop what listens there or choose another with --port\n")


@pytest.mark.parametrize("flags", [("--policy", "best"), ("--host", "203.0.113.1"), ("--worker-urls", "x"), *FILES])
async def test_a_fault_is_one_line_and_code_2(launch, flags) -> None:
    lb = await launch(*flags, "--port", "0", ready=False)
    assert await lb.end() == 2
    assert lb.log.startswith("radixpd: error: ")
    assert lb.log.count("\n") == 1


async def test_sighup_reads_and_opens_files_again(stubs, launch, tmp_path) -> None:
    a, b = await stubs("a", "b")
    workers, log = tmp_path / "workers.json", tmp_path / "requests.jsonl"
    workers.write_text(json.dumps({"worker-urls": [a.url]}))
    flags = ("--workers-file", str(workers), "--request-log", str(log), "--health-check-interval-secs", "3600")
    lb = await launch(*flags, "--port", "0")
    async with aiohttp.ClientSession(lb.url) as http:

        async def ask() -> str:
            async with http.post("/generate", json={"text": "q"}) as response:
                return (await response.json())["text"]

        assert await ask() == "a"
        await until(lambda: log.read_text().count("\n") == 1, "its line is there")
        log.rename(tmp_path / "old")
        workers.write_text(json.dumps({"worker-urls": [b.url]}))
        lb.running.send_signal(signal.SIGHUP)
        await lb.read_until(f"(worker {re.escape(b.url)} is up)")
        assert await ask() == "b"
    lb.running.terminate()
    assert await lb.end() == 0
    assert [path.read_text().count("\n") for path in (tmp_path / "old", log)] == [1, 1]


async def test_it_loads_no_torch(stubs, launch) -> None:
    (a,) = await stubs("a")
    lb = await launch("--worker-urls", a.url, "--port", "0")
    async with aiohttp.ClientSession() as http, http.post(lb.url + "/generate", json={"text": "q"}) as response:
        assert response.status == 200
    maps = Path(f"/proc/{lb.running.pid}/maps").read_text()
    assert "uvloop" in maps
    assert "torch" not in maps
