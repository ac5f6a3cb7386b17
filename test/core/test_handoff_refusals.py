"""Handoffs that do not come about: who hears of it, when, and in which words."""

from __future__ import annotations

import numpy as np
import pytest
from core.handoff_world import DIGEST, PROMPT, ask, pair, reserved, said, step
from core.test_handoff_sim import LIMITS, P

from radixpd.core.handoff import Drained, NotNeeded, PeerAbort, PeerLost, Renew, Reserve, Room


def test_pd_08_a_live_room_is_refused_twice_and_a_dead_one_stays_dead() -> None:
    world = pair()
    reserved(world)
    ask(world.d, Room(1, "other:1"), name="again")
    world.d._collect()
    assert "bootstrap_room 1 is in use" in world.d.asked["again-0"].ends[0].finish.message
    world.p.scheduler.receive(PeerAbort(5, "never mind", 499), "d", 0.0)
    said(world.p)
    world.p.scheduler.receive(Reserve(5, 21, 0, np.arange(3), 2.0, DIGEST, 0), "d", 0.1)
    assert said(world.p) == [PeerAbort(5, "decode gave the handoff up: never mind", 499)], "with the status that it ended with"


@pytest.mark.parametrize("first", ["body", "reserve"])
def test_pd_08_two_prompts_with_one_room_do_not_meet(first: str) -> None:
    world = pair()
    message = reserved(world)
    p = world.p.scheduler
    for event in ("reserve", "body") if first == "reserve" else ("body", "reserve"):
        if event == "body":
            ask(world.p, Room(1), PROMPT[::-1].copy())
        else:
            p.receive(message, "d", 0.0)
    assert step(world.p) == []
    told = said(world.p)
    assert (told[0].room, told[0].status, told[1:]) == (1, 400, [Drained(1)])
    assert "differs" in told[0].reason
    world.p._collect()
    assert world.p.asked["1-0"].ends[0].finish.status == 400


def test_pd_03_what_prefill_refuses_decode_hears_at_once() -> None:
    world = pair()
    message, p = reserved(world), world.p.scheduler
    p.receive(message, "d", 0.0)
    ask(world.p, Room(1), max_new_tokens=10**4)  # refused by the brain itself
    told = said(world.p)
    assert [type(each) for each in told] == [PeerAbort, Drained]
    assert (told[0].status, "over the context length" in told[0].reason) == (400, True)
    for each in told:
        world.d.scheduler.receive(each, P, 0.0)
    world.d._collect()
    assert world.d.asked["1-0"].ends[0].finish.status == 400
    world.d.check()


def test_pd_03_what_prefill_refused_before_decode_asked_is_told_then() -> None:
    world = pair()
    world.p.scheduler.refuse(Room(1), "the queue is full", 503, 0.0)
    assert said(world.p) == []
    world.p.scheduler.receive(reserved(world), "d", 1.0)
    assert said(world.p) == [PeerAbort(1, "the queue is full", 503)]


def test_pd_03_what_decode_refuses_prefill_hears_at_once() -> None:
    world = pair()
    world.d.scheduler.refuse(Room(1, P), "too long", 400, 0.0)
    told = said(world.d)
    assert told == [PeerAbort(1, "too long", 400)]
    ask(world.p, Room(1))
    world.p.scheduler.receive(told[0], "d", 0.0)
    world.p._collect()
    finish = world.p.asked["1-0"].ends[0].finish
    assert (finish.status, "too long" in finish.message) == (400, True)
    world.p.scheduler.receive(PeerAbort(2, "too long", 400), "d", 0.0)
    ask(world.p, Room(2))  # comes after the word about it
    world.p._collect()
    finish = world.p.asked["2-0"].ends[0].finish
    assert (finish.status, "bootstrap_room 2 is over: " in finish.message, "too long" in finish.message) == (400, True, True)


def test_a_refused_request_does_not_end_the_room_of_another() -> None:
    world = pair()
    message = reserved(world)
    world.d.scheduler.refuse(Room(1, P), "too long", 400, 0.0)
    assert said(world.d) == []
    ask(world.p, Room(1))
    world.p.scheduler.receive(message, "d", 0.0)
    world.p.scheduler.refuse(Room(1), "too long", 400, 0.0)
    assert said(world.p) == []
    assert len(step(world.p)) == 1


