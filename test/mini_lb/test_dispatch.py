"""The dispatcher: it knows what it has sent before anybody reports it, never herds, and its counters come back to zero."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_lb.closed_loop import Prompt, pages, run

from radixpd.errors import Overloaded
from radixpd.mini_lb.admission import Slo
from radixpd.mini_lb.balance import POLICIES
from radixpd.mini_lb.dispatch import GRACE_S, Account, Dispatcher
from radixpd.mini_lb.feed import Change
from radixpd.mini_lb.snapshot import Role, RouteAsk, WorkerSnapshot


def _fleet(count: int, *, events: bool = False, **changes: object) -> list[WorkerSnapshot]:
    return [WorkerSnapshot(f"w{i}", events=events, **changes) for i in range(count)]  # type: ignore[arg-type]


def _ask(*names: object, tokens: int = 0) -> RouteAsk:
    prompt = pages(*names)
    return RouteAsk(tokens=tokens or 16 * len(prompt), pages=prompt)


def _send(dispatcher: Dispatcher, ask: RouteAsk, fleet: list[WorkerSnapshot], now: float) -> tuple[str, Account]:
    choice = dispatcher.pick(ask, fleet, now)
    return choice.worker, dispatcher.dispatched(ask, choice, now)


@pytest.mark.parametrize("policy", ["kv_cost", "least_backlog", "power_of_two", "cache_aware"])
def test_a_burst_that_nobody_has_reported_is_spread(policy: str) -> None:
    """All 80 come before any worker says a word: whoever trusts reports alone sends them all to one."""
    dispatcher, fleet = Dispatcher(policy), _fleet(4, running=0, waiting=0)
    counts = Counter(_send(dispatcher, _ask("new", n, tokens=1000), fleet, 0.0)[0] for n in range(80))
    assert max(counts.values()) <= 2 * min(counts.values())


@pytest.mark.parametrize("policy", ["kv_cost", "cache_aware"])
def test_misses_one_by_one_take_everybody(policy: str) -> None:
    """RT-08: 40 unique prompts, each after the one before; the fleet is always idle."""
    for seed in range(5):
        dispatcher, fleet, counts = Dispatcher(policy, seed=seed), _fleet(4), Counter[str]()
        for number in range(40):
            name, account = _send(dispatcher, RouteAsk(tokens=500, prompt=random.Random(number).randbytes(2000)), fleet, number)
            counts[name] += 1
            account.first_token(number + 0.2)
            account.done(number + 0.5, output_tokens=10)
        assert min(counts[f"w{i}"] for i in range(4)) >= 3


def test_what_was_just_sent_counts_as_cached_there_before_any_event() -> None:
    dispatcher, fleet = Dispatcher(), _fleet(4, events=True)
    first, account = _send(dispatcher, _ask(*range(50)), fleet, 0.0)
    account.first_token(0.1)
    account.done(0.2)
    choice = dispatcher.pick(_ask(*range(50), "more"), fleet, 0.3)
    assert (choice.worker, choice.chosen.hits.tokens) == (first, 800)


def test_of_a_worker_that_tells_nothing_else_is_believed_after_a_while() -> None:
    dispatcher, fleet = Dispatcher(), _fleet(2, events=True)
    name, account = _send(dispatcher, _ask(*range(50)), fleet, 0.0)
    later = 100.0
    assert dispatcher.pick(_ask(*range(50)), fleet, later).chosen.hits.tokens  # still under way
    account.done(later)
    assert dispatcher.pick(_ask(*range(50)), fleet, later + GRACE_S + 0.1).chosen.hits.tokens == 0
    dispatcher.feed(name).live(0, [Change(pages(*range(30)), stored=True)], later + 5)
    choice = dispatcher.pick(_ask(*range(50)), fleet, later + 6)
    assert (choice.worker, choice.chosen.hits.tokens, choice.chosen.hits.exact) == (name, 480, True)


@pytest.mark.parametrize("gone", [Change(pages(*range(50))[20:]), Change(cleared=True)], ids=["removed", "cleared"])
def test_what_was_just_sent_is_not_believed_to_be_there_once_the_worker_says_that_it_is_gone(gone: Change) -> None:
    dispatcher, fleet = Dispatcher(), _fleet(2, events=True)
    name, account = _send(dispatcher, _ask(*range(50)), fleet, 0.0)
    account.done(0.1)
    feed = dispatcher.feed(name)
    feed.live(0, [Change(pages(*range(50)), stored=True)], 0.1)
    feed.live(1, [gone], 0.2)
    hits = {each.worker: each.hits.tokens for each in dispatcher.pick(_ask(*range(50)), fleet, 0.3).candidates}
    assert hits[name] == (0 if gone.cleared else 320)


@pytest.mark.parametrize("gone", [Change(pages(*range(50))[20:]), Change(cleared=True)], ids=["removed", "cleared"])
def test_what_an_open_request_will_bring_back_is_believed_to_be_there(gone: Change) -> None:
    dispatcher, fleet = Dispatcher(), _fleet(2, events=True)
    name, account = _send(dispatcher, _ask(*range(50)), fleet, 0.0)
    feed = dispatcher.feed(name)
    feed.live(0, [gone], 0.1)  # of before the request came there
    assert dispatcher.pick(_ask(*range(50), "more"), fleet, 0.2).chosen.hits.tokens == 800
    account.done(0.3)
    feed.live(1, [gone], 0.4)
    hits = {each.worker: each.hits.tokens for each in dispatcher.pick(_ask(*range(50), "more"), fleet, 0.5).candidates}
    assert hits[name] == (0 if gone.cleared else 320)


def test_a_replay_of_the_past_says_nothing_about_what_was_sent_since() -> None:
    dispatcher, fleet = Dispatcher(), _fleet(2, events=True)
    name, account = _send(dispatcher, _ask(*range(50)), fleet, 0.0)
    account.done(0.05)
    feed = dispatcher.feed(name)
    assert feed.ask(anyway=True) == 0
    feed.replayed(0, [Change(pages(*range(50)), stored=True)], 0.1)
    feed.replayed(1, [Change(pages(*range(50)))], 0.1)
    assert dispatcher.pick(_ask(*range(50), "more"), fleet, 0.2).chosen.hits.tokens == 800
    feed.replay_ended(0.3)
    feed.live(2, [Change(pages(*range(50)))], 0.3)
    assert dispatcher.pick(_ask(*range(50), "more"), fleet, 0.4).chosen.hits.tokens == 0


def test_workers_without_events_are_followed_by_what_was_sent_there() -> None:
    dispatcher, fleet = Dispatcher(), _fleet(4)
    text = random.Random(0).randbytes(6400)
    name, account = _send(dispatcher, RouteAsk(tokens=1600, prompt=text), fleet, 0.0)
    account.done(1.0)
    choice = dispatcher.pick(RouteAsk(tokens=1700, prompt=text + b"x" * 400), fleet, 1000.0)
    assert choice.worker == name
    assert choice.chosen.hits.tokens == pytest.approx(1600, abs=32)
    assert not choice.chosen.hits.exact


def test_a_small_cache_is_not_believed_to_hold_everything() -> None:
    """The worker's own size bounds what it is taken to have, least recently sent first."""
    dispatcher, fleet = Dispatcher(), _fleet(1, kv_tokens=1600, free_tokens=1600)
    for number in range(10):
        _send(dispatcher, _ask(number, *range(49)), fleet, number)[1].done(number + 0.5)
    held = [dispatcher.pick(_ask(number, *range(49)), fleet, 20.0).chosen.hits.tokens for number in range(10)]
    assert sum(held) <= 1600
    assert held[9] == 799
    assert held[0] == 0


