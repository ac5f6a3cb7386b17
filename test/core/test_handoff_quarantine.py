"""Handoffs that break off: pages that a peer may still write into are nobody's, and a peer that owes too many gets no more."""

from __future__ import annotations

import pytest
from core.handoff_world import PROMPT, ask, ordered, pair, reserved, said, step
from core.test_handoff_sim import LIMITS, P

from radixpd.core.handoff import CancelRoom, Drained, NotNeeded, PeerAbort, PeerLost, PeerSilent, Quiet, Renew, Reserve, Room
from radixpd.core.request import Phase


def test_a_peer_is_told_of_pages_only_when_no_own_step_writes_there() -> None:
    world = pair(d_tokens=64, slots=2, reuse=False)
    ask(world.d, None, PROMPT, max_new_tokens=30)
    step(world.d)
    step(world.d)
    world.d.plan()  # in flight: it writes into pages that the abort gives back
    world.d.scheduler.abort("solo-0", "gone", 499)
    ask(world.d, Room(1, P))
    world.d.plan()
    assert said(world.d) == []
    world.d.run()
    world.d.apply()
    world.d.plan()
    assert [type(each) for each in said(world.d)] == [Reserve]


def test_pd_02_pages_under_a_writer_are_nobodys_until_it_is_quiet() -> None:
    world = pair()
    reserved(world)
    world.d.scheduler.abort("1-0", "gone", 499)
    assert [type(each) for each in said(world.d)] == [PeerAbort]
    assert ordered(world.d)[-1] == CancelRoom(1)
    cache = world.d.scheduler.cache
    assert cache.quarantined_pages == 3
    assert cache.available == cache.allocator.pages - 3
    world.d.check()
    world.d.scheduler.receive(Drained(1), "somebody else", 0.0)
    assert cache.quarantined_pages == 3
    world.d.scheduler.receive(Drained(1), P, 0.0)
    assert cache.available == cache.allocator.pages


def test_quarantine_is_asked_about_again_and_ends_with_the_peer() -> None:
    world = pair()
    reserved(world)
    world.d.scheduler.abort("1-0", "gone", 499)
    said(world.d)
    world.d.scheduler.plan(1.0, 0)
    world.d.scheduler.plan(1.1, 0)
    world.d.scheduler.plan(2.0, 0)
    assert [type(each) for each in said(world.d)] == [PeerAbort, PeerAbort]
    world.d.scheduler.receive(PeerLost(P, "killed"), "", 0.0)
    assert world.d.scheduler.cache.quarantined_pages == 0


@pytest.mark.parametrize("fallback", [False, True])
def test_a_peer_that_keeps_too_many_pages_in_quarantine_gets_no_more(fallback: bool) -> None:
    world = pair(d_tokens=64, slots=4, fallback=fallback)  # 8 pages, of which a quarter may be quarantined
    reserved(world)
    world.d.scheduler.abort("1-0", "gone", 499)
    said(world.d)
    ask(world.d, Room(2, P))
    world.d.scheduler.plan(LIMITS.quarantine_patience + 0.1, 0)
    told = [each for each in said(world.d) if each.room == 2 and not isinstance(each, Renew)]
    ends = world.d.asked["2-0"].ends
    if fallback:
        assert (told, ends) == ([NotNeeded(2)], [])
        assert world.d.scheduler.requests["2-0"].trail.fallback
        return
    assert [(type(each), each.status) for each in told if isinstance(each, PeerAbort)] == [(PeerAbort, 503)], "the other half ends too"
    assert (ends[0].finish.kind, ends[0].finish.status) == ("abort", 503)
    assert ends[0].finish.message.startswith(f"the prefill server {P} may still write into too many pages")
    world.d.check()


@pytest.mark.parametrize("fallback", [False, True])
def test_a_burst_of_aborts_is_no_reason_to_distrust_a_peer(fallback: bool) -> None:
    world = pair(d_tokens=128, slots=4, fallback=fallback)  # 16 pages; two prompts in quarantine are more than a quarter
    for number in (1, 2):
        reserved(world, number)
    for number in (1, 2):
        world.d.scheduler.abort(f"{number}-0", "gone", 499)
    said(world.d)
    cache = world.d.scheduler.cache
    assert cache.quarantined_for(P) > LIMITS.quarantine_share * cache.allocator.pages
    ask(world.d, Room(3, P))
    world.d.scheduler.plan(LIMITS.quarantine_patience - 0.1, 0)
    assert {type(each) for each in said(world.d) if each.room == 3} == {Renew}, "what it holds counts as owed, so the room waits"
    for number in (1, 2):
        world.d.scheduler.receive(Drained(number), P, LIMITS.quarantine_patience)
    world.d.scheduler.plan(LIMITS.quarantine_patience + 0.1, 0)
    assert [type(each) for each in said(world.d)] == [Reserve]


def test_quarantine_ends_when_the_own_mover_knows_that_nobody_can_write() -> None:
    world = pair()
    reserved(world)
    world.d.scheduler.abort("1-0", "gone", 499)
    world.d.scheduler.receive(Quiet(2), "", 0.0)
    assert world.d.scheduler.cache.quarantined_pages == 3
    world.d.scheduler.receive(Quiet(1), "", 0.0)
    assert world.d.scheduler.cache.quarantined_pages == 0
    world.d.check()


def test_one_peer_may_not_owe_more_than_its_share_of_the_pool() -> None:
    """Should it fall silent, the rest of the pool still serves."""
    world = pair(d_tokens=64, slots=4)  # 8 pages; a prompt takes 3
    for number in (1, 2):
        ask(world.d, Room(number, P))
    world.d.scheduler.plan(0.0, 0)
    assert [each.room for each in said(world.d) if isinstance(each, Reserve)] == [1]
    world.d.scheduler.abort("1-0", "gone", 499)
    world.d.scheduler.receive(Quiet(1), "", 0.0)
    world.d.scheduler.plan(0.0, 0)
    assert [each.room for each in said(world.d) if isinstance(each, Reserve)] == [2]


def test_who_falls_back_does_not_wait_for_ever_for_pages_in_quarantine() -> None:
    world = pair(d_tokens=32, slots=4, fallback=True)  # 4 pages; a prompt and its output take all
    reserved(world)
    world.d.scheduler.receive(PeerSilent(P, "not heard"), "", 0.0)
    step(world.d)
    assert world.d.scheduler.requests["1-0"].phase is Phase.WAITING
    world.d.scheduler.plan(LIMITS.reserve + 1.0, 0)
    said(world.d)
    (end,) = world.d.asked["1-0"].ends
    assert (end.finish.kind, end.finish.status) == ("abort", 503)
    assert LIMITS.deadlines["reserve"] in end.finish.message
