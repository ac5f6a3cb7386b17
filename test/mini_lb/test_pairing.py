"""Pairs: chosen together, equal to the best of all, or not formed where one server alone is quicker."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_lb.fleets import WORKER

from radixpd.errors import Overloaded
from radixpd.mini_lb.cost import TIE_S, TIE_SHARE, Field, decode_wait, eviction, prompt_cost
from radixpd.mini_lb.pairing import MOST_PAIRS, Policies, route
from radixpd.mini_lb.snapshot import Choice, DecodeModel, Hits, PrefillModel, Role, RouteAsk, Situation, Tuning, WorkerSnapshot

SPEED = PrefillModel(a=0.01, b=0.001)
STEP = DecodeModel(base=0.02, per_row=0.001)
ASK = RouteAsk(tokens=4000, output_tokens=100)
TOGETHER = Policies("kv_cost", "kv_cost", "kv_cost")
SLOW_LINK = Tuning(work_weight=1.0, evict_weight=0.0, imbalance_soft=0.0, imbalance_hard=0.0, link_bytes_per_s=1e8, bytes_per_token=1e5)


def _worker(name: str, role: Role, **changes: object) -> WorkerSnapshot:
    return WorkerSnapshot(name, role=role, prefill=SPEED, decode=STEP)._replace(**changes)  # type: ignore[arg-type]


def _route(*workers: WorkerSnapshot, policies: Policies = TOGETHER, ask: RouteAsk = ASK, tuning: Tuning = SLOW_LINK) -> Choice:
    return route(ask, workers, policies, Situation(tuning=tuning))


def test_a_pair_counts_the_hit_at_one_and_what_need_not_move_to_the_other() -> None:
    """400 MB at 100 MB/s: 4 s for all of the prompt, of which .8 of the prefill's time is hidden."""
    choice = _route(_worker("p", "prefill", hits=Hits(1000), queued_s=0.5), _worker("d", "decode", hits=Hits(2500)))
    assert (choice.worker, choice.decode, choice.disaggregated) == ("p", "d", True)
    chosen = choice.chosen
    assert (chosen.hits.tokens, chosen.decode_hits.tokens) == (1000, 2500)
    assert chosen.prefill_s == pytest.approx(3.01)
    assert chosen.transfer_s == pytest.approx(SLOW_LINK.handoff_s)  # 1.5 s, all hidden behind 3.01 * .8
    assert chosen.ttft_s == pytest.approx(0.5 + 3.01 + SLOW_LINK.handoff_s + 0.021)
    far = _route(_worker("p", "prefill", hits=Hits(3500)), _worker("d", "decode"))
    assert far.chosen.transfer_s == pytest.approx(SLOW_LINK.handoff_s + 4.0 - 0.8 * 0.51)


def test_the_best_prefill_alone_and_the_best_decode_alone_need_not_be_the_best_pair() -> None:
    """p1 computes least; but what it saves, the transfer to a decode server without the prefix takes."""
    workers = [
        _worker("p", "prefill", hits=Hits(3900)),
        _worker("with_prefix", "decode", hits=Hits(2900), in_flight=30),
        _worker("idle", "decode"),
    ]
    assert _route(*workers).decode == "with_prefix"
    fast_link = Tuning(work_weight=1.0, evict_weight=0.0, imbalance_soft=0.0, imbalance_hard=0.0, link_bytes_per_s=1e12)
    assert _route(*workers, tuning=fast_link).decode == "idle"


def test_a_short_prompt_is_not_taken_apart() -> None:
    workers = [_worker("p", "prefill", queued_s=0.3), _worker("d", "decode")]
    choice = _route(*workers, ask=RouteAsk(tokens=50, output_tokens=100))
    assert (choice.worker, choice.decode) == ("d", "")
    assert choice.reason.startswith("not taken apart")


def test_a_prompt_that_decode_has_is_not_taken_apart() -> None:
    workers = [_worker("p", "prefill"), _worker("d", "decode", hits=Hits(3900))]
    assert (_route(*workers).worker, _route(*workers).decode) == ("d", "")


def test_a_busy_decode_server_is_not_stalled_by_a_long_prompt() -> None:
    workers = [_worker("p", "prefill", queued_s=1.0), _worker("d", "decode", in_flight=20)]
    assert _route(*workers).disaggregated
    assert _route(*workers, ask=RouteAsk(tokens=900, output_tokens=10)).disaggregated