def test_another_namespace_matches_nothing() -> None:
    """IS-04: the same prompt under another salt is another prompt, for exact and for approximate knowledge."""
    dispatcher, fleet = Dispatcher(), _fleet(2)
    text = b"the same prompt " * 100
    for salt in (b"A", b"A", b"B"):
        choice = dispatcher.pick(RouteAsk(tokens=400, prompt=text, namespace=salt), fleet, 0.0)
        dispatcher.dispatched(RouteAsk(tokens=400, prompt=text, namespace=b"A"), choice, 0.0)
        assert bool(choice.chosen.hits.tokens) == (salt == b"A" and dispatcher._turn > 1)


def test_a_worker_that_restarted_has_nothing_and_others_keep_theirs() -> None:
    dispatcher, fleet = Dispatcher(), _fleet(1)
    _send(dispatcher, _ask(*range(50)), fleet, 0.0)[1].done(1.0)
    dispatcher.forget("w0", 1.5)
    assert dispatcher.pick(_ask(*range(50)), fleet, 2.0).chosen.hits.tokens == 0


def test_a_worker_that_left_during_a_request_leaves_nothing_behind() -> None:
    """With its last request it leaves, and only then is that request's account closed."""
    dispatcher, fleet = Dispatcher(), _fleet(1)
    _, account = _send(dispatcher, _ask(*range(50)), fleet, 0.0)
    dispatcher.forget("w0", 1.0)
    account.done(1.0, output_tokens=3)
    assert not dispatcher._lines


