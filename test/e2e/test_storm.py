"""A storm: 200 requests at once, some aborted, some hung up on, in a pool so small that running ones are retracted all the time.

Each request gets one terminal answer, nobody's text is touched by what happens to others, and afterwards the server is empty.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from e2e.reference import Reference, solo
from e2e.servers import Server

COUNT = 200
KINDS = 24
SEED = 5


def bodies() -> list[dict[str, Any]]:
    """Different requests: some share a prefix, some are greedy, some draw with a seed."""
    dice = random.Random(SEED)
    shared = [dice.randrange(3, 259) for _ in range(96)]
    made = []
    for index in range(KINDS):
        prompt = (shared if index % 3 == 0 else []) + [dice.randrange(3, 259) for _ in range(dice.randrange(10, 160))]
        how = {"temperature": 0} if index % 2 else {"temperature": 1, "sampling_seed": index}
        sampling = {**how, "ignore_eos": True, "max_new_tokens": dice.randrange(16, 80)}
        made.append({"input_ids": prompt, "sampling_params": sampling, "return_logprob": index % 4 == 0})
    return made


@dataclass
class Fate:
    """What is done to a request, and what came back. `ends`: the finish reasons seen; `errors`: anything else that was an answer."""

    kind: int
    stream: bool
    abort_after: float | None
    hang_up_after: int | None  # events
    ends: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] | None = None
    errors: list[str] = field(default_factory=list)


def fates() -> list[Fate]:
    dice = random.Random(SEED + 1)
    made = []
    for index in range(COUNT):
        what = dice.choice(("stay", "stay", "stay", "abort", "hang up"))
        made.append(
            Fate(
                kind=index % KINDS,
                stream=what == "hang up" or dice.random() < 0.5,
                abort_after=dice.uniform(0, 4) if what == "abort" else None,
                hang_up_after=dice.randrange(0, 12) if what == "hang up" else None,
            )
        )
    return made


async def run(session: aiohttp.ClientSession, number: int, fate: Fate, body: dict[str, Any]) -> None:
    """One client."""
    body = {**body, "rid": f"storm-{number}", "stream": fate.stream}
    abort = asyncio.create_task(abort_later(session, number, fate.abort_after)) if fate.abort_after is not None else None
    async with session.post("/generate", json=body) as answer:
        if answer.status != 200:
            fate.errors.append(f"{answer.status} {await answer.text()}")
        elif not fate.stream:
            note(fate, await answer.json())
        else:
            await follow(fate, answer)
    if abort is not None:
        await abort


async def follow(fate: Fate, answer: aiohttp.ClientResponse) -> None:
    """Read a stream to its end, or up to where this client hangs up."""
    seen, done = 0, False
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
            continue
        assert not done
        assert not fate.ends, "an event after the terminal one"
        note(fate, json.loads(line[6:]))
        seen += 1
        if fate.hang_up_after is not None and seen > fate.hang_up_after:
            answer.close()
            return
    if not done:
        fate.errors.append("the stream ended without [DONE]")


def note(fate: Fate, answer: dict[str, Any]) -> None:
    if "error" in answer:
        fate.errors.append(str(answer["error"]))
        return
    fate.last = answer
    if answer["meta_info"]["finish_reason"] is not None:
        fate.ends.append(answer["meta_info"]["finish_reason"])


async def abort_later(session: aiohttp.ClientSession, number: int, seconds: float) -> None:
    await asyncio.sleep(seconds)  # the moment is part of the storm
    async with session.post("/abort_request", json={"rid": f"storm-{number}"}) as answer:
        assert answer.status == 200


async def storm(server: Server, all_bodies: list[dict[str, Any]], all_fates: list[Fate]) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=aiohttp.ClientTimeout(total=150)) as session:
        await asyncio.gather(*(run(session, number, fate, all_bodies[fate.kind]) for number, fate in enumerate(all_fates)))


@pytest.mark.parametrize(
    "flags", [(), ("--enable-mixed-chunk", "--page-size", "1", "--disable-overlap-schedule")], ids=["default", "mixed"]
)
def test_storm(server: Server, serve: Callable[..., Server], flags: tuple[str, ...]) -> None:
    all_bodies, all_fates = bodies(), fates()
    expected: list[Reference] = [solo(server, body)[0] for body in all_bodies]
    small = serve(
        "--max-total-tokens", "1024", "--schedule-conservativeness", "0.05", "--chunked-prefill-size", "64", "--threads", "1", *flags
    )
    before = small.metric("num_aborted_requests")
    asyncio.run(storm(small, all_bodies, all_fates))

    outcome = Counter(fate.ends[0]["type"] if fate.ends else "hung up" for fate in all_fates)
    assert [fate.errors for fate in all_fates if fate.errors] == []
    assert outcome["length"] > COUNT // 2
    assert outcome["abort"] > 5
    assert outcome["hung up"] > 10
    excused = 0
    for fate in all_fates:
        whole = fate.ends and fate.ends[0]["type"] == "length"
        assert len(fate.ends) == 1 or fate.hang_up_after is not None
        assert whole or fate.abort_after is not None or fate.hang_up_after is not None
        if fate.last is not None:
            excused += expected[fate.kind].check(fate.last, prefix=not whole)
    assert excused <= 2, "too many near ties to be honest ones"

    small.settled()
    assert small.metric("num_retracted_requests") > 0
    # Hang-ups too: all but those that came too late.
    assert small.metric("num_aborted_requests") - before > outcome["abort"] + outcome["hung up"] // 2
    assert small.server_info()["internal_states"][0]["requests"] == []
    small.flush()
    assert small.pages() == {
        "free": small.metric("max_total_num_tokens") / small.server_info()["page_size"],
        "tree": 0,
        "request": 0,
        "quarantine": 0,
    }
