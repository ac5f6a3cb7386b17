"""The starvation guard: whatever the policy, an endless stream of better requests cannot hold one request back for ever.

The real scheduler runs against the fake runner. The adversary always has requests waiting that the policy prefers to the victim (for
`random` it picks the seeds). Only those that arrived after the victim count as overtaking it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fakes import FakeRunner

from radixpd.config.settings import CacheSettings, SchedulerSettings
from radixpd.core.policy import OVERTAKEN_LIMIT, POLICIES, must_go_next, order
from radixpd.core.request import SamplingParams
from radixpd.core.scheduler import PROMPT_STEPS, Scheduler

SLOTS, PAGES, SIZE, CONTEXT = 3, 60, 4, 256
STEM = np.arange(8, 28, dtype=np.int32)  # what the stream's prompts share: always cached
QUEUED = 12
VICTIM = "victim"


class Siege:
    """A scheduler whose queue is never empty."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        settings = SchedulerSettings(
            max_running_requests=SLOTS, schedule_policy=policy, chunked_prefill_size=64, disable_overlap_schedule=True
        )
        self.scheduler = Scheduler(settings, CacheSettings(page_size=SIZE), pages=PAGES, context_length=CONTEXT, eos_ids=())
        self.runner = FakeRunner(pages=PAGES, page_size=SIZE, slots=SLOTS, context_length=CONTEXT)
        self.arrived = 0
        self.admitted: list[str] = []

    def feed(self) -> None:
        """Keep the queue full of short requests that the policy likes and that never end all at once."""
        while len(self.scheduler.prefill.waiting) < QUEUED:
            self.arrived += 1
            prompt = np.concatenate([STEM, np.array([self.arrived % 7, self.arrived % 11, 5], dtype=np.int32)])
            self.scheduler.arrive((f"r{self.arrived}",), prompt, SamplingParams(max_new_tokens=2 + self.arrived % 4), priority=9)

    def seed(self) -> int:
        """A seed that does not put the victim among the next to go."""
        prefill = self.scheduler.prefill
        for seed in range(100):
            head = order(prefill.waiting, self.policy, self.scheduler.cache, seed)[:SLOTS]
            if all(request.rid != VICTIM or must_go_next(request) for request in head):
                return seed
        return 0

    def steps(self, count: int) -> Iterator[int]:
        """Run; every plan's newcomers are noted before the next."""
        for step in range(count):
            self.feed()
            plan = self.scheduler.plan(0.0, self.seed())
            assert plan is not None
            self.admitted += [self.scheduler.table.rids[begin.slot] for begin in plan.begins]
            self.scheduler.apply(self.runner.step(plan))
            yield step


@pytest.mark.parametrize("tokens", [40, 228], ids=["small", "fills the pool"])
@pytest.mark.parametrize("policy", ["fcfs", *sorted(POLICIES)])
def test_every_wait_is_bounded(policy: str, tokens: int) -> None:
    siege = Siege(policy)
    for _ in siege.steps(30):  # the stem is cached, all slots are in use
        pass
    prompt = np.arange(30, 30 + tokens, dtype=np.int32)
    siege.scheduler.arrive((VICTIM,), prompt, SamplingParams(max_new_tokens=4), priority=0)
    before = {request.rid for request in siege.scheduler.prefill.waiting}
    siege.admitted.clear()
    for _ in siege.steps(2000):
        if VICTIM in siege.admitted:
            break
    assert VICTIM in siege.admitted, "starved"
    overtook = [rid for rid in siege.admitted[: siege.admitted.index(VICTIM)] if rid not in before]
    assert len(overtook) <= OVERTAKEN_LIMIT + SLOTS
    if policy == "fcfs":
        assert not overtook
    else:
        assert len(overtook) >= OVERTAKEN_LIMIT, "the adversary did not even try"


def test_the_victim_finishes_too() -> None:
    siege = Siege("priority")
    siege.feed()
    siege.scheduler.arrive((VICTIM,), np.arange(30, 70, dtype=np.int32), SamplingParams(max_new_tokens=4), priority=0)
    for _ in siege.steps(2000):
        if VICTIM not in siege.scheduler.requests:
            return
    raise AssertionError("starved")


@pytest.mark.parametrize("overlap", [False, True])
def test_an_endless_stream_of_prompts_does_not_stop_who_generates(overlap: bool) -> None:
    settings = SchedulerSettings(max_running_requests=4, chunked_prefill_size=64, disable_overlap_schedule=not overlap)
    scheduler = Scheduler(settings, CacheSettings(page_size=SIZE), pages=PAGES, context_length=CONTEXT, eos_ids=())
    runner = FakeRunner(pages=PAGES, page_size=SIZE, slots=4, context_length=CONTEXT)
    scheduler.arrive(("old",), STEM, SamplingParams(max_new_tokens=10))
    for step in range((PROMPT_STEPS + 1) * 10 + 20):
        scheduler.arrive((f"r{step}",), np.array([step % 30, 1, 2], dtype=np.int32), SamplingParams(max_new_tokens=1))
        plan = scheduler.plan(0.0, 0)
        if plan is not None:
            scheduler.apply(runner.step(plan))
    assert "old" not in scheduler.requests, "it generates at least once in PROMPT_STEPS + 1 steps"
