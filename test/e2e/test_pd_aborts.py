"""Aborts and clients that leave, in every phase of a handoff and on either side: both servers let go at once, the others go on.

Each test names the case of the project's list of field reports that it stands for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2e.asks import GREEDY
from e2e.pd import Pair, hang_up, open_leg, phases
from e2e.pd_prompts import ids
from e2e.reference import solo
from e2e.servers import Answer, Server, together, until

LONG = 1500  # tokens of a prompt that takes a while: some 400 steps of prefill
TOGETHER = ("--chunked-prefill-size", "4", "--max-total-tokens", "65536")
FAIL = ("--disaggregation-fallback", "fail")
AT_ONCE = 6  # seconds: on a busy machine, but no deadline of a handoff is as short
UNHEARD = 60  # seconds: where decode's client left before decode had read the request, prefill waits 30 for it (--..-bootstrap-timeout)
SLOW = ("--disaggregation-link-gbps", "0.005")  # 0.6 MB/s; a token of the tiny model takes 512 bytes


def native(prompt: list[int], tokens: int = 4) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": tokens}}


def is_abort(answer: Answer) -> bool:
    """Whether it says that the request did not end by itself."""
    if answer.status == 200:
        return bool(answer.json["meta_info"]["finish_reason"]["type"] == "abort")
    return 400 <= answer.status < 500 or answer.status == 503


def are_over(legs: tuple[Answer, Answer]) -> bool:
    """Whether both halves tell of an abort: a failure of the prefill server it is not, though it may see a refused page before it hears
    why."""
    return all(map(is_abort, legs))


@pytest.fixture
def strict(pair: Callable[..., Pair]) -> Iterator[Pair]:
    """Long prompts take a while, and what prefill does not deliver fails. Nothing may be left behind."""
    found = pair(*TOGETHER, decode=FAIL)
    found.settled()
    yield found
    found.settled()
    found.flush()


@pytest.fixture
def slow(pair: Callable[..., Pair]) -> Iterator[Pair]:
    """Transfers take a while, and what prefill does not deliver fails. Nothing may be left behind."""
    found = pair("--max-total-tokens", "16384", prefill=SLOW, decode=FAIL)
    found.settled()
    yield found
    found.settled()
    found.flush()


def busy(pair: Pair, count: int) -> None:
    """Wait until so many prompts are on both sides, with pages of decode, and prefill computes one of them."""

    def all_there() -> bool:
        found = pair.decode.server_info()["internal_states"][0]["requests"]
        return len(found) == count and all(each["part"] == "receiving" for each in found)

    until(all_there, "all are there")
    until(lambda: "running" in phases(pair.prefill), "prefill computes")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pd_01_an_abort_on_either_side_frees_the_other_at_once(strict: Pair, side: str) -> None:
    def abort() -> float:
        busy(strict, 20)
        began = time.monotonic()
        assert getattr(strict, side).post("/abort_request", {"abort_all": True}).json["aborted"] == 20
        until(lambda: not phases(strict.decode), "decode's slots are free", seconds=AT_ONCE)
        strict.settled()
        return time.monotonic() - began

    bodies = [strict.named(native([5 + index, *ids(index, LONG)])) for index in range(20)]
    *found, seconds = together([*(lambda body=body: strict.legs("/generate", body) for body in bodies), abort])
    assert all(map(are_over, found)), [[answer.body for answer in legs] for legs in found if not are_over(legs)]
    assert seconds < AT_ONCE


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pd_04_an_abort_in_transfer_is_told_as_one(slow: Pair, side: str) -> None:
    def abort() -> None:
        until(lambda: phases(slow.prefill) == ["sending"], "the transfer is all that is left")
        assert phases(slow.decode) == ["parked"]
        assert getattr(slow, side).post("/abort_request", {"abort_all": True}).json["aborted"] == 1

    legs, _ = together([lambda: slow.legs("/generate", native(ids(3, 2 * LONG))), abort])
    assert are_over(legs), [answer.body for answer in legs]


def test_pd_04_what_prefill_aborts_can_be_computed_by_decode(pair: Callable[..., Pair], server: Server) -> None:
    patient = pair(prefill=SLOW)
    body = native(ids(4, 2 * LONG))
    expected = solo(server, body)[0]

    def abort() -> None:
        until(lambda: phases(patient.prefill) == ["sending"], "the transfer is all that is left")
        assert patient.prefill.post("/abort_request", {"abort_all": True}).json["aborted"] == 1

    (first, second), _ = together([lambda: patient.legs("/generate", body), abort])
    assert is_abort(first)
    expected.check(second.json)
    patient.settled()


@pytest.mark.parametrize("gone", [("decode",), ("prefill",), ("prefill", "decode")], ids="-".join)
def test_pd_12_clients_that_leave_before_the_first_token_leave_no_work_behind(strict: Pair, gone: tuple[str, ...]) -> None:
    def first_token(prompt: list[int]) -> float:
        began = time.monotonic()
        next(iter(strict.stream("/generate", native(prompt, 1))))
        return time.monotonic() - began

    normal = max(first_token(ids(10 + index, 40)) for index in range(3))
    one_long = first_token(ids(20, LONG))
    bodies = [strict.named(native([5 + index, *ids(30 + index, LONG)])) for index in range(10)]
    legs = {name: [open_leg(getattr(strict, name), "/generate", body) for body in bodies] for name in ("prefill", "decode")}
    busy(strict, 10)
    for name in gone:
        for connection in legs[name]:
            hang_up(connection)
    assert first_token(ids(40, 40)) < 2 * normal + 5 * one_long, "not behind all ten"
    until(lambda: not phases(strict.prefill) and not phases(strict.decode), "nobody works for the dead", seconds=AT_ONCE)
    for connections in legs.values():
        for connection in connections:
            connection.close()


def test_pd_13_cancelling_some_in_transfer_leaves_the_others_alone(slow: Pair, server: Server) -> None:
    bodies = [{**slow.named(native([5 + index, *ids(50 + index, 700)], 6)), "rid": f"transfer-{index}"} for index in range(10)]
    expected = [solo(server, native(body["input_ids"], 6))[0] for body in bodies]

    def cancel() -> None:
        until(lambda: phases(slow.prefill) == ["sending"] * 10, "all are in transfer")
        for index in range(0, 10, 2):
            assert slow.decode.post("/abort_request", {"rid": f"transfer-{index}"}).json["aborted"] == 1

    *found, _ = together([*(lambda body=body: slow.legs("/generate", body) for body in bodies), cancel])
    for index, (legs, reference) in enumerate(zip(found, expected, strict=True)):
        if index % 2 == 0:
            assert are_over(legs), [answer.body for answer in legs]
        else:
            assert [answer.status for answer in legs] == [200, 200]
            reference.check(legs[1].json)


def test_pd_16_fifty_clients_that_leave_at_random_leave_no_page_behind(strict: Pair) -> None:
    chance = random.Random(16)
    before = [sum(pages.values()) for pages in strict.settled()]

    def one(index: int, patience: float, gone: str) -> None:
        body = strict.named(native([5 + index, *ids(70 + index, 600)]))
        legs = {name: open_leg(getattr(strict, name), "/generate", body) for name in ("prefill", "decode")}
        time.sleep(patience)  # the fault itself: a client that leaves after so long, wherever its request is then
        for name, connection in legs.items():
            if gone in (name, "both"):
                hang_up(connection)
        for connection in legs.values():
            if connection.fileno() >= 0:
                connection.settimeout(UNHEARD)
                assert connection.recv(64).startswith(b"HTTP/1.1 ")
                connection.close()

    plans = [(index, chance.uniform(0, 1.5), chance.choice(("prefill", "decode", "both"))) for index in range(50)]
    together([lambda plan=plan: one(*plan) for plan in plans])
    assert [sum(pages.values()) for pages in strict.settled()] == before
    strict.flush()
    assert [pages["free"] for pages in strict.settled()] == before
