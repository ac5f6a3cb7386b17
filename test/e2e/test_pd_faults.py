"""Handoffs that break, case by case: what the client is told, within which time, and that the next ones work.

Servers of a group are stopped, killed and cut off, so each test has its own. The product of faults, phases and sides is in
`test_pd_chaos`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e.chaos import Group, cannot_cut
from e2e.pd import hang_up, open_leg, phases
from e2e.pd_prompts import ids
from e2e.reference import solo
from e2e.servers import Server, until

POOL = ("--max-total-tokens", "1024")
SLOW = 0.0008  # gigabits a second: a prompt takes more than a second
DEADLINE = 60.0


def native(seed: int, prompt: int = 300, tokens: int = 12) -> dict[str, Any]:
    return {"input_ids": ids(seed, prompt), "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}}


@pytest.fixture
def group(tiny: Path) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def start(*flags: str, **options: Any) -> Group:
        groups.append(Group(tiny, *POOL, *flags, **options))
        return groups[-1]

    yield start
    for each in groups:
        each.close()


def work(there: Group, server: Server, count: int, seed: int, *, handed_over: bool = True) -> None:
    """So many requests give the right text; the last one came from the prefill server."""
    bodies = [native(seed + index) for index in range(count)]
    expected = [solo(server, body)[0] for body in bodies]
    found = [there.pair.generate(**body) for body in bodies]
    assert sum(each.check(answer) for each, answer in zip(expected, found, strict=True)) <= 1
    assert (found[-1]["meta_info"]["kv_journey"]["prefill_computed_tokens"] > 0) == handed_over


def routed(there: Group, body: dict[str, Any]) -> int:
    """Decode's status; as a router does, prefill's leg is dropped when decode has answered."""
    body = there.pair.named(body)
    leg = open_leg(there.servers["prefill"], "/generate", body)
    try:
        return there.servers["decode"].post("/generate", body, timeout=DEADLINE).status
    finally:
        hang_up(leg)


def sending(there: Group, pool: ThreadPoolExecutor, body: dict[str, Any]) -> Any:
    """Decode's answer to come, once pages are on their way."""
    body = there.pair.named(body)
    for side in ("prefill", "decode"):
        answer = pool.submit(there.servers[side].post, "/generate", body, timeout=DEADLINE)
    until(lambda: phases(there.servers["prefill"]) == ["sending"], "pages are on their way")
    return answer


@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=pytest.mark.full)])
def test_pd_02_an_aborted_transfer_does_not_write_into_the_next_request(group: Callable[..., Group], server: Server, backend: str) -> None:
    there = group("--disaggregation-transfer-backend", backend, link=SLOW, decode=("--max-total-tokens", "512"))
    prefill, decode = there.servers["prefill"], there.servers["decode"]
    for round_ in range(3):
        body = there.pair.named(native(10 + round_))
        legs = [open_leg(each, "/generate", body) for each in (prefill, decode)]
        until(lambda: phases(prefill) == ["sending"], "pages are on their way")
        for leg in legs:
            hang_up(leg)
        # Alone on decode, over all pages that it has: the late bytes of the room must not be among them.
        fresh = native(20 + round_, 400, 24)
        solo(server, fresh)[0].check(decode.generate(**fresh))
    for each in (prefill, decode):
        each.settled()


@pytest.mark.parametrize("fallback", ["fail", pytest.param("local", marks=pytest.mark.full)])
def test_pd_05_a_prefill_server_that_stands_still_costs_one_request_at_most(
    group: Callable[..., Group], server: Server, fallback: str
) -> None:
    there = group(link=SLOW, decode=("--disaggregation-fallback", fallback, "--disaggregation-transfer-timeout", "10"))
    body = native(1)
    (expected,) = solo(server, body)
    with ThreadPoolExecutor(4) as pool:
        answer = sending(there, pool, body)
        began = time.monotonic()
        there.signal("prefill", signal.SIGSTOP)
        found = answer.result(DEADLINE)
        assert time.monotonic() - began < 20
        if fallback == "local":
            assert found.status == 200, found.body
            expected.check(found.json)
        else:
            assert found.status == 504
            assert "prefill server" in found.json["error"]["message"]
        assert phases(there.servers["decode"]) == [], "its slot is free"
        there.signal("prefill", signal.SIGCONT)
    there.pair.settled()
    work(there, server, 2, 30)


@pytest.mark.parametrize("fallback", ["fail", pytest.param("local", marks=pytest.mark.full)])
def test_pd_06_a_broken_transfer_marks_nobody_for_ever(group: Callable[..., Group], server: Server, fallback: str) -> None:
    if reason := cannot_cut():
        pytest.skip(reason)
    there = group("--disaggregation-transfer-backend", "tcp", link=SLOW, decode=("--disaggregation-fallback", fallback))
    body = native(1)
    (expected,) = solo(server, body)
    with ThreadPoolExecutor(4) as pool:
        answer = sending(there, pool, body)
        there.cut()
        found = answer.result(DEADLINE)
    if found.status == 200:
        expected.check(found.json)
    else:
        assert fallback == "fail"
        assert found.status in (502, 504), found.body
    work(there, server, 5, 40)


def test_pd_07_a_restarted_prefill_server_is_found_again(group: Callable[..., Group], server: Server) -> None:
    there = group(link=SLOW, decode=("--disaggregation-fallback", "fail"))
    with ThreadPoolExecutor(4) as pool:
        body = there.pair.named(native(1))
        pool.submit(_ignore, lambda: there.servers["prefill"].post("/generate", body, timeout=DEADLINE))
        answer = pool.submit(there.servers["decode"].post, "/generate", body, timeout=DEADLINE)
        until(lambda: phases(there.servers["prefill"]) == ["sending"], "pages are on their way")
        there.kill("prefill")
        assert answer.result(DEADLINE).status in (502, 504), "who was on the way gets an error"
    there.start("prefill")
    began = time.monotonic()
    until(lambda: routed(there, native(2)) == 200, "requests work again", seconds=20)
    assert time.monotonic() - began < 20
    work(there, server, 2, 50)


@pytest.mark.parametrize("backend", ["tcp", pytest.param("shm", marks=pytest.mark.full)])
def test_pd_17_connections_that_died_of_idleness_are_opened_again(group: Callable[..., Group], server: Server, backend: str) -> None:
    if reason := cannot_cut():
        pytest.skip(reason)
    there = group("--disaggregation-transfer-backend", backend, decode=("--disaggregation-fallback", "fail"))
    work(there, server, 1, 60)
    there.cut()
    until(lambda: routed(there, native(61)) == 200, "requests work again", seconds=20)
    work(there, server, 2, 62)


def _ignore(act: Callable[[], Any]) -> None:
    with contextlib.suppress(OSError):
        act()
