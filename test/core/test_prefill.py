"""Admission: in-batch prefix caching, refusals that leave nothing behind, budgets, and nobody small passing somebody big."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeRunner, continuation

from radixpd.config.settings import CacheSettings, SchedulerSettings
from radixpd.core.effects import Finished, Prefilled, TokensOut
from radixpd.core.request import LogprobParams, SamplingParams
from radixpd.core.scheduler import Scheduler
from radixpd.core.step import StepPlan

SIZE, CONTEXT = 4, 512
SHARED = np.arange(100, dtype=np.int32) % 31 + 8


class Bench:
    """A scheduler with its fake runner, one step at a time, depth 0."""

    def __init__(self, *, pages: int = 200, chunk: int = -1, slots: int = 8, reuse: bool = True, **settings: object) -> None:
        scheduler = SchedulerSettings(
            max_running_requests=slots,
            chunked_prefill_size=chunk,
            disable_overlap_schedule=True,
            **settings,  # type: ignore[arg-type]
        )
        cache = CacheSettings(page_size=SIZE, disable_radix_cache=not reuse)
        self.scheduler = Scheduler(scheduler, cache, pages=pages, context_length=CONTEXT, eos_ids=())
        self.runner = FakeRunner(pages=pages, page_size=SIZE, slots=slots, context_length=CONTEXT)
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.ended: dict[str, Finished] = {}

    def ask(self, rid: str, prompt: np.ndarray, new: int = 4, space: bytes = b"", **params: object) -> None:
        sampling = SamplingParams(max_new_tokens=new, **params)  # type: ignore[arg-type]
        self.scheduler.arrive((rid,), prompt.astype(np.int32), sampling, namespace=space)

    def step(self) -> tuple[StepPlan | None, dict[str, tuple[int, int]]]:
        """Plan, run and apply: (plan, prompt pieces by rid as (start, end))."""
        plan = self.scheduler.plan(0.0, 0)
        if plan is None:
            return None, {}
        rids = self.scheduler.table.rids[plan.slots].tolist()
        rows = zip(rids, plan.starts.tolist(), (plan.starts + plan.lengths).tolist(), strict=True)
        pieces = {rid: (start, end) for rid, start, end in rows if start < self.scheduler.requests[rid].prompt_length}
        self.scheduler.apply(self.runner.step(plan))
        for effect in self.scheduler.drain().client:
            if isinstance(effect, TokensOut):
                for rid, token in zip(effect.rids, effect.ids.tolist(), strict=True):
                    self.tokens.setdefault(rid, []).append(token)
            elif isinstance(effect, Prefilled):
                self.cached[effect.rid] = effect.cached
            elif isinstance(effect, Finished):
                self.ended[effect.rid] = effect
        return plan, pieces

    def run(self) -> None:
        while self.scheduler.requests:
            self.step()


def _prompt(*tail: int) -> np.ndarray:
    return np.concatenate([SHARED, np.array(tail, dtype=np.int32)])


def test_a_request_waits_for_the_one_that_computes_its_prefix_and_then_hits() -> None:
    bench = Bench()
    bench.ask("first", _prompt(1, 2))
    bench.ask("second", _prompt(3, 4))
    bench.ask("other", np.arange(50) % 7)
    _, pieces = bench.step()
    assert pieces == {"first": (0, 102), "other": (0, 50)}, "only the sharer waits"
    _, pieces = bench.step()
    assert pieces == {"second": (100, 102)}
    bench.run()
    assert bench.cached == {"first": 0, "other": 0, "second": 100}
    assert bench.tokens["second"] == continuation(_prompt(3, 4), SamplingParams(max_new_tokens=4))


def test_the_sharer_waits_through_all_chunks() -> None:
    bench = Bench(chunk=64)
    bench.ask("first", _prompt(1, 2))
    bench.ask("second", _prompt(3, 4))
    assert bench.step()[1] == {"first": (0, 64)}
    assert bench.step()[1] == {"first": (64, 102)}, "18 tokens were left, but 36 shared ones are under way"
    assert bench.step()[1] == {"second": (100, 102)}


def test_with_overlap_the_sharer_waits_until_the_result_is_applied() -> None:
    bench = Bench()
    bench.scheduler.depth = 1
    bench.ask("first", _prompt(1, 2))
    bench.ask("second", _prompt(3, 4))
    first = bench.scheduler.plan(0.0, 0)
    second = bench.scheduler.plan(0.0, 0)
    assert first is not None
    assert second is not None
    assert [len(first.begins), len(second.begins)] == [1, 0], "the second step decodes"
    bench.scheduler.apply(bench.runner.step(first))
    third = bench.scheduler.plan(0.0, 0)
    assert third is not None
    assert third.starts.tolist() == [100]


@pytest.mark.parametrize(
    "case",
    ["short prefix", "other namespace", "reuse off", "log-probabilities of the prompt"],
)
def test_who_does_not_wait(case: str) -> None:
    bench = Bench(reuse=case != "reuse off")
    bench.ask("first", _prompt(1, 2))
    prompt = np.concatenate([SHARED[:31], np.array([1, 2, 3])]) if case == "short prefix" else _prompt(3, 4)
    logprobs = LogprobParams(start=0) if case == "log-probabilities of the prompt" else None
    bench.ask("second", prompt, space=b"x" * 32 if case == "other namespace" else b"", logprobs=logprobs)
    assert set(bench.step()[1]) == {"first", "second"}
    bench.run()
    assert bench.tokens["second"] == continuation(prompt, SamplingParams(max_new_tokens=4))


def test_the_sharer_goes_on_alone_when_the_first_is_aborted() -> None:
    bench = Bench(chunk=40)
    bench.ask("first", _prompt(1, 2))
    bench.ask("second", _prompt(3, 4))
    bench.step()
    bench.scheduler.abort("first", "gone", 499)
    assert bench.step()[1] == {"second": (40, 80)}, "what the first has computed is kept"
    bench.run()
    assert bench.tokens["second"] == continuation(_prompt(3, 4), SamplingParams(max_new_tokens=4))


def test_a_refused_request_leaves_no_lock() -> None:
    """PC-11: a full pool refuses a request whose prefix is cached, again and again; then everything can be evicted."""
    bench = Bench(pages=40)
    bench.ask("warm", SHARED[:40])
    bench.run()
    bench.ask("big", np.arange(80) % 5, new=20)
    bench.step()
    locked = bench.scheduler.cache.tree.locked_pages
    bench.ask("refused", np.concatenate([SHARED[:40], np.full(60, 3)]), new=20)
    for _ in range(5):
        assert not bench.step()[1]
        assert bench.scheduler.prefill.waiting
        assert bench.scheduler.cache.tree.locked_pages - locked <= 5 // SIZE + 1, "only the generation of `big` locks more"
    bench.run()
    assert bench.ended["refused"].finish.kind == "length"
    assert bench.scheduler.cache.available == 40
    assert len(bench.scheduler.cache.allocate(40)) == 40


def test_a_small_request_does_not_pass_a_big_one_that_does_not_fit() -> None:
    bench = Bench(pages=40)
    bench.ask("running", np.arange(80) % 5, new=20)
    bench.step()
    bench.ask("big", np.arange(100) % 7)
    bench.ask("small", np.arange(8))
    assert not bench.step()[1]
    bench.run()
    assert set(bench.ended) == {"running", "big", "small"}


def test_step_tokens_are_never_exceeded_and_chunks_fill_them() -> None:
    bench = Bench(chunk=32)
    prompts = [np.arange(length) * 3 % 29 + shift for shift, length in enumerate((50, 7, 70))]
    for index, prompt in enumerate(prompts):
        bench.ask(f"r{index}", prompt)
    assert bench.step()[1] == {"r0": (0, 32)}
    assert bench.step()[1] == {"r0": (32, 50), "r1": (0, 7), "r2": (0, 7)}
    assert bench.step()[1] == {"r2": (7, 39)}
    assert bench.step()[1] == {"r2": (39, 70)}


def test_uncut_prompts_respect_max_prefill_tokens_unless_alone() -> None:
    bench = Bench(max_prefill_tokens=60)
    for rid, start in (("a", 0), ("b", 1), ("long", 2)):
        bench.ask(rid, (np.arange(90 if rid == "long" else 40) + start) * 7 % 37)
    assert [set(bench.step()[1]) for _ in range(3)] == [{"a"}, {"b"}, {"long"}]


def test_decode_rows_ride_along_only_when_mixed() -> None:
    for mixed in (False, True):
        bench = Bench(chunk=16, enable_mixed_chunk=mixed)
        bench.ask("old", np.arange(8), new=20)
        bench.step()
        bench.ask("new", np.arange(40) % 9 + 20, new=2)
        plan, pieces = bench.step()
        assert plan is not None
        assert pieces == {"new": (0, 16)}
        assert len(plan.slots) == (2 if mixed else 1)
