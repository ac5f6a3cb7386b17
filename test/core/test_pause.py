"""Pausing: nothing is planned, whatever happens meanwhile; afterwards everybody gets the tokens they would have got anyway."""

from __future__ import annotations

from typing import Any

import numpy as np
from core.test_scheduler_sim import Asked, World, build, scheduler_settings, worlds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixpd.config.settings import CacheSettings
from radixpd.core.request import Finish, LogprobParams, Phase, SamplingParams
from radixpd.core.scheduler import PAUSE_MODES, Scheduler


class Pausing(World):
    """Pauses and resumes at random moments; what a pause promises is checked after every move."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.pauses = self.flushes = 0
        self.held: dict[str, tuple[int, int]] = {}  # rid -> slot and attempt of those that an in_place pause holds

    def pause(self) -> None:
        mode = self.rng.choice(PAUSE_MODES)
        before = {request.rid: (request.slot, request.attempt) for request in self.scheduler.table.requests if request is not None}
        live = {rid for rid, asked in self.asked.items() if not asked.ends}
        self.scheduler.pause(mode, self.now)
        self.pauses += 1
        self._collect()
        if mode == "in_place":
            self.held |= before
            return
        self.held.clear()
        assert self.scheduler.load().running == self.scheduler.load().request_pages == self.scheduler.load().locked_pages == 0
        if mode == "abort":
            assert all(self.asked[rid].ends[0].finish.status == 499 for rid in live)
            assert not self.scheduler.requests

    def resume(self) -> None:
        self.held.clear()
        self.scheduler.resume()

    def flush(self) -> None:
        """Allowed while a pause has taken the pages of all and no step is in flight."""
        scheduler = self.scheduler
        allowed = not scheduler.in_flight and (scheduler.paused or not scheduler.requests) and not scheduler.load().running
        assert scheduler.flush() == allowed
        if allowed:
            self.flushes += scheduler.paused and bool(scheduler.requests)
            assert scheduler.load().free_pages == self.pages

    def plan(self) -> bool:
        planned = super().plan()
        assert not (planned and self.scheduler.paused), "a plan while paused"
        return planned

    def check(self) -> None:
        super().check()
        load = self.scheduler.load()
        live = sum(not asked.ends for asked in self.asked.values())
        assert load.held == (live if self.scheduler.paused else 0)
        for rid, place in self.held.items():
            request = self.scheduler.requests.get(rid)
            assert request is None or (request.slot, request.attempt) == place, "an in_place pause moved somebody"

    def move(self, *, arrivals: bool) -> None:
        kind = self.rng.random()
        if kind < 0.03:
            self.pause()
        elif kind < 0.1:
            self.resume()
        elif kind < 0.13:
            self.flush()
        super().move(arrivals=arrivals)

    def finish(self) -> None:
        self.resume()
        super().finish()


def pausing(case: dict[str, Any]) -> Pausing:
    plain = build(case)
    return Pausing(plain.settings, plain.cache, pages=plain.pages, seed=case["seed"])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds)
def test_pauses_at_any_moment_change_no_token(case: dict[str, Any]) -> None:
    world = pausing(case)
    for _ in range(250):
        world.move(arrivals=True)
    world.finish()
    world.check_end()


def test_the_random_pauses_reach_what_matters() -> None:
    world = Pausing(scheduler_settings(), CacheSettings(page_size=4), pages=100, seed=2)
    for _ in range(1500):
        world.move(arrivals=True)
    world.finish()
    world.check_end()
    assert world.pauses > 20
    assert world.flushes > 3, "flushes of a paused server with retracted requests"
    assert world.retractions > 10


@given(st.sampled_from(PAUSE_MODES), st.integers(0, 30), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_pause_holds_for_as_long_as_nobody_resumes(mode: str, steps: int, overlap: bool) -> None:
    world = World(scheduler_settings(disable_overlap_schedule=not overlap), CacheSettings(page_size=4), pages=200, seed=steps)
    for index in range(4):
        prompt = world._ids(5 + 9 * index)
        params = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=index, n=1 + index % 2, logprobs=LogprobParams(start=0))
        rids = tuple(f"r{index}-{sample}" for sample in range(params.n))
        world.asked |= {rid: Asked(prompt, params, sample, b"") for sample, rid in enumerate(rids)}
        world.scheduler.arrive(rids, prompt, params)
    for _ in range(steps):
        world.move(arrivals=False)
    world.scheduler.pause(mode)
    for _ in range(200):  # arrivals, aborts and results come, and steps in flight run dry
        world.move(arrivals=True)
    while world.run() or world.apply():
        world._collect()
    assert world.scheduler.in_flight == 0
    running = [request.rid for request in world.scheduler.table.requests if request is not None]
    assert bool(running) <= (mode == "in_place")
    assert world.scheduler.load().paused
    world.scheduler.resume()
    world.finish()
    world.check_end()


def running_scheduler() -> tuple[World, Scheduler]:
    world = World(scheduler_settings(), CacheSettings(page_size=4), pages=200, seed=1)
    prompt = np.arange(8, 28, dtype=np.int32)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    for rid in ("a", "b"):
        world.asked[rid] = Asked(prompt, params, 0, b"")
        world.scheduler.arrive((rid,), prompt, params)
    for _ in range(10):
        world.plan()
        world.run()
        world.apply()
        world._collect()
    assert world.plan()
    return world, world.scheduler


def test_in_place_keeps_pages_and_retract_gives_them_back() -> None:
    world, scheduler = running_scheduler()
    before = scheduler.load()
    scheduler.pause("in_place")
    assert not world.plan()
    assert (scheduler.load().running, scheduler.load().used_tokens) == (2, before.used_tokens)
    assert not scheduler.flush()
    scheduler.pause("retract")  # a pause may become a stricter one
    load = scheduler.load()
    assert (load.running, load.waiting, load.used_tokens, load.held) == (0, 2, 0, 2)
    assert not scheduler.flush()
    while world.run() or world.apply():
        world._collect()
    assert scheduler.flush()
    assert scheduler.load().free_pages == 200
    world.scheduler.resume()
    world.finish()
    world.check_end()
    assert [world.asked[rid].ends[0].retractions for rid in "ab"] == [1, 1]


def test_abort_ends_who_is_there_and_nobody_who_comes_later() -> None:
    world, scheduler = running_scheduler()
    scheduler.pause("abort")
    world._collect()
    assert {world.asked[rid].ends[0].finish for rid in "ab"} == {Finish("abort", message="aborted by a pause", status=499)}
    world.asked["late"] = Asked(np.array([9, 10], dtype=np.int32), SamplingParams(max_new_tokens=3, ignore_eos=True), 0, b"")
    scheduler.arrive(("late",), world.asked["late"].prompt, world.asked["late"].params)
    assert not world.plan()
    assert scheduler.requests["late"].phase is Phase.WAITING
    scheduler.resume()
    scheduler.resume()  # once more does nothing
    world.finish()
    world.check_end()
    assert len(world.asked["late"].tokens) == 3


def test_a_pause_of_nobody_is_a_pause() -> None:
    scheduler = Scheduler(scheduler_settings(), CacheSettings(), pages=10, context_length=96, eos_ids=())
    for mode in PAUSE_MODES:
        scheduler.pause(mode)
        assert scheduler.load().paused
        assert scheduler.plan(0.0, 0) is None
        assert scheduler.flush()
