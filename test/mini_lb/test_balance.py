"""The policies as functions of snapshots: whom they choose, and that they never choose who must not be chosen."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_lb.fleets import FLEET

from radixpd.errors import Overloaded
from radixpd.mini_lb.balance import POLICIES, choose
from radixpd.mini_lb.snapshot import Hits, RouteAsk, Situation, Tuning, WorkerSnapshot

ASK = RouteAsk(tokens=1000)


def _fleet(*in_flight: int, **changes: object) -> list[WorkerSnapshot]:
    return [WorkerSnapshot(f"w{i}", in_flight=load, **changes) for i, load in enumerate(in_flight)]  # type: ignore[arg-type]


def _counts(policy: str, workers: list[WorkerSnapshot], times: int = 400, ask: RouteAsk = ASK) -> Counter[str]:
    draw = random.Random(0)
    return Counter(choose(policy, ask, workers, Situation(turn, draw)).worker for turn in range(times))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=100, deadline=None)
@given(workers=FLEET, tokens=st.integers(0, 5000), turn=st.integers(0, 100), seed=st.integers(0, 100), user=st.text(max_size=3))
def test_only_usable_workers_are_chosen(policy: str, workers: list[WorkerSnapshot], tokens: int, turn: int, seed: int, user: str) -> None:
    ask, situation = RouteAsk(tokens=tokens, session=user), Situation(turn, random.Random(seed))
    usable = {worker.name for worker in workers if worker.usable}
    if not usable:
        with pytest.raises(Overloaded, match="no worker"):
            choose(policy, ask, workers, situation)
        return
    choice = choose(policy, ask, workers, situation)
    assert choice.worker in usable
    assert choice.chosen.worker == choice.worker
    assert not choice.decode
    assert choice.reason
    assert {candidate.worker for candidate in choice.candidates} <= usable


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_chooses_the_same(policy: str) -> None:
    workers = _fleet(1, 1, 1, 1)
    runs = [
        [choose(policy, ASK, workers, Situation(turn, draw)).worker for turn in range(20)] for draw in (random.Random(7), random.Random(7))
    ]
    assert runs[0] == runs[1]


def test_round_robin_takes_turns() -> None:
    assert [choose("round_robin", ASK, _fleet(9, 0, 0), Situation(turn)).worker for turn in range(4)] == ["w0", "w1", "w2", "w0"]


def test_random_takes_everybody() -> None:
    assert min(_counts("random", _fleet(9, 0, 0, 0)).values()) > 70


def test_power_of_two_never_takes_the_busiest_and_seldom_the_second() -> None:
    counts = _counts("power_of_two", _fleet(1, 2, 3, 4))
    assert counts["w3"] == 0
    assert counts["w0"] > counts["w1"] > counts["w2"] > 0


def test_least_backlog_counts_prompt_tokens_not_requests() -> None:
    workers = [WorkerSnapshot("few_long", in_flight=1, queued_tokens=9000), WorkerSnapshot("many_short", in_flight=20, queued_tokens=800)]
    assert choose("least_backlog", ASK, workers, Situation()).worker == "many_short"


@pytest.mark.parametrize("policy", ["least_backlog", "cache_aware", "kv_cost", "power_of_two"])
def test_ties_are_broken_by_chance(policy: str) -> None:
    """RT-08: equal workers get equal shares."""
    assert min(_counts(policy, _fleet(2, 2, 2, 2)).values()) > 60


def test_cache_aware_follows_a_long_match() -> None:
    workers = _fleet(0, 5)
    workers[1] = workers[1]._replace(hits=Hits(301))
    assert choose("cache_aware", ASK, workers, Situation()).worker == "w1"
    workers[1] = workers[1]._replace(hits=Hits(300))  # not more than the threshold of .3
    assert choose("cache_aware", ASK, workers, Situation()).worker == "w0"
    assert choose("cache_aware", ASK, workers, Situation(tuning=Tuning(cache_threshold=0.2))).worker == "w1"


def test_cache_aware_drops_affinity_only_beyond_both_thresholds() -> None:
    def chosen(idle: int, busy: int) -> str:
        workers = _fleet(idle, busy)
        workers[1] = workers[1]._replace(hits=Hits(900))
        return choose("cache_aware", ASK, workers, Situation()).worker

    assert chosen(0, 64) == "w1"
    assert chosen(0, 65) == "w0"
    assert chosen(200, 290) == "w1"  # 90 more, but less than half as many again
    assert chosen(200, 301) == "w0"


def test_cache_aware_spreads_equal_matches() -> None:
    workers = [worker._replace(hits=Hits(800)) for worker in _fleet(1, 0, 3)]
    assert choose("cache_aware", ASK, workers, Situation()).worker == "w1"


def test_a_user_keeps_his_worker_and_a_lost_worker_moves_only_its_own_users() -> None:
    workers = _fleet(0, 0, 0, 0, 0)
    users = [RouteAsk(tokens=10, session=f"user {i}") for i in range(300)]
    before = {ask.session: choose("consistent_hash", ask, workers, Situation()).worker for ask in users}
    assert min(Counter(before.values()).values()) > 30
    lost = workers.pop(2)
    for ask in users:
        after = choose("consistent_hash", ask, workers, Situation()).worker
        assert after == before[ask.session] or before[ask.session] == lost.name


def test_a_user_whose_worker_is_full_goes_to_one_and_the_same_other() -> None:
    ask = RouteAsk(tokens=10, session="somebody")
    idle = _fleet(0, 0, 0, 0)
    first = choose("consistent_hash", ask, idle, Situation()).worker
    busy = [worker._replace(in_flight=9 if worker.name == first else 2) for worker in idle]
    seconds = {choose("consistent_hash", ask, busy, Situation(turn, random.Random(turn))).worker for turn in range(20)}
    assert len(seconds) == 1
    assert first not in seconds


def test_without_a_user_consistent_hash_takes_the_least_busy() -> None:
    assert choose("consistent_hash", ASK, _fleet(3, 1, 2), Situation()).worker == "w1"
