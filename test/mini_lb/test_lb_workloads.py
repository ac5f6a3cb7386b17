"""Whole workloads through the live balancer: misses are spread, a hot prefix is shared out, and workers that die at random lose nothing.

The stubs answer in the test's loop; each has a prefix cache, so that hits are counted where they would happen.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import aiohttp
import pytest
from aiohttp import web
from mini_lb.lb_stubs import DEADLINE, Stub, event, until

from benchmark.router_cache import BlockCache
from benchmark.router_plans import BLOCK
from radixpd.mini_lb.prefix_index import text_keys

DONE = b"data: [DONE]\n\n"
KV_COST = ("--policy", "kv_cost")


class Cached:
    """A script of a worker with a cache of so many blocks; what is not cached takes time."""

    def __init__(self, blocks: int | None = None) -> None:
        self.cache: BlockCache[int] = BlockCache(blocks)
        self.asked = self.hits = self.requests = 0

    async def __call__(self, request, visit):
        keys = text_keys(visit.body["text"].encode(), b"", BLOCK)
        hits = self.cache.serve(keys).hits
        self.requests += 1
        self.asked += len(keys)
        self.hits += hits
        await asyncio.sleep(1e-4 * (len(keys) - hits))
        meta = {"completion_tokens": 1, "prompt_tokens": BLOCK * len(keys), "cached_tokens": BLOCK * hits}
        return web.json_response({"text": "x", "meta_info": meta})


async def _fleet(stubs, balance, count: int, *flags: str):
    workers = await stubs(*(f"w{i}" for i in range(count)))
    for worker in workers:
        worker.script = Cached()
    lb = await balance("--worker-urls", *(worker.url for worker in workers), *flags)
    await lb.up(count)
    return lb, [worker.script for worker in workers]


def _text(draw: random.Random, size: int) -> str:
    return "".join(draw.choices("abcdefgh ", k=size))


async def _send_all(lb, texts: list[str], clients: int) -> None:
    waiting = iter(texts)

    async def client() -> None:
        for text in waiting:
            await lb.post(body={"text": text})

    await asyncio.gather(*(client() for _ in range(clients)))


@pytest.mark.parametrize("policy", ["kv_cost", "cache_aware", "least_backlog"])
async def test_rt_08_misses_one_by_one_reach_every_worker(stubs, balance, policy) -> None:
    lb, workers = await _fleet(stubs, balance, 4, "--policy", policy)
    draw = random.Random(8)
    await _send_all(lb, [_text(draw, 2000) for _ in range(40)], clients=1)
    assert sum(worker.requests for worker in workers) == 40
    assert min(worker.requests for worker in workers) >= 3


async def test_rt_09_a_hot_prefix_is_shared_out_and_still_found(stubs, balance) -> None:
    """Nine of ten requests begin alike: nobody has more than three times another's, and most of what is asked for is cached."""
    lb, workers = await _fleet(stubs, balance, 4, *KV_COST)
    draw = random.Random(9)
    hot = _text(draw, 3000)
    texts = [(hot if draw.random() < 0.9 else _text(draw, 3000)) + _text(draw, 200) for _ in range(400)]
    await _send_all(lb, texts, clients=16)
    counts = [worker.requests for worker in workers]
    assert max(counts) <= 3 * min(counts)
    assert sum(worker.hits for worker in workers) / sum(worker.asked for worker in workers) > 0.6


# ---- workers that die --------------------------------------------------------------------------------------------------------


class Mortal:
    """A script that says the request's own name, in one piece or in four, and takes a moment for it."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    async def __call__(self, request, visit):
        name = visit.body["text"].split()[0]
        pause = self._draw.uniform(0, 0.004)
        if not visit.body.get("stream"):
            await asyncio.sleep(pause)
            return web.json_response({"text": name, "meta_info": {"completion_tokens": 4}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in range(4):
            await asyncio.sleep(pause / 4)
            await response.write(event({"text": f"{name}:{piece}", "meta_info": {"completion_tokens": piece + 1}}))
        await response.write(DONE)
        await response.write_eof()
        return response


async def _ask(lb, number: int, stream: bool, draw: random.Random) -> str:
    """One request; how it ended. Whatever is neither its own whole answer nor a clear error fails the test."""
    name = f"r{number}"
    body = {"text": f"{name} {_text(draw, 400)}", "stream": stream}
    async with asyncio.timeout(DEADLINE), lb.http.post("/generate", json=body) as response:
        data = await response.read()
    if response.status != 200:
        assert json.loads(data)["error"]["message"], data
        return f"status {response.status}"
    if not stream:
        assert json.loads(data)["text"] == name
        return "whole"
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    last = parts.pop()
    said = [json.loads(part)["text"] for part in parts]
    assert said == [f"{name}:{piece}" for piece in range(len(said))], "each piece once, in order, of one answer"
    if last == b"[DONE]":
        assert len(said) == 4
        return "whole"
    assert json.loads(last)["error"]["message"]
    return "error event"


async def _reaper(workers: list[Stub], ended: Counter[str], total: int, draw: random.Random) -> int:
    """Kill a worker and bring one back, again and again, as requests end; how many died. At the end all are there."""
    deaths, down = 0, list[Stub]()
    while (done := ended.total()) < total:
        await until(lambda done=done: ended.total() >= min(done + 40, total), "requests end")
        if down and (len(down) == len(workers) - 1 or draw.random() < 0.6):
            await down.pop(draw.randrange(len(down))).start()
        else:
            worker = draw.choice([each for each in workers if each not in down])
            down.append(worker)
            deaths += 1
            await worker.stop()
    for worker in down:
        await worker.start()
    return deaths


@pytest.mark.parametrize("total", [600, pytest.param(10_000, marks=pytest.mark.full)])
async def test_workers_that_die_at_random_lose_no_request(stubs, balance, total) -> None:
    """None is answered twice, none hangs, none is lost without an error; then nothing is counted as open any more."""
    workers = await stubs("a", "b", "c", "d")
    for number, worker in enumerate(workers):
        worker.script = Mortal(number)
    lb = await balance("--worker-urls", *(worker.url for worker in workers), *KV_COST, "--cb-timeout-duration-secs", "0.05")
    await lb.up(4)
    draw, ended = random.Random(total), Counter[str]()
    numbers = iter(range(total))

    async def client() -> None:
        for number in numbers:
            ended[await _ask(lb, number, number % 2 == 0, draw)] += 1

    reaper = asyncio.create_task(_reaper(workers, ended, total, draw))
    await asyncio.gather(*(client() for _ in range(16)))
    deaths = await reaper
    assert ended.total() == total
    assert deaths >= total // 100, "the storm was one"
    assert ended["whole"] >= 0.8 * total
    assert set(ended) <= {"whole", "error event", "status 502", "status 503"}, ended
    await until(lb.idle, "no lease, no place is held")
    await until(lambda: all(worker.state(0.0) == "up" or "circuit" in worker.state(0.0) for worker in lb.parts.fleet), "all are back")
    lines = lb.parts.proxy._dispatcher._lines.values()
    assert [(len(line.entries), line.tokens, line.queued(0.0)[0]) for line in lines] == [(0, 0, 0)] * len(lines)
    async with aiohttp.ClientSession(lb.url) as http, http.get("/workers") as response:
        assert all(each["open_requests"] == 0 for each in (await response.json())["workers"])