def test_a_text_longer_than_is_remembered_is_taken_to_be_computed() -> None:
    """Its beginning may be cached; the rest counts as new, so that its estimate is no fiction."""
    dispatcher, fleet = Dispatcher(), _fleet(1)
    ask = RouteAsk(tokens=1 << 19, prompt=b"x" * (1 << 21))
    for _ in range(2):
        choice = dispatcher.pick(ask, fleet, 0.0)
        dispatcher.dispatched(ask, choice, 0.0).done(0.0)
    assert choice.chosen.hits.tokens == 8192 * 16


def test_only_load_of_others_that_stays_is_counted() -> None:
    """A report that crosses with our own requests shows a surplus once; the next one does not."""
    dispatcher, (worker,) = Dispatcher(), _fleet(1)
    report = worker._replace(running=5, waiting=2)
    line = dispatcher._line("w0")
    dispatcher.reported(report, 0.0)
    assert line.in_flight == 0
    dispatcher.reported(report, 1.0)
    assert line.in_flight == 7
    assert dispatcher.pick(_ask(1), [worker], 1.0).chosen.queue_s > 0
    accounts = [_send(dispatcher, _ask(n), [worker], 1.0)[1] for n in range(3)]
    assert line.in_flight == 10
    dispatcher.reported(worker._replace(running=3), 2.0)
    assert line.in_flight == 3
    for account in accounts:
        account.done(3.0)
    assert line.in_flight == 0


STEPS = st.lists(st.tuples(st.sampled_from(["send", "send", "first", "prefilled", "done", "forget"]), st.integers(0, 30)), max_size=80)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.booleans(), st.booleans(), st.sampled_from(sorted(POLICIES)))
def test_counters_come_back_to_zero_whatever_happens(steps: list[tuple[str, int]], pairs: bool, stream: bool, policy: str) -> None:
    """RT-06: calls late, twice, in any order, for whole workers and for pairs."""
    roles: list[Role] = ["prefill", "prefill", "decode", "decode"] if pairs else ["regular"] * 4
    fleet = [worker._replace(role=role) for worker, role in zip(_fleet(4, events=True), roles)]
    dispatcher, accounts = Dispatcher(policy), list[Account]()
    for now, (step, at) in enumerate(steps):
        if step == "send":
            ask = RouteAsk(tokens=16 * at, pages=pages(*range(at)), stream=stream, user=str(at))
            accounts.append(dispatcher.dispatched(ask, dispatcher.pick(ask, fleet, now), now))
        elif step == "forget":
            dispatcher.forget(f"w{at % 4}", now)
        elif accounts:
            account = accounts[at % len(accounts)]
            if step == "first":
                account.first_token(now, at)
            elif step == "prefilled":
                account.prefilled(now)
            else:
                account.done(now, output_tokens=at)
        for line in dispatcher._lines.values():
            assert line.in_flight >= line.generating >= 0
            assert line.tokens >= 0
            assert min(line.queued(now)) >= 0
    for account in accounts:
        account.done(1000.0)
    for line in dispatcher._lines.values():
        assert (line.in_flight, line.generating, line.tokens, line.queued(1000.0)) == (0, 0, 0, (0, 0.0))


def test_a_prefill_server_is_free_when_its_half_has_ended() -> None:
    fleet = [
        WorkerSnapshot("p", role="prefill"),
        WorkerSnapshot("d", role="decode"),
    ]
    dispatcher = Dispatcher()
    choice = dispatcher.pick(_ask(*range(500)), fleet, 0.0)
    assert choice.disaggregated
    account = dispatcher.dispatched(_ask(*range(500)), choice, 0.0)
    assert (dispatcher._line("p").in_flight, dispatcher._line("d").in_flight) == (1, 1)
    account.prefilled(1.0)
    assert (dispatcher._line("p").in_flight, dispatcher._line("d").in_flight) == (0, 1)
    account.first_token(1.1)
    account.done(2.0, output_tokens=10)
    assert dispatcher._line("d").in_flight == 0


def test_a_request_that_would_break_its_limit_is_refused_in_words() -> None:
    dispatcher, fleet = Dispatcher(), _fleet(1)
    ask = RouteAsk(tokens=100_000)
    assert dispatcher.refusal(dispatcher.pick(ask, fleet, 0.0), Slo(ttft_s=1.0), 0.0) is None  # idle: let in
    _send(dispatcher, ask, fleet, 0.0)
    reason = dispatcher.refusal(dispatcher.pick(ask, fleet, 0.0), Slo(ttft_s=1.0), 0.0)
    assert reason is not None
    assert "the limit of 1.000 s" in str(reason)


