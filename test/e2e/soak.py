"""A long run near capacity: clients that send, abort, blunder and stream for minutes, while memory and pages are watched.

`Soak.run` first measures what the server can do (a closed loop), then offers a share of that rate as Poisson arrivals. Every answer is
compared with the same request served alone. Memory of each process is sampled all along. Used by test_soak.py and, for the long form,
by hand: `RADIXPD_SOAK_MINUTES=30 make test-full ARGS="-k soak -s"`.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from e2e.reference import Reference, solo
from e2e.servers import Server

__all__ = ["Report", "Soak"]

KINDS = 48
STREAMS = 0.5  # share of requests
ABORTS = 0.05
BLUNDERS = 0.05
CLIENTS = 16  # of the closed loop that measures capacity
SAMPLE = 5.0  # seconds between two looks at memory
BLUNDER_BODIES: list[dict[str, Any]] = [
    {"text": "x", "sampling_params": {"temperature": -1}},
    {"text": "x", "sampling_params": {"max_new_tokens": 10**7}},
    {"input_ids": [10**9]},
    {"text": 5},
    {},
    {"text": "x", "stream": True, "sampling_params": {"stop": [""]}},
]


def bodies(seed: int) -> list[dict[str, Any]]:
    """Requests of all kinds: short and long, shared prefixes, greedy and seeded, stop ids, log-probabilities."""
    dice = random.Random(seed)
    shared = [[dice.randrange(3, 259) for _ in range(160)] for _ in range(4)]
    made = []
    for index in range(KINDS):
        prompt = (shared[index % 4] if index % 2 else []) + [dice.randrange(3, 259) for _ in range(dice.randrange(8, 120))]
        how: dict[str, Any] = {"temperature": 0} if index % 3 else {"temperature": 1, "sampling_seed": index}
        sampling = {**how, "ignore_eos": True, "max_new_tokens": dice.randrange(8, 64)}
        made.append({"input_ids": prompt, "sampling_params": sampling, "return_logprob": index % 5 == 0})
    return made


@dataclass
class Report:
    """What happened. `rss[process]`: (seconds since the start, bytes), in order."""

    capacity: float = 0.0
    rate: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rss: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    late: float = 0.0  # the most that the client was behind its schedule, in seconds

    def flatness(self, warm: float) -> dict[str, float]:
        """Growth of each process: median memory of the last fifth after `warm` seconds over that of the first fifth, minus 1."""
        found = {}
        for name, samples in self.rss.items():
            late = [size for at, size in samples if at >= warm]
            part = max(1, len(late) // 5)
            found[name] = statistics.median(late[-part:]) / statistics.median(late[:part]) - 1
        return found


class Soak:
    """One server under watch."""

    def __init__(self, server: Server, *, seed: int = 3) -> None:
        self._server = server
        self._dice = random.Random(seed)
        self._bodies = bodies(seed)
        self._expected: list[Reference] = [solo(server, body)[0] for body in self._bodies]
        self._excused = 0
        self._number = 0
        self.report = Report()

    def run(self, *, seconds: float, measure: float, share: float) -> Report:
        """Measure capacity for `measure` seconds, then offer `share` of it for `seconds`."""
        asyncio.run(self._run(seconds, measure, share))
        greedy = self.report.counts["whole"]
        if self._excused > max(2, greedy // 100):
            self.report.wrong.append(f"{self._excused} near ties are too many to be honest ones")
        return self.report

    async def _run(self, seconds: float, measure: float, share: float) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._server.url, connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
            self.report.capacity = await self._capacity(session, measure)
            self.report.rate = share * self.report.capacity
            self.report.counts.clear()
            watch = asyncio.create_task(self._watch(seconds))
            await self._open_loop(session, seconds)
            await watch

    async def _capacity(self, session: aiohttp.ClientSession, seconds: float) -> float:
        """Requests a second that `CLIENTS` clients get through, the usual mixture."""
        end = time.monotonic() + seconds
        done = 0

        async def client() -> None:
            nonlocal done
            while time.monotonic() < end:
                await self._one(session)
                done += 1

        began = time.monotonic()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return done / (time.monotonic() - began)

    async def _open_loop(self, session: aiohttp.ClientSession, seconds: float) -> None:
        began = due = time.monotonic()
        open_ones: set[asyncio.Task[None]] = set()
        while due < began + seconds:
            due += self._dice.expovariate(self.report.rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))  # the arrival process itself
            self.report.late = max(self.report.late, time.monotonic() - due)
            task = asyncio.create_task(self._one(session))
            open_ones.add(task)
            task.add_done_callback(open_ones.discard)
        await asyncio.gather(*open_ones)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        draw = self._dice.random()
        try:
            if draw < BLUNDERS:
                await self._blunder(session)
            else:
                await self._ask(session, aborted=draw < BLUNDERS + ABORTS)
        except (aiohttp.ClientError, TimeoutError, AssertionError, ValueError) as error:
            self.report.wrong.append(f"{type(error).__name__}: {error}"[:500])

    async def _blunder(self, session: aiohttp.ClientSession) -> None:
        async with session.post("/generate", json=self._dice.choice(BLUNDER_BODIES)) as answer:
            body = await answer.json()
            assert answer.status == 400, f"{answer.status} {body}"
            assert body["error"]["message"]
        self.report.counts["refused"] += 1

    async def _ask(self, session: aiohttp.ClientSession, *, aborted: bool) -> None:
        kind = self._dice.randrange(KINDS)
        self._number += 1
        rid = f"soak-{self._number}"
        stream = self._dice.random() < STREAMS
        abort = asyncio.create_task(self._abort(session, rid)) if aborted else None
        async with session.post("/generate", json={**self._bodies[kind], "rid": rid, "stream": stream}) as answer:
            assert answer.status == 200, f"{answer.status} {await answer.text()}"
            found = await _last(answer) if stream else await answer.json()
        cut = found["meta_info"]["finish_reason"]["type"] == "abort"
        assert aborted or not cut, "ended without being asked to"
        self._excused += self._expected[kind].check(found, prefix=cut)
        self.report.counts["aborted" if cut else "whole"] += 1
        if abort is not None:
            await abort

    async def _abort(self, session: aiohttp.ClientSession, rid: str) -> None:
        await asyncio.sleep(self._dice.uniform(0, 0.3))  # the moment is part of the load
        async with session.post("/abort_request", json={"rid": rid}) as answer:
            assert answer.status == 200

    async def _watch(self, seconds: float) -> None:
        began = time.monotonic()
        processes = {"supervisor": self._server.process.pid, **self._server.children()}
        while (at := time.monotonic() - began) < seconds:
            for name, pid in processes.items():
                self.report.rss.setdefault(name, []).append((at, _rss(pid)))
            await asyncio.sleep(SAMPLE)  # the sampling interval


async def _last(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """The last event of a native stream, which must end with `[DONE]`."""
    last: dict[str, Any] | None = None
    async for line in answer.content:
        if line.startswith(b"data: [DONE]"):
            assert last is not None, "no event before [DONE]"
            return last
        if line.startswith(b"data: "):
            last = json.loads(line[6:])
            assert "error" not in last, last
    raise AssertionError("the stream ended without [DONE]")


def _rss(pid: int) -> int:
    """Private and shared resident bytes of a process, without its KV pool (a shared mapping that is resident from the start)."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return 1024 * (int(fields["VmRSS"].split()[0]) - int(fields["RssShmem"].split()[0]))
