"""The real scheduler against a fake runner: random arrivals, aborts, stop strings, small pools, forks, every setting.

`World` is the rim: it hands plans to the fake runner in order, gives results back at random moments, and after every move checks
the invariants of the design. At the end every request must have ended exactly once, with the tokens that it would get alone, and
the pool must be whole.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from fakes import VOCAB, FakeRunner, continuation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixpd.config.settings import CacheSettings, SchedulerSettings
from radixpd.core.effects import Effects, Finished, Prefilled, PromptScored, TokensOut
from radixpd.core.grammars import WantGrammar
from radixpd.core.page_hash import namespace
from radixpd.core.request import Finish, Grammar, LogprobParams, Phase, SamplingParams
from radixpd.core.roles import Aggregated, MakeRole
from radixpd.core.scheduler import Scheduler
from radixpd.core.step import StepPlan, StepResult

EOS = 7
CONTEXT = 96


@dataclass
class Asked:
    """What the client wants of one sample, and what it got."""

    prompt: np.ndarray
    params: SamplingParams
    sample: int
    space: bytes
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    prefilled: int = 0
    ends: list[Finished] = field(default_factory=list)
    stopped: int = -1  # the detokenizer's cut
    exact: bool = True  # False: its KV came compressed, and its tokens are its own


class World:
    """One scheduler, one fake runner, one client that remembers everything."""

    def __init__(self, scheduler: SchedulerSettings, cache: CacheSettings, pages: int, seed: int, role: MakeRole = Aggregated) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(scheduler, cache, pages=pages, context_length=CONTEXT, eos_ids=(EOS,), role=role)
        slots = scheduler.max_running_requests
        assert slots is not None
        jump = 0 if scheduler.disable_jump_forward else 4
        self.runner = FakeRunner(pages=pages, page_size=cache.page_size, slots=slots, context_length=CONTEXT, jump=jump)
        self.wanted: list[int] = []
        self.jumps = 0
        self.settings, self.cache, self.pages = scheduler, cache, pages
        self.asked: dict[str, Asked] = {}
        self.sent: deque[StepPlan] = deque()
        self.done: deque[StepResult] = deque()
        self.stems = [self._ids(self.rng.randint(1, 40)) for _ in range(4)]
        self.now = 0.0
        self.hits = self.retractions = 0

    def _ids(self, count: int) -> np.ndarray:
        return np.array([self.rng.randrange(8, VOCAB) for _ in range(count)], dtype=np.int32)

    # ---- moves ----

    def arrive(self) -> None:
        rng = self.rng
        stem = rng.choice(self.stems)
        prompt = np.concatenate([stem[: rng.randint(1, len(stem))], self._ids(rng.choice((0, 0, 1, 3, 20)))])
        params = SamplingParams(
            max_new_tokens=rng.choice((0, 1, 2, 7, 30)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(1000),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice(((), (3, 11))),
            n=rng.choice((1, 1, 1, 2, 3)),
            grammar=rng.choice((None, None, Grammar("ebnf", "a"), Grammar("ebnf", "b"))),
            logprobs=rng.choice((None, None, LogprobParams(), LogprobParams(start=0), LogprobParams(start=5))),
        )
        space = rng.choice((b"", b"", namespace({"cache_salt": "a"})))
        rids = tuple(f"r{len(self.asked) + i}" for i in range(params.n))
        for index, rid in enumerate(rids):
            self.asked[rid] = Asked(prompt, params, index, space)
        self.scheduler.arrive(rids, prompt, params, namespace=space, priority=rng.randrange(3), now=self.now)

    def abort(self) -> None:
        if live := [rid for rid, asked in self.asked.items() if not asked.ends]:
            self.scheduler.abort(self.rng.choice(live), "client gone", 499, self.now)

    def stop(self) -> None:
        """The detokenizer found a stop string somewhere in what was sent."""
        live = [(rid, a) for rid, a in self.asked.items() if not a.ends and a.tokens and a.stopped < 0]
        if live:
            rid, asked = self.rng.choice(live)
            asked.stopped = self.rng.randint(1, len(asked.tokens))
            self.scheduler.stop(rid, asked.stopped, "stop", self.now)

    def compile(self) -> bool:
        """The runner has made a grammar ready."""
        if not self.wanted:
            return False
        self.scheduler.grammar_answered(self.wanted.pop(self.rng.randrange(len(self.wanted))), "", 200, self.now)
        return True

    def plan(self) -> bool:
        plan = self.scheduler.plan(self.now, self.rng.randrange(2**32))
        if plan is not None:
            self._check_plan(plan)
            self.sent.append(plan)
        return plan is not None

    def run(self) -> bool:
        if not self.sent:
            return False
        self.done.append(self.runner.step(self.sent.popleft()))
        self.jumps += len(self.done[-1].forced)
        return True

    def apply(self) -> bool:
        if not self.done:
            return False
        self.scheduler.apply(self.done.popleft(), self.now)
        return True

    def move(self, *, arrivals: bool) -> None:
        self.now += 0.01
        weights = (3, 0.4, 0.6, 1, 6, 6, 6) if arrivals else (0, 0, 0, 1, 1, 1, 1)
        name = self.rng.choices(("arrive", "abort", "stop", "compile", "plan", "run", "apply"), weights)[0]
        getattr(self, name)()
        self._collect()
        self.check()

    def finish(self) -> None:
        """Until nothing is left to do; a scheduler that stops planning while somebody waits is stuck."""
        for _ in range(20_000):
            progress = self.plan()
            progress = self.run() or progress
            progress = self.apply() or progress
            progress = self.compile() or progress
            self._collect()
            self.check()
            if not progress:
                break
        assert all(asked.ends for asked in self.asked.values()), "somebody waits for ever"

    # ---- what the client sees ----

    def _take(self) -> Effects:
        return self.scheduler.drain()

    def _collect(self) -> None:
        effects = self._take()
        self.wanted += [order.id for order in effects.grammars if isinstance(order, WantGrammar)]
        for effect in effects.client:
            if isinstance(effect, TokensOut):
                for at, (rid, token) in enumerate(zip(effect.rids, effect.ids.tolist(), strict=True)):
                    asked = self._live(rid)
                    assert asked.prefilled, "a token before the prompt was announced"
                    asked.tokens.append(token)
                    if effect.logprobs and effect.logprobs[at] is not None:
                        asked.logprobs.append(effect.logprobs[at].logprob)
            elif isinstance(effect, Prefilled):
                self._live(effect.rid).prefilled += 1
                self.hits += effect.cached
            elif isinstance(effect, PromptScored):
                asked = self._live(effect.rid)
                assert not asked.tokens, "scores after the first token"
                asked.scores += effect.scores.logprobs.tolist()
            elif isinstance(effect, Finished):
                self._live(effect.rid).ends.append(effect)
                self.retractions += effect.retractions

    def _live(self, rid: str) -> Asked:
        asked = self.asked[rid]
        assert not asked.ends, f"{rid}: something came after its end"
        return asked

    # ---- invariants ----

    def _check_plan(self, plan: StepPlan) -> None:
        prompts = plan.lengths[: len(self.scheduler._in_flight[-1].pieces)]
        chunk = self.settings.chunked_prefill_size or 0
        limit = min(self.settings.max_prefill_tokens, chunk) if chunk > 0 else self.settings.max_prefill_tokens
        if chunk > 0:
            assert prompts.sum() <= limit, "over the token budget"
        else:
            assert prompts.sum() <= limit or len(prompts) == 1, "over the token budget"
        assert len(set(plan.slots.tolist())) == len(plan.slots), "one slot, two rows"
        ends = plan.starts[plan.sample_rows] + plan.lengths[plan.sample_rows]
        assert (ends < self.scheduler.table.limit[plan.sample_slots]).all(), "a token beyond the allowed length"
        assert len(set(plan.sample_slots.tolist())) == len(plan.sample_slots), "one slot, two samples"

    def check(self) -> None:
        """One owner a page and the sum; counters equal the tree; locks hold what requests use."""
        cache, table = self.scheduler.cache, self.scheduler.table
        tree = cache.tree
        nodes = list(tree.nodes())
        in_tree = [page for node in nodes for page in node.page_ids]
        assert tree.pages == len(in_tree)
        assert tree.locked_pages == sum(len(n.page_ids) for n in nodes if n.refs)
        running = [r for r in table.requests if r is not None]
        own = [page for r in running for page in table.own_pages(r.slot).tolist()]
        own += [page for kept in self.scheduler.holdings.spares.values() for pages in kept for page in pages.tolist()]
        own += [page for pages in cache._quarantine.values() for page in pages.tolist()]
        free = cache.allocator._stack[: cache.allocator.free_pages].tolist()
        assert sorted(free + in_tree + own) == list(range(self.pages)), "a page has no owner, or two"
        locks: dict[int, int] = {}
        for request in running:
            if request.lock is not None:
                self._check_lock(request)
                for node in request.lock.path():
                    locks[id(node)] = locks.get(id(node), 0) + 1
        for node in nodes:
            assert node.refs == locks.get(id(node), 0), "refs are not the locks on the node and below"
            assert all(child.parent is node for child in node.children.values())
            assert (node in tree.evictable) == (not node.refs and not node.children)
        for request in self.scheduler.requests.values():
            assert request.phase is not Phase.FINISHED

    def _check_lock(self, request: object) -> None:
        table = self.scheduler.table
        path = [page for node in reversed(list(request.lock.path())) for page in node.page_ids]
        shared = table.page_table[request.slot, : table.shared[request.slot]].tolist()
        assert path == shared, "the lock does not cover the shared pages"
        if not self.cache.disable_radix_cache:
            assert all(node.space == request.space == self.asked[request.rid].space for node in request.lock.path()), "namespaces mix"

    def check_end(self) -> None:
        """Everybody ended once, with the text they would get alone; the pool is whole and flushes."""
        for rid, asked in self.asked.items():
            end = asked.ends[0]
            if not asked.exact:
                continue
            self._check_tokens(rid, asked, end)
            if asked.params.logprobs and end.finish.kind != "abort":
                self._check_logprobs(asked)
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.request_pages, load.locked_pages) == (0, 0, 0, 0)
        assert load.free_pages + load.tree_pages == self.pages
        if self.cache.disable_radix_cache:
            assert load.tree_pages == 0
            assert not self.scheduler.cache.tree.roots
        assert self.scheduler.flush()
        assert self.scheduler.load().free_pages == self.pages
        assert not self.scheduler.cache.tree.roots

    def _check_tokens(self, rid: str, asked: Asked, end: Finished) -> None:
        alone = continuation(asked.prompt, asked.params, asked.sample, CONTEXT)
        assert asked.tokens == alone[: len(asked.tokens)], f"{rid} differs from its solo run"
        assert end.prompt == len(asked.prompt)
        if end.finish.kind == "abort":
            return
        assert asked.prefilled == 1
        if asked.stopped >= 0:
            assert end.finish == Finish("stop", matched="stop")
            assert end.completion == asked.stopped
            return
        expected = asked.params.max_new_tokens
        stops = set(asked.params.stop_token_ids) | (set() if asked.params.ignore_eos and not asked.params.grammar else {EOS})
        hit = next((i for i, token in enumerate(alone[:expected]) if token in stops), None)
        if hit is None:
            assert end.finish == Finish("length")
            assert len(asked.tokens) == expected == end.completion
        else:
            assert end.finish == Finish("stop", matched=alone[hit])
            assert len(asked.tokens) == hit + 1 == end.completion

    def _check_logprobs(self, asked: Asked) -> None:
        assert len(asked.logprobs) == len(asked.tokens), "one log-probability per token"
        start = asked.params.logprobs.start
        if start >= 0 and asked.sample == 0:
            assert len(asked.scores) == max(len(asked.prompt) - max(start, 1), 0), "one score per prompt token"


def scheduler_settings(**values: object) -> SchedulerSettings:
    return SchedulerSettings(**{"max_running_requests": 6, "chunked_prefill_size": 16, "max_prefill_tokens": 64, **values})


worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "page_size": st.sampled_from((1, 4, 16)),
        "pool_tokens": st.sampled_from((80, 128, 400, 2000)),
        "overlap": st.booleans(),
        "mixed": st.booleans(),
        "policy": st.sampled_from(("fcfs", "lpm", "dfs-weight", "random", "priority")),
        "eviction": st.sampled_from(("lru", "lfu", "fifo", "priority")),
        "chunk": st.sampled_from((-1, 1, 5, 16, 64)),
        "step_tokens": st.sampled_from((16, 64)),
        "slots": st.sampled_from((3, 6, 12)),
        "reuse": st.booleans(),
        "conservativeness": st.sampled_from((0.05, 1.0)),
        "jump": st.booleans(),
    }
)


def build(case: dict[str, object]) -> World:
    page = case["page_size"]
    return World(
        scheduler_settings(
            max_running_requests=case["slots"],
            chunked_prefill_size=case["chunk"],
            max_prefill_tokens=case["step_tokens"],
            schedule_policy=case["policy"],
            schedule_conservativeness=case["conservativeness"],
            enable_mixed_chunk=case["mixed"],
            disable_jump_forward=not case["jump"],
            disable_overlap_schedule=not case["overlap"],
        ),
        CacheSettings(page_size=page, disable_radix_cache=not case["reuse"], radix_eviction_policy=case["eviction"]),
        pages=case["pool_tokens"] // page,
        seed=case["seed"],
    )


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds)
def test_everything_at_once(case: dict[str, object]) -> None:
    world = build(case)
    for _ in range(250):
        world.move(arrivals=True)
    world.finish()
    world.check_end()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_small_pool_retracts_and_texts_stay_the_same(page_size: int, overlap: bool) -> None:
    settings = scheduler_settings(max_running_requests=12, schedule_conservativeness=0.05, disable_overlap_schedule=not overlap)
    world = World(settings, CacheSettings(page_size=page_size), pages=128 // page_size, seed=3)
    for index in range(16):
        prompt = world._ids(9 + index % 7)
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=index, logprobs=LogprobParams(start=0))
        world.asked[f"r{index}"] = Asked(prompt, params, 0, b"")
        world.scheduler.arrive((f"r{index}",), prompt, params)
    for _ in range(200):
        world.move(arrivals=False)
    world.finish()
    world.check_end()
    assert world.retractions > 3, "the pool was meant to run dry"


def test_shared_prefixes_hit() -> None:
    world = World(scheduler_settings(), CacheSettings(page_size=4), pages=500, seed=5)
    for _ in range(600):
        world.move(arrivals=True)
    world.finish()
    world.check_end()
    assert world.hits > 200


@pytest.mark.full
@pytest.mark.timeout(900)
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds)
def test_everything_at_once_for_long(case: dict[str, object]) -> None:
    world = build(case)
    for _ in range(400):
        world.move(arrivals=True)
    world.finish()
    world.check_end()
