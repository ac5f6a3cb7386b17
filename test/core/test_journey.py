"""What a request's journey says, and where a live request is said to be, step by step on both sides of a handoff."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core.handoff_world import DIGEST, PROMPT, ask, ordered, pair, reserved, said, step
from core.test_handoff_sim import P, Pair, origins

from radixpd.core.handoff import Arrived, Drained, Landed, NotNeeded, PeerAbort, PeerLost, PrefillShare, Quiet, Reserve, Room, TicketDone
from radixpd.core.journey import Journey, Trail
from radixpd.core.request import Phase


def journey_of(side: Any, rid: str) -> Journey:
    side._collect()
    journey: Journey = side.asked[rid].ends[0].journey
    return journey


def where(side: Any, now: float = 0.0) -> list[tuple[str | None, str, str, float]]:
    found = side.scheduler.state(now)["requests"]
    return [(each["rid"], each["part"], each["waits_for"], round(each["since"], 6)) for each in found]


def run(side: Any, rid: str, *, limit: int = 60) -> Journey:
    """Steps until the request has ended."""
    for _ in range(limit):
        step(side, side.now + 0.25)
        side._collect()
        if side.asked[rid].ends:
            return journey_of(side, rid)
    raise AssertionError(f"{rid} does not end")


# ---- the record -------------------------------------------------------------------------------------------------------------------


def test_a_cold_and_a_warm_prompt_of_a_server_that_serves_alone() -> None:
    world = pair()
    ask(world.d, None, name="cold")
    cold = run(world.d, "cold-0")
    assert cold.prompt_tokens == 21
    assert (origins(cold), cold.leg, cold.fallback) == ((0, 0, 0, 21), "", "")
    assert cold.queue_ms == 250.0
    assert cold.prefill_ms == 250.0, "two steps of 250 ms, the first planned when it begins"
    ask(world.d, None, name="warm")
    assert origins(run(world.d, "warm-0")) == (16, 0, 0, 5)


def test_samples_share_what_was_computed_once() -> None:
    world = pair()
    ask(world.d, None, n=2)
    first = run(world.d, "solo-0")
    second = journey_of(world.d, "solo-1")
    assert (origins(first), origins(second)) == ((0, 0, 0, 21), (16, 0, 0, 5))
    assert (first.queue_ms, first.prefill_ms) == (second.queue_ms, second.prefill_ms)


def test_an_abort_before_anything_and_one_in_the_middle_of_the_prompt() -> None:
    world = pair()
    ask(world.d, None, name="waits")
    world.d.scheduler.abort("waits-0", "gone", 499)
    assert journey_of(world.d, "waits-0") == Journey(prompt_tokens=21)
    ask(world.d, None, name="half")
    step(world.d)
    world.d.scheduler.abort("half-0", "gone", 499)
    assert origins(journey_of(world.d, "half-0")) == (0, 0, 0, 16)


def test_after_a_retraction_the_first_hit_stays_and_what_was_computed_again_is_said() -> None:
    world = pair(reuse=True, chunk=64)
    ask(world.d, None, PROMPT[:17], name="stem")
    run(world.d, "stem-0")
    ask(world.d, None, max_new_tokens=9)
    step(world.d)
    step(world.d)
    world.d.scheduler.pause("retract")
    assert world.d.scheduler.flush(), "nothing is left in the cache"
    world.d.scheduler.resume()
    journey = run(world.d, "solo-0")
    assert world.d.asked["solo-0"].ends[0].retractions == 1
    assert origins(journey) == (16, 0, 0, 5)
    assert journey.recomputed_tokens == 21 + 2, "the whole prompt, and the two tokens that it had by then"


def test_a_prefix_that_came_into_the_cache_between_two_attempts_counts_as_found() -> None:
    trail = Trail()
    trail.found(0)
    trail.found(8)  # the first attempt gave its pages up before it had computed any
    trail.ran(8, 21, 21)
    assert origins(trail.journey(21)) == (8, 0, 0, 13)
    trail.ran(0, 24, 21)
    assert (origins(trail.journey(21)), trail.journey(21).recomputed_tokens) == ((8, 0, 0, 13), 24)


def handed_over(world: Pair, *, share: PrefillShare, after: tuple[float, float], skip: int = 0, **params: Any) -> Journey:
    """A handoff seen from decode: `after` how many seconds first token and KV come."""
    if skip:
        ask(world.d, None, PROMPT[: skip + 1], name="stem")
        run(world.d, "stem-0")
        world.d.now = 0.0
    ask(world.d, Room(1, P), **params)
    d = world.d.scheduler
    d.plan(0.5, 0)
    said(world.d)
    samples = params.get("n", 1)
    news = [
        (after[0], Arrived(1, np.full(samples, 9, dtype=np.int32), share=share), P),
        (after[1], Landed(1, 300, 170), ""),
    ]
    for at, message, peer in sorted(news, key=lambda each: each[0]):
        d.receive(message, peer, at)
    world.d.now = max(after)
    return run(world.d, "1-0")


def test_a_handoff_counts_what_each_side_had_and_did() -> None:
    share = PrefillShare(hit=16, computed=5, pages=2, queued=0.25, seconds=0.5, sending=0.125)
    journey = handed_over(pair(), share=share, after=(2.0, 2.5), skip=8)
    assert journey == Journey(
        prompt_tokens=21, decode_hit_tokens=8, prefill_hit_tokens=8, prefill_computed_tokens=5, pages_sent=2, bytes_raw=300, bytes_wire=170,
        queue_ms=250.0, reserve_ms=500.0, prefill_ms=500.0, transfer_ms=625.0, visible_transfer_ms=500.0, leg="decode",
    )  # fmt: skip


def test_bytes_that_came_before_the_first_token_were_not_waited_for() -> None:
    journey = handed_over(pair(), share=PrefillShare(computed=21, pages=3, sending=0.125), after=(2.0, 1.5))
    assert (journey.visible_transfer_ms, journey.transfer_ms) == (0.0, 125.0)


@pytest.mark.parametrize(("hit", "counted"), [(0, (8, 0, 13)), (8, (8, 0, 13)), (16, (8, 8, 5)), (1000, (8, 13, 0))])
def test_pc_08_what_prefill_found_counts_only_beyond_what_decode_has(hit: int, counted: tuple[int, ...]) -> None:
    world = pair()
    journey = handed_over(world, share=PrefillShare(hit=hit, computed=21 - hit, pages=2), after=(2.0, 2.0), skip=8)
    assert origins(journey) == (*counted, 0)
    cached = world.d.asked["1-0"].ends[0].cached
    assert cached == counted[0] + counted[1] <= 21


def test_samples_of_a_handoff_follow_the_first_one() -> None:
    world = pair()
    first = handed_over(world, share=PrefillShare(hit=8, computed=13, pages=3), after=(2.0, 2.0), n=2)
    second = journey_of(world.d, "1-1")
    assert (origins(first), origins(second)) == ((0, 8, 13, 0), (16, 0, 5, 0))
    assert (first.bytes_raw, second.bytes_raw, second.pages_sent) == (300, 0, 0), "what crossed once counts once"
    assert (second.leg, second.reserve_ms) == ("decode", first.reserve_ms)
    load = world.d.scheduler.load()
    assert (load.prompt_tokens_total, load.cached_tokens_total) == (42, 16), "the own cache's: sample 1 found sample 0's pages"
    assert (load.received_bytes_total, load.wire_bytes_total) == (300, 170)


def test_a_fallback_says_why_and_what_crossed_in_vain() -> None:
    world = pair(fallback=True)
    reserved(world)
    world.d.scheduler.receive(Landed(1, 300, 170), "", 1.0)
    world.d.scheduler.receive(PeerLost(P, "killed"), "", 1.5)
    journey = run(world.d, "1-0")
    assert (origins(journey), journey.bytes_raw, journey.leg) == ((0, 0, 0, 21), 300, "decode")
    assert journey.fallback == f"the prefill server {P} is gone: killed"
    load = world.d.scheduler.load()
    assert (load.fallbacks_total, load.transfer_failed_total, load.bootstrap_failed_total) == (1, 1, 0)


def test_a_peer_without_trust_is_a_fallback_and_a_short_rest_is_none() -> None:
    world = pair(d_tokens=64, slots=4, fallback=True)
    reserved(world)
    world.d.scheduler.abort("1-0", "gone", 499)
    ask(world.d, Room(2, P))
    assert "may still write into too many pages" in run(world.d, "2-0").fallback
    world = pair()
    ask(world.d, None)
    run(world.d, "solo-0")
    ask(world.d, Room(1, P), PROMPT[:20])
    journey = run(world.d, "1-0")
    assert (journey.fallback, origins(journey), journey.leg) == ("", (16, 0, 0, 4), "decode")
    assert world.d.scheduler.load().fallbacks_total == 0


def test_the_legs_of_a_prefill_server_have_journeys_of_their_own() -> None:
    world = pair()
    ask(world.p, Room(1))
    p = world.p.scheduler
    pages = np.arange(2, dtype=np.int32)
    p.receive(Reserve(1, 21, 8, pages, 9.0, DIGEST, 0), "d", 0.5)
    sends = step(world.p, 1.0) + step(world.p, 1.25)
    said(world.p)
    for send in sends:
        p.receive(TicketDone(send.ticket), "", 1.75)
    assert journey_of(world.p, "1-0") == Journey(
        prompt_tokens=21, decode_hit_tokens=8, prefill_computed_tokens=13, pages_sent=2,
        queue_ms=1000.0, reserve_ms=500.0, prefill_ms=250.0, transfer_ms=750.0, visible_transfer_ms=500.0, leg="prefill",
    )  # fmt: skip
    assert p.load().sent_pages_total == 2
    ask(world.p, Room(2))
    p.receive(NotNeeded(2), "d", 1.0)
    assert journey_of(world.p, "2-0") == Journey(prompt_tokens=21, leg="prefill")
    ask(world.p, Room(3))
    p.receive(Reserve(3, 21, 0, np.arange(3), 9.0, DIGEST, 0), "d", 1.0)
    p.receive(PeerAbort(3, "it fell over", 502), "d", 1.0)
    assert journey_of(world.p, "3-0") == Journey(prompt_tokens=21, leg="prefill", reserve_ms=1000.0)
    assert (p.load().bootstrap_failed_total, p.load().transfer_failed_total) == (1, 0)


def test_a_client_that_leaves_is_no_failure_of_the_handoff() -> None:
    world = pair()
    ask(world.p, Room(1))
    world.p.scheduler.receive(reserved(world), "d", 0.0)
    step(world.p)
    world.p.scheduler.receive(PeerAbort(1, "client gone", 499), "d", 0.0)
    load = world.p.scheduler.load()
    assert (load.bootstrap_failed_total, load.transfer_failed_total) == (0, 0)


# ---- whereabouts ------------------------------------------------------------------------------------------------------------------


def test_where_a_request_of_a_decode_server_is() -> None:
    world = pair(d_tokens=64, slots=2, reuse=False)
    d = world.d.scheduler
    ask(world.d, None, name="here", max_new_tokens=30)
    assert where(world.d, 0.25) == [("here-0", "queued", "own queue", 0.25)]
    world.d.now = 1.0
    world.d.plan()
    assert where(world.d, 1.5) == [("here-0", "prefill", "runner", 0.5)]
    world.d.run()
    world.d.apply()
    step(world.d, 2.0)
    assert where(world.d, 3.0) == [("here-0", "decode", "runner", 1.0)]
    d.pause("in_place")
    assert where(world.d, 3.0)[0][2] == "continue_generation"
    d.resume()
    ask(world.d, Room(1, P), np.arange(8, 30, dtype=np.int32).repeat(2))  # more pages than there are
    d.plan(3.0, 0)
    assert where(world.d, 4.0)[1] == ("1-0", "reserving", "own pool", 4.0)
    d.abort("here-0", "gone", 499)  # a step that writes into its pages is in flight
    d.plan(4.0, 0)
    assert where(world.d, 5.0) == [("1-0", "reserved", "runner", 1.0)]
    assert d.load().decode_transfer == 1


def test_where_a_handoff_is_on_the_way_to_a_decode_server() -> None:
    world = pair(fallback=False)
    d = world.d.scheduler
    ask(world.d, Room(1, P), n=2)
    assert where(world.d, 0.5) == [("1-0", "reserving", "own pool", 0.5), ("1-1", "fork", "sample 0", 0.5)]
    d.plan(1.0, 0)
    (shown, _) = d.state(1.5)["requests"]
    assert (shown["part"], shown["waits_for"], shown["since"], shown["room"], shown["peer"]) == ("receiving", P, 0.5, 1, P)
    assert (shown["pages"], shown["slot"] is not None, shown["phase"], shown["age"]) == (3, True, "parked", 1.5)
    d.receive(Landed(1), "", 2.0)
    assert where(world.d, 2.5)[0] == ("1-0", "landed", P, 0.5)
    d.receive(Arrived(1, np.array([9, 10], dtype=np.int32)), P, 3.0)
    assert where(world.d, 3.5)[0][:3] == ("1-0", "landing", "runner")
    world.d.now = 4.0
    assert world.d.plan()
    assert where(world.d, 4.5) == [("1-0", "decode", "runner", 0.5), ("1-1", "decode", "runner", 0.5)]
    assert [each["rid"] for each in d.state(4.5, ["1-1", "nobody"])["requests"]] == ["1-1"]
    world.d.run()
    world.d.apply()
    ask(world.d, Room(2, P), np.arange(30, 8, -1, dtype=np.int32))
    d.plan(5.0, 0)
    d.receive(Arrived(2, np.array([9], dtype=np.int32)), P, 6.0)
    assert where(world.d, 6.5)[-1] == ("2-0", "arrived", P, 0.5)
    d.abort("2-0", "gone", 499, 7.0)
    assert where(world.d, 9.0)[-1] == (None, "quarantine", P, 2.0)
    quarantined = d.state(9.0)["requests"][-1]
    assert (quarantined["pages"], quarantined["room"], quarantined["peer"]) == (3, 2, P)
    assert (d.load().quarantine_pages, d.load().request_pages) == (3, d.cache.pages_for(21) + 1 - 2)
    d.receive(Drained(2), P, 10.0)
    assert all(rid is not None for rid, *_ in where(world.d, 10.0))


def test_a_request_that_waits_for_a_busy_peer_says_so() -> None:
    world = pair()
    reserved(world)
    long = np.arange(8, 38, dtype=np.int32).repeat(2)
    for number in (2, 3, 4):
        ask(world.d, Room(number, P), np.roll(long, number))
    world.d.scheduler.plan(1.0, 0)
    assert [each[1:3] for each in where(world.d, 1.0)] == [("receiving", P), ("receiving", P), ("receiving", P), ("reserving", P)]
    load = world.d.scheduler.load()
    assert (load.decode_transfer, load.decode_prealloc) == (3, 1)


def test_where_a_leg_is_on_a_prefill_server() -> None:
    world = pair()
    p = world.p.scheduler
    message = reserved(world)
    ask(world.p, Room(1), n=1)
    assert where(world.p, 0.5) == [("1-0", "awaiting_reserve", "decode server", 0.5)]
    assert p.load().prefill_prealloc == 1
    p.receive(message, "d", 1.0)
    assert where(world.p, 1.5) == [("1-0", "queued", "own queue", 0.5)]
    (first,) = step(world.p, 2.0)
    assert where(world.p, 2.5) == [("1-0", "prefill", "runner", 0.5)]
    (second,) = step(world.p, 3.0)
    assert where(world.p, 3.5) == [("1-0", "sending", "own mover", 0.5)]
    assert (p.load().prefill_inflight, p.state(3.5)["requests"][0]["peer"]) == (1, "d")
    p.receive(TicketDone(first.ticket), "", 4.0)
    p.abort("1-0", "gone", 499, 5.0)
    assert where(world.p, 5.5) == [(None, "draining", "own mover", 0.5)]
    ordered(world.p)
    p.receive(Quiet(1), "", 6.0)
    assert where(world.p, 6.0) == []
    p.receive(Reserve(2, 21, 0, np.arange(3), 2.0, DIGEST, 0), "d", 6.0)
    assert where(world.p, 6.5) == [(None, "awaiting_body", "request", 0.5)]
    assert second.room == 1


# ---- a pause --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_pause_takes_no_pages_that_a_peer_reads(steps: int, samples: int) -> None:
    """Not in the middle of the prompt, nor between the plan of the last piece and its result, when siblings run too."""
    world = pair()
    p = world.p.scheduler
    ask(world.d, Room(1, P), n=samples)
    world.d.scheduler.plan(0.0, 0)
    (message,) = said(world.d)
    ask(world.p, Room(1), n=samples)
    ask(world.p, None, np.arange(30, 9, -1, dtype=np.int32), name="plain")
    p.receive(message, "d", 0.0)
    world.p.plan()
    if steps == 2:
        world.p.plan()
    sends, world.p.planned = world.p.planned, []
    p.pause("retract")
    leader = p.requests["1-0"]
    assert (leader.phase, leader.attempt) == (Phase.RUNNING, 0)
    assert not p.cache.allocator.free_map()[np.concatenate([send.source for send in sends])].any()
    assert all(request.attempt == 0 for request in p.requests.values() if request.pinned)
    assert all(request.phase is Phase.WAITING for rid, request in p.requests.items() if rid.startswith("plain"))
    while world.p.run() or world.p.apply():
        pass
    p.resume()
    for _ in range(8):
        sends += step(world.p)
    for send in sends:
        p.receive(TicketDone(send.ticket), "", 1.0)
    world.p._collect()
    (arrived,) = said(world.p)
    assert isinstance(arrived, Arrived)
    assert len(arrived.tokens) == samples
    assert all(world.p.asked[f"1-{index}"].ends[0].finish.kind == "length" for index in range(samples))


def test_nobody_can_retract_what_a_peer_reads() -> None:
    world = pair()
    ask(world.p, Room(1))
    world.p.scheduler.receive(reserved(world), "d", 0.0)
    step(world.p)
    with pytest.raises(AssertionError, match="a peer reads its pages"):
        world.p.scheduler.roster.retract(world.p.scheduler.requests["1-0"], 0.0)