def test_pd_20_renewals_do_not_keep_a_room_whose_request_never_comes() -> None:
    world = pair()
    p = world.p.scheduler
    p.receive(reserved(world), "d", 0.0)
    for now in np.arange(0.0, LIMITS.body, 0.5):
        p.receive(Renew(1, 2.0), "d", now)
        p.plan(now, 0)
    assert said(world.p) == []
    p.plan(LIMITS.body + 0.2, 0)
    told = said(world.p)
    assert isinstance(told[0], PeerAbort)
    assert told[0].reason == "no request came for room 1 within 3 s (--disaggregation-bootstrap-timeout of the prefill server)"
    assert told[0].status == 504


def test_a_room_for_which_decode_has_no_pages_yet_is_kept_while_it_is_renewed() -> None:
    world = pair(d_tokens=32, slots=4)
    p, d = world.p.scheduler, world.d.scheduler
    reserved(world)
    ask(world.d, Room(2, P))
    ask(world.p, Room(2))
    for now in np.arange(0.0, LIMITS.body + 0.75, 0.25):
        d.plan(now, 0)
        for message in said(world.d):
            if message.room == 2:
                assert isinstance(message, Renew)
                p.receive(message, "d", now)
        p.plan(now, 0)
        assert world.p.asked["2-0"].ends == []
    p.plan(LIMITS.body + LIMITS.lease + 1.0, 0)
    assert "not renewed" in said(world.p)[0].reason


def test_both_values_of_a_mismatch_are_named() -> None:
    world = pair()
    ask(world.p, Room(1))
    world.p.scheduler.receive(Reserve(1, 99, 0, np.arange(13), 2.0, DIGEST, 0), "d", 0.0)
    (told, _) = said(world.p)
    assert isinstance(told, PeerAbort)
    assert "21 tokens" in told.reason
    assert "99" in told.reason


def test_pd_20_errors_of_waiting_name_phase_limit_and_option() -> None:
    world = pair()
    ask(world.p, Room(1))
    world.p.scheduler.plan(LIMITS.body + 1, 0)
    world.p._collect()
    message = world.p.asked["1-0"].ends[0].finish.message
    assert message == "no decode server reserved room 1 within 3 s (--disaggregation-bootstrap-timeout of the prefill server)"
    reserved(world, 2)
    world.d.scheduler.plan(LIMITS.transfer + 1, 0)
    world.d._collect()
    finish = world.d.asked["2-0"].ends[0].finish
    assert finish.status == 504
    assert "first token and KV of room 2 did not come from prefill:1 within 4 s (--disaggregation-transfer-timeout)" in finish.message


def test_pd_19_a_room_that_nobody_renews_is_dropped_before_anything_is_sent() -> None:
    world = pair(chunk=16)
    message = reserved(world)
    ask(world.p, Room(1))
    world.p.scheduler.receive(message, "d", 0.0)
    world.p.scheduler.receive(Renew(1, 2.0), "d", 1.9)
    world.p.scheduler.role.tick(3.8)
    assert not world.p.asked["1-0"].ends
    world.p.scheduler.role.tick(4.0)
    world.p._collect()
    assert world.p.asked["1-0"].ends
    assert world.p.scheduler.load().request_pages == 0


def test_with_fallback_a_lost_peer_costs_time_not_answers() -> None:
    world = pair(fallback=True)
    reserved(world)
    world.d.scheduler.receive(PeerLost(P, "killed"), "", 0.0)
    for _ in range(12):
        step(world.d)
        world.d._collect()
    world.d._check_tokens("1-0", world.d.asked["1-0"], world.d.asked["1-0"].ends[0])


def test_strangers_change_nothing_and_are_counted() -> None:
    world = pair()
    message = reserved(world)
    ask(world.p, Room(1))
    p = world.p.scheduler
    p.receive(message, "d", 0.0)
    for stranger in (NotNeeded(1), PeerAbort(1, "evil"), Renew(1, 99.0)):
        p.receive(stranger, "mallory", 0.0)
    assert p.role.strangers == 3  # type: ignore[attr-defined]
    assert not world.p.asked["1-0"].ends
