"""SC-05 in the brain: never more requests wait than `--max-queued-requests` allows, whatever is short: slots, pages or tokens of a step."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from core.test_prefill import Bench

MOST = 3


def ask(bench: Bench, name: object, *, length: int = 12, new: int = 4) -> None:
    bench.ask(str(name), np.random.default_rng(zlib.crc32(str(name).encode())).integers(8, 40, length), new=new)


def refused(bench: Bench) -> set[str]:
    for effect in bench.scheduler.drain().client:
        bench.ended[effect.rid] = effect  # type: ignore[union-attr,assignment]
    return {rid for rid, end in bench.ended.items() if end.finish.status == 503}


def test_slots_that_are_free_are_no_queue() -> None:
    bench = Bench(slots=4, max_queued_requests=MOST)
    for index in range(4 + MOST + 2):
        ask(bench, index)
    assert refused(bench) == {"7", "8"}
    assert bench.ended["7"].finish.message == "the queue is full: --max-queued-requests is 3"
    bench.run()
    assert {rid for rid, end in bench.ended.items() if end.finish.kind == "length"} == {str(index) for index in range(4 + MOST)}


def test_without_pages_free_slots_take_nobody() -> None:
    bench = Bench(slots=20, pages=10, max_queued_requests=MOST)
    ask(bench, "big", length=24, new=12)
    bench.step()
    for index in range(10):
        ask(bench, index, length=20)
    assert refused(bench) == set(), "nobody knows yet that pages are short"
    bench.step()
    assert refused(bench) == {str(index) for index in range(MOST, 10)}, "the newest are turned away"
    ask(bench, "late", length=20)
    assert "late" in refused(bench), "at once, now that it is known"
    bench.run()
    assert {rid for rid, end in bench.ended.items() if end.finish.kind == "length"} == {"big", "0", "1", "2"}


def test_a_step_that_is_full_refuses_nobody() -> None:
    bench = Bench(slots=20, chunk=16, max_queued_requests=MOST)
    for index in range(12):
        ask(bench, index)
    bench.run()
    assert {end.finish.kind for end in bench.ended.values()} == {"length"}


def test_who_came_while_steps_were_full_is_turned_away_when_pages_turn_out_short() -> None:
    bench = Bench(slots=20, pages=16, chunk=16, max_queued_requests=MOST)
    for index in range(12):
        ask(bench, index, new=20)
    bench.step()
    assert not refused(bench)
    while not refused(bench):
        bench.step()
    assert len(bench.scheduler.prefill.waiting) == MOST
    bench.run()


def test_who_was_told_to_wait_stays_when_others_are_retracted() -> None:
    bench = Bench(slots=20, pages=16, max_queued_requests=1, schedule_conservativeness=0.05)
    for index in range(3):
        ask(bench, index, length=12, new=40)
    bench.step()
    ask(bench, "waits", length=60)
    worst = 0
    while bench.scheduler.requests:
        bench.step()
        assert not refused(bench)
        worst = max(worst, len(bench.scheduler.prefill.waiting))
    assert worst > 1, "retracted requests waited too, beyond the bound"
    assert len(bench.ended) == 4


@pytest.mark.parametrize("seed", range(20))
def test_after_every_look_the_queue_is_within_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(slots=rng.randint(1, 8), pages=rng.randint(16, 60), chunk=rng.choice((8, 32, -1)), max_queued_requests=MOST)
    asked = 0
    for _ in range(60):
        for _ in range(rng.choice((0, 0, 1, 6))):
            ask(bench, asked, length=rng.randint(1, 40), new=rng.randint(1, 20))
            asked += 1
        bench.step()
        scheduler = bench.scheduler
        if scheduler.prefill.settled == scheduler._arrivals:
            assert scheduler.prefill.surplus(MOST) <= sum(request.attempt > 0 for request in scheduler.prefill.waiting)
    bench.run()
    refused(bench)
    assert len(bench.ended) == asked
