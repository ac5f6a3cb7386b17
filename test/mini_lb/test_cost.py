"""kv_cost: the arithmetic of one choice, and what its prices are for."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_lb.fleets import FLEET

from radixpd.mini_lb.balance import choose
from radixpd.mini_lb.cost import TIE_S, TIE_SHARE, decode_wait
from radixpd.mini_lb.snapshot import Choice, DecodeModel, Hits, PrefillModel, RouteAsk, Situation, Tuning, WorkerSnapshot

SPEED = PrefillModel(a=0.01, b=0.001, c=0.0)
STEP = DecodeModel(base=0.02, per_row=0.001)
ASK = RouteAsk(tokens=1000, output_tokens=100)
PLAIN = Tuning(work_weight=1.0, hidden=0.0, evict_weight=0.0, imbalance_soft=0.0, imbalance_hard=0.0)


def _worker(name: str, **changes: object) -> WorkerSnapshot:
    return WorkerSnapshot(name, prefill=SPEED, decode=STEP)._replace(**changes)  # type: ignore[arg-type]


def _choose(*workers: WorkerSnapshot, tuning: Tuning = PLAIN, heat: float = 0.0, ask: RouteAsk = ASK) -> Choice:
    return choose("kv_cost", ask, workers, Situation(heat=heat, tuning=tuning))


def test_the_estimate_is_the_sum_of_its_parts() -> None:
    choice = _choose(_worker("w", queued_s=0.5, hits=Hits(600, 200), in_flight=4))
    only = choice.chosen
    assert only.queue_s == 0.5
    assert only.prefill_s == pytest.approx(0.01 + 0.001 * 200 + PLAIN.host_share * 0.001 * 200)
    assert only.decode_s == only.tpot_s == pytest.approx(0.025)
    assert only.ttft_s == pytest.approx(0.5 + 0.23 + 0.025)
    assert only.score == pytest.approx(only.ttft_s)


def test_a_hit_is_worth_the_queue_that_it_saves_and_no_more() -> None:
    """800 cached tokens save .8 s."""
    assert _choose(_worker("hit", hits=Hits(800), queued_s=0.75), _worker("idle")).worker == "hit"
    assert _choose(_worker("hit", hits=Hits(800), queued_s=0.85), _worker("idle")).worker == "idle"


def test_pages_in_the_host_tier_are_worth_less_than_in_the_device_tier() -> None:
    workers = [_worker("device", hits=Hits(800)), _worker("host", hits=Hits(0, 800)), _worker("none")]
    choice = _choose(*workers)
    assert [candidate.worker for candidate in choice.candidates] == ["device", "host", "none"]


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    chosen = _choose(_worker("w", hits=Hits(1000))).chosen
    assert chosen.prefill_s == pytest.approx(0.011)


def test_unequal_machines_are_used_as_they_are() -> None:
    """A machine four times as fast takes a queue up to four times as long before a slow idle one is better."""
    fast = PrefillModel(a=0.0025, b=0.00025)
    assert _choose(_worker("fast", prefill=fast, queued_s=0.7), _worker("slow")).worker == "fast"
    assert _choose(_worker("fast", prefill=fast, queued_s=0.8), _worker("slow")).worker == "slow"


def test_a_worker_without_a_free_slot_waits_for_one() -> None:
    full = _worker("full", max_running=8, in_flight=8)
    free = _worker("free", max_running=8, in_flight=7)
    wait, tpot = decode_wait(ASK, full)
    assert wait == pytest.approx(tpot + 100 * tpot / 8)
    assert decode_wait(ASK, free)[0] == pytest.approx(0.028)
    assert _choose(full, free).worker == "free"


def test_a_worker_short_of_memory_waits_for_it() -> None:
    scarce = _worker("scarce", kv_tokens=10_000, used_tokens=9500)
    ample = _worker("ample", kv_tokens=10_000, used_tokens=8000)
    wait, tpot = decode_wait(ASK, scarce)
    assert wait == pytest.approx(tpot + 100 * tpot * 600 / 10_000)
    assert decode_wait(ASK, ample)[0] == pytest.approx(tpot)
    assert _choose(scarce, ample).worker == "ample"


def test_work_has_a_price_beyond_its_own_time() -> None:
    """A miss that would start a little earlier than a hit delays whoever comes after it."""
    workers = [_worker("hit", hits=Hits(800), queued_s=0.85), _worker("idle")]
    assert _choose(*workers, tuning=Tuning(work_weight=1.25, imbalance_soft=0.0)).worker == "hit"


def test_a_hit_counts_even_where_tokens_seem_to_cost_nothing() -> None:
    """Noise can hide what tokens cost; then a queue of nothing must not take a prompt from its pages."""
    workers = [worker._replace(prefill=PrefillModel(a=0.01, b=1e-9)) for worker in (_worker("hit", hits=Hits(800)), _worker("idle"))]
    workers[0] = workers[0]._replace(queued_s=0.002)
    assert _choose(*workers, tuning=PLAIN).worker == "idle"
    assert _choose(*workers, tuning=Tuning(imbalance_soft=0.0)).worker == "hit"


def test_differences_by_chance_cost_nothing() -> None:
    """The same surplus in requests: of many it says something, of few nothing."""

    def ratio(mean: float, more: float) -> Choice:
        return _choose(
            _worker("hit", hits=Hits(500), recent_s=mean + more), _worker("other", recent_s=mean - more), tuning=Tuning(), heat=20.0
        )

    assert ratio(50.0, 10.0).worker == "hit"
    assert ratio(5000.0, 1000.0).worker == "other"


def test_what_must_go_is_worth_more_where_it_was_used_lately() -> None:
    tuning = Tuning(imbalance_soft=0.0)
    lively, stale = _worker("lively", room_tokens=0, idle_s=10.0), _worker("stale", room_tokens=0, idle_s=100.0)
    worth = {candidate.worker: candidate.evict_s for candidate in _choose(lively, stale, tuning=tuning).candidates}
    assert worth["lively"] > 2 * worth["stale"] > 0
    assert _choose(lively, stale, tuning=tuning).worker == "stale"
    roomy = _worker("roomy", room_tokens=5000, idle_s=1.0)
    assert _choose(lively, stale, roomy, tuning=tuning).worker == "roomy"
    assert all(candidate.evict_s == 0 for candidate in _choose(_worker("w", room_tokens=None)).candidates)


def test_a_worker_that_had_more_than_its_share_waits_until_others_have_theirs() -> None:
    choice = _choose(_worker("busy", recent_s=200.0), _worker("calm", recent_s=20.0), tuning=Tuning())
    assert choice.worker == "calm"


def test_a_hot_prefix_is_copied_before_a_cold_one_is_torn_away() -> None:
    """Beyond its bound a worker gives away a prefix that many ask for: one miss elsewhere moves much load."""
    workers = [_worker("has_it", hits=Hits(900), recent_s=1000.0), _worker("other", recent_s=400.0)]
    assert _choose(*workers, tuning=Tuning(), heat=0.0).worker == "has_it"
    assert _choose(*workers, tuning=Tuning(), heat=20.0).worker == "other"
    even = [worker._replace(recent_s=1000.0) for worker in workers]
    assert _choose(*even, tuning=Tuning(), heat=20.0).worker == "has_it"


def test_equals_are_taken_by_recent_work_then_by_chance() -> None:
    workers = [_worker("a", recent_s=3.0), _worker("b", recent_s=1.0), _worker("c", recent_s=1.0)]
    draw = random.Random(0)
    counts = Counter(choose("kv_cost", ASK, workers, Situation(turn, draw, tuning=PLAIN)).worker for turn in range(200))
    assert counts["a"] == 0
    assert min(counts["b"], counts["c"]) > 60


@settings(max_examples=300, deadline=None)
@given(workers=FLEET, tokens=st.integers(0, 5000), heat=st.floats(0, 50), seed=st.integers(0, 99))
def test_nobody_scores_better_than_the_chosen_one(workers: list[WorkerSnapshot], tokens: int, heat: float, seed: int) -> None:
    if not any(worker.usable for worker in workers):
        return
    choice = choose("kv_cost", RouteAsk(tokens=tokens), workers, Situation(0, random.Random(seed), heat))
    best = min(candidate.score for candidate in choice.candidates)
    assert choice.chosen.score <= best + TIE_SHARE * best + TIE_S
    assert len(choice.candidates) == sum(worker.usable for worker in workers)
    assert all(0 <= candidate.ttft_s <= candidate.score + 1e-9 for candidate in choice.candidates)


def test_the_reason_says_what_was_cached() -> None:
    assert _choose(_worker("w")).reason == "lowest estimate, nothing cached"
    assert _choose(_worker("w", hits=Hits(800))).reason == "lowest estimate, 800 of 1000 tokens cached"
    split = _choose(_worker("hit", hits=Hits(800), queued_s=9.0), _worker("idle"))
    assert split.reason == "lowest estimate, nothing cached, 800 elsewhere"