def test_where_one_half_is_missing_the_other_answers_whole_requests() -> None:
    assert _route(_worker("p", "prefill")).worker == "p"
    alone = _route(_worker("p", "prefill", usable=False), _worker("d", "decode"))
    assert (alone.worker, alone.decode) == ("d", "")
    with pytest.raises(Overloaded):
        _route(_worker("p", "prefill", usable=False), _worker("d", "decode", usable=False))


def test_whole_servers_stand_beside_pairs() -> None:
    busy = [_worker("p", "prefill", queued_s=5.0), _worker("d", "decode")]
    assert _route(*busy, _worker("w", "regular")).worker == "w"
    assert _route(*busy, _worker("w", "regular", usable=False)).worker == "p"


def test_policies_of_the_halves_are_obeyed() -> None:
    workers = [
        _worker("p0", "prefill", in_flight=3, queued_tokens=9),
        _worker("p1", "prefill", in_flight=1, queued_tokens=99, queued_s=0.5),
        _worker("d0", "decode", in_flight=1),
        _worker("d1", "decode", in_flight=0, hits=Hits(4000)),
    ]
    choice = _route(*workers, policies=Policies("kv_cost", "least_backlog", "round_robin"))
    assert (choice.worker, choice.decode) == ("p0", "d0")
    assert choice.reason == "prefill by least_backlog, decode by round_robin"
    mixed = _route(*workers, policies=Policies("kv_cost", "kv_cost", "round_robin"))
    assert (mixed.worker, mixed.decode) == ("p0", "d0")
    assert mixed.disaggregated  # d1 could do it alone, but was not asked for


def _by_hand(ask: RouteAsk, prefills: list[WorkerSnapshot], decodes: list[WorkerSnapshot], situation: Situation) -> float:
    """The lowest score, computed pair by pair."""
    tuning = situation.tuning
    scores = []
    for p in prefills:
        first = prompt_cost(ask, p, Field.of(prefills), situation)
        for d in decodes:
            missing = ask.tokens - min(d.hits.tokens, ask.tokens)
            move = missing * tuning.bytes_per_token / tuning.link_bytes_per_s - tuning.overlap * first.prefill_s
            second = decode_wait(ask, d)[0] + eviction(d, missing, Field.of(decodes), tuning)
            scores.append(first.score + second + tuning.handoff_s + max(0.0, move))
    for d in decodes:
        if ask.tokens - d.hits.tokens <= tuning.alone_tokens:
            own = prompt_cost(ask, d, Field.of(decodes), situation)
            scores.append(own.score + decode_wait(ask, d)[0] + tuning.stall * own.prefill_s * d.in_flight)
    return min(scores)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(WORKER, min_size=1, max_size=4, unique_by=lambda w: w.name),
    st.lists(WORKER, min_size=1, max_size=4, unique_by=lambda w: w.name),
    st.integers(0, 5000),
    st.integers(0, 100),
)
def test_the_chosen_pair_is_the_best_of_all(ps: list[WorkerSnapshot], ds: list[WorkerSnapshot], tokens: int, seed: int) -> None:
    ask = RouteAsk(tokens=tokens, output_tokens=100)
    prefills = [w._replace(name=f"p{w.name}", role="prefill", usable=True) for w in ps]
    decodes = [w._replace(name=f"d{w.name}", role="decode", usable=True) for w in ds]
    situation = Situation(0, random.Random(seed), tuning=Tuning())
    choice = route(ask, [*prefills, *decodes], TOGETHER, situation)
    best = _by_hand(ask, prefills, decodes, situation)
    assert best - 1e-6 * (1 + best) <= choice.chosen.score <= best + TIE_SHARE * best + TIE_S + 1e-6


def test_of_a_large_fleet_the_best_halves_are_compared() -> None:
    draw = random.Random(0)
    prefills = [_worker(f"p{i}", "prefill", queued_s=draw.random() * 10) for i in range(64)]
    decodes = [_worker(f"d{i}", "decode", in_flight=100 * i) for i in range(64)]
    choice = _route(*prefills, *decodes)
    assert choice.worker == min(prefills, key=lambda w: w.queued_s).name
    assert choice.decode == min(decodes, key=lambda w: w.in_flight).name
    assert sum(bool(candidate.decode) for candidate in choice.candidates) <= MOST_PAIRS