def test_without_a_usable_worker_there_is_an_error() -> None:
    with pytest.raises(Overloaded, match="no worker"):
        Dispatcher().pick(_ask(1), [WorkerSnapshot("w", usable=False)], 0.0)


def _shared(groups: int, requests: int, prefix: int, seed: int, hot: float = 0.0) -> list[list[Prompt]]:
    """Prompts of one of `groups` prefixes and a page of their own; `hot`: the share of the first group."""
    draw = random.Random(seed)
    chosen = [0 if draw.random() < hot else draw.randrange(groups) for _ in range(requests)]
    return [[pages(group, *range(prefix - 1), f"own {number}")] for number, group in enumerate(chosen)]


@pytest.mark.parametrize("events", [True, False])
def test_a_hot_prefix_is_served_by_all(events: bool) -> None:
    """RT-09: nine requests of ten share a prefix."""
    outcome = run(Dispatcher(), _shared(50, 600, 8, seed=1, hot=0.9), events=events)
    assert max(outcome.requests.values()) <= 3 * min(outcome.requests.values())
    assert outcome.hits / outcome.asked > 0.6


@pytest.mark.parametrize(("events", "stream"), [(True, True), (True, False), (False, True)])
def test_shared_prefixes_are_computed_about_once(events: bool, stream: bool) -> None:
    outcome = run(Dispatcher(), _shared(60, 1000, 8, seed=2), events=events, stream=stream)
    assert outcome.share_of_ideal >= 0.985
    assert outcome.imbalance <= 1.25


def test_conversations_stay_where_they_are() -> None:
    draw, talks = random.Random(3), []
    for number in range(150):
        group = draw.randrange(8)
        talk = [("system", group), *((number, turn) for turn in range(12))]
        talks.append([pages(*talk[: 4 + 3 * turn]) for turn in range(3)])
    outcome = run(Dispatcher(), talks)
    assert outcome.share_of_ideal >= 0.98
    assert outcome.imbalance <= 1.25


def test_kv_cost_beats_taking_turns_where_caches_are_small() -> None:
    talks = _shared(200, 800, 8, seed=4)
    shares = {policy: run(Dispatcher(policy), talks, blocks=450).share_of_ideal for policy in ("kv_cost", "round_robin")}
    assert shares["kv_cost"] > 1.5 * shares["round_robin"]


@pytest.mark.parametrize("count", [3000, pytest.param(50_000, marks=pytest.mark.full)])
def test_rt_10_unique_prompts_do_not_fill_the_memory(count: int) -> None:
    """Prompts of 2 kB that never come again, to workers that tell nothing; 50,000 under a cap of 10 MB. What Python holds stays flat."""
    dispatcher, fleet, draw = Dispatcher(cap_bytes=200 * count), _fleet(4), random.Random(0)
    held = []
    tracemalloc.start()
    try:
        for number in range(count):
            ask = RouteAsk(tokens=500, prompt=draw.randbytes(2048))
            _send(dispatcher, ask, fleet, number * 0.01)[1].done(number * 0.01 + 0.005)
            assert dispatcher.sent.size <= 200 * count
            if number % (count // 10) == count // 20:
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert dispatcher.sent.cut > 0
    assert len(dispatcher._heat) <= 4096
    assert max(held[4:]) <= 1.1 * min(held[4:]), held  # of tenths: the cap is reached in the first


def test_the_slower_machine_gets_fewer_requests() -> None:
    """Two machines, one four times as slow: both are busy, neither is drowned."""
    dispatcher, fleet = Dispatcher(), _fleet(2)
    free_at, counts, ends = {"w0": 0.0, "w1": 0.0}, Counter[str](), list[tuple[float, Account]]()
    for number in itertools.count():
        now = number * 0.05
        if now > 60:
            break
        for at, account in sorted(ends, key=lambda end: end[0]):
            if at <= now:
                account.first_token(at)
                account.done(at, output_tokens=1)
        ends = [end for end in ends if end[0] > now]
        name, account = _send(dispatcher, RouteAsk(tokens=500, prompt=str(number).encode() * 500), fleet, now)
        free_at[name] = max(now, free_at[name]) + 500 * (1.2e-4 if name == "w0" else 4.8e-4)
        ends.append((free_at[name], account))
        counts[name] += 1
    assert 2.5 < counts["w0"] / counts["w1"] < 6
    assert max(free_at.values()) < 63
