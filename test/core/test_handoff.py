"""Handoffs one by one: who says what, what is kept from whom, and which words the errors have."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from core.test_handoff_sim import LIMITS, P, Pair
from core.test_scheduler_sim import EOS, Asked
from fakes import continuation

from radixpd.core.effects import PagesRemoved, PagesStored
from radixpd.core.handoff import (
    Arrived,
    CancelRoom,
    Drained,
    Landed,
    NotNeeded,
    PeerAbort,
    PeerLost,
    PeerMessage,
    PeerSilent,
    Quiet,
    Renew,
    Reserve,
    Room,
    TicketDone,
)  # fmt: skip
from radixpd.core.page_hash import lossy, prompt_digest
from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.request import Phase, SamplingParams
from radixpd.core.step import Send

PROMPT = np.arange(8, 29, dtype=np.int32)  # 21 tokens: two pages of 8 and a part
DIGEST = prompt_digest(PROMPT)


def pair(**case: Any) -> Pair:
    usual = {
        "page": 8, "p_tokens": 512, "d_tokens": 512, "slots": 8, "chunk": 16, "overlap": True, "reuse": True, "faults": False,
        "fallback": False, "codec": "none",
    }  # fmt: skip
    return Pair(usual | case, random.Random(1))


def ask(side: Any, room: Room | None, prompt: np.ndarray = PROMPT, *, name: str = "", **params: Any) -> None:
    wish = SamplingParams(**{"max_new_tokens": 5, "ignore_eos": True, **params})
    rids = tuple(f"{name or (room.number if room else 'solo')}-{index}" for index in range(wish.n))
    for index, rid in enumerate(rids):
        side.asked[rid] = Asked(prompt, wish, index, b"")
    side.scheduler.arrive(rids, prompt, wish, room=room)


def said(side: Any) -> list[PeerMessage]:
    """What the brain has said to its peers since the last look."""
    side._collect()
    messages, side.peer = [message for _, message in side.peer], []
    return messages


def ordered(side: Any) -> list[Any]:
    side._collect()
    orders, side.orders = side.orders, []
    return orders


def step(side: Any, now: float = 0.0) -> list[Send]:
    """One whole step; the sends of its plan."""
    side.now = now
    side.plan()
    sends, side.planned = side.planned, []
    side.run()
    side.apply()
    return sends


def reserved(world: Pair, number: int = 1) -> Reserve:
    """Decode has asked for a room."""
    ask(world.d, Room(number, P))
    world.d.scheduler.plan(0.0, 0)
    found = said(world.d)
    assert isinstance(found[0], Reserve)
    return found[0]


def test_decode_reserves_all_pages_and_prefill_sends_them_as_they_fill() -> None:
    world = pair()
    message = reserved(world)
    assert (message.room, message.prompt_tokens, message.skip, len(message.pages)) == (1, 21, 0, 3)
    ask(world.p, Room(1))
    world.p.scheduler.receive(message, "d", 0.0)
    first, second = step(world.p), step(world.p)
    assert [len(send.source) for send in (*first, *second)] == [2, 1], "whole pages with the chunk that fills them, the rest with the last"
    assert np.concatenate([send.target for send in (*first, *second)]).tolist() == message.pages.tolist()
    arrived = said(world.p)
    assert [type(each) for each in arrived] == [Arrived]
    assert arrived[0].tokens.tolist() == continuation(PROMPT, SamplingParams(), count=1)
    assert arrived[0].share.computed == 21


def test_what_decode_has_is_not_sent() -> None:
    world = pair()
    ask(world.d, None, PROMPT[:17])
    for _ in range(9):
        step(world.d)
    ask(world.d, Room(1, P))
    world.d.scheduler.plan(0.0, 0)
    message = said(world.d)[0]
    assert isinstance(message, Reserve)
    assert (message.skip, len(message.pages)) == (16, 1)
    ask(world.p, Room(1))
    world.p.scheduler.receive(message, "d", 0.0)
    sends = step(world.p) + step(world.p)
    assert [send.target.tolist() for send in sends] == [message.pages.tolist()]


def test_what_prefill_has_is_ready_at_once() -> None:
    world = pair()
    ask(world.p, None, PROMPT)
    for _ in range(9):
        step(world.p)
    message = reserved(world)
    ask(world.p, Room(1))
    world.p.scheduler.receive(message, "d", 0.0)
    (send,) = step(world.p)
    assert (len(send.source), send.ready) == (3, 2)


def test_a_wholly_cached_prompt_is_not_needed() -> None:
    world = pair()
    ask(world.d, None, PROMPT)
    for _ in range(9):
        step(world.d)
    ask(world.d, Room(1, P), PROMPT[:20])
    world.d.scheduler.plan(0.0, 0)
    assert said(world.d) == [NotNeeded(1)]
    ask(world.p, Room(1))
    world.p.scheduler.receive(NotNeeded(1), "d", 0.0)
    world.p._collect()
    assert world.p.asked["1-0"].ends[0].finish.kind == "length"


def test_not_needed_may_come_before_the_body() -> None:
    world = pair()
    world.p.scheduler.receive(NotNeeded(1), "d", 0.0)
    ask(world.p, Room(1))
    world.p._collect()
    assert world.p.asked["1-0"].ends[0].finish.kind == "length"


@pytest.mark.parametrize("first", ["arrived", "landed"])
def test_decode_starts_when_token_and_bytes_are_there(first: str) -> None:
    world = pair()
    reserved(world)
    d = world.d.scheduler
    news = {"arrived": Arrived(1, np.array([9], dtype=np.int32)), "landed": Landed(1)}
    d.receive(news.pop(first), P if first == "arrived" else "", 0.0)
    assert not world.d.plan()
    (name, last), *_ = news.items()
    d.receive(last, P if name == "arrived" else "", 0.0)
    assert world.d.plan()
    world.d._collect()
    assert world.d.asked["1-0"].tokens == [9]


def test_pd_18_a_first_token_that_ends_the_output() -> None:
    world = pair()
    ask(world.d, Room(1, P), ignore_eos=False, n=2)
    world.d.scheduler.plan(0.0, 0)
    said(world.d)
    world.d.scheduler.receive(Arrived(1, np.array([EOS, 9], dtype=np.int32)), P, 0.0)
    world.d.scheduler.receive(Landed(1), "", 0.0)
    world.d.plan()
    world.d._collect()
    assert world.d.asked["1-0"].ends[0].finish.matched == EOS
    assert not world.d.asked["1-1"].ends
    world.d.check()


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


def test_nobody_waits_for_the_end_of_a_room_whose_decode_server_is_gone() -> None:
    world = pair()
    ask(world.p, Room(1))
    p = world.p.scheduler
    p.receive(reserved(world), "d", 0.0)
    step(world.p)
    p.abort("1-0", "gone", 499)
    assert [each.part for each in p.role.stages()] == ["draining"]
    p.receive(PeerLost("d", "killed"), "", 0.0)
    assert list(p.role.stages()) == []


def test_prefill_says_drained_only_after_its_mover() -> None:
    world = pair()
    message = reserved(world)
    ask(world.p, Room(1))
    p = world.p.scheduler
    p.receive(message, "d", 0.0)
    step(world.p)
    p.receive(PeerAbort(1, "client gone", 499), "d", 0.0)
    assert said(world.p) == []
    assert ordered(world.p) == [CancelRoom(1)]
    assert world.p.asked["1-0"].ends[0].finish.status == 499
    p.receive(Quiet(1), "", 0.0)
    assert said(world.p) == [Drained(1)]
    p.receive(PeerAbort(1, "asked again", 499), "d", 0.0)
    assert said(world.p) == [Drained(1)]


def test_pd_02_a_send_behind_a_prefix_that_decode_has_is_a_send() -> None:
    """Nobody is told that all is quiet before it is, however few pages have been sent."""
    world = pair()
    ask(world.p, Room(1))
    p = world.p.scheduler
    p.receive(Reserve(1, 21, 16, np.arange(1, dtype=np.int32), 2.0, DIGEST, 0), "d", 0.0)
    step(world.p)
    assert len(step(world.p)) == 1
    said(world.p)
    p.plan(3.0, 0)
    assert said(world.p) == [], "a room that is being sent has no deadline here"
    p.receive(PeerAbort(1, "client gone", 499), "d", 3.0)
    assert said(world.p) == []
    assert ordered(world.p) == [CancelRoom(1)]
    p.receive(Quiet(1), "", 3.0)
    assert said(world.p) == [Drained(1)]


def test_a_failed_ticket_tells_the_peer_and_ends_the_leg() -> None:
    world = pair()
    message = reserved(world)
    ask(world.p, Room(1))
    world.p.scheduler.receive(message, "d", 0.0)
    (send,) = step(world.p)
    world.p.scheduler.receive(TicketDone(send.ticket, "connection cut"), "", 0.0)
    (told,) = said(world.p)
    assert isinstance(told, PeerAbort)
    assert "connection cut" in told.reason
    world.d.scheduler.receive(told, P, 0.0)
    (answer,) = said(world.d)
    assert "connection cut" in world.d.asked["1-0"].ends[0].finish.message
    world.p.scheduler.receive(answer, "d", 0.0)
    assert said(world.p) == []
    finish = world.p.asked["1-0"].ends[0].finish
    assert (finish.status, finish.message) == (502, "the transfer failed: connection cut")


def failed(world: Pair) -> None:
    """A transfer that decode's mover refuses."""
    message = reserved(world)
    ask(world.p, Room(1))
    world.p.scheduler.receive(message, "d", 0.0)
    (send,) = step(world.p)
    world.p.scheduler.receive(TicketDone(send.ticket, "not expected"), "", 0.0)
    assert [type(each) for each in said(world.p)] == [PeerAbort]
    assert not world.p.asked["1-0"].ends


def test_pd_04_a_room_that_decode_cancelled_is_no_failed_transfer_although_its_pages_are_refused_first() -> None:
    world = pair()
    failed(world)
    p = world.p.scheduler
    assert step(world.p) == [], "the rest is not sent"
    p.receive(Renew(1, 99.0), "d", 0.0)
    said(world.p)
    p.receive(PeerAbort(1, "the client has gone", 499), "d", 0.1)
    world.p._collect()
    (end,) = world.p.asked["1-0"].ends
    assert (end.finish.status, "the client has gone" in end.finish.message) == (499, True)
    assert p.accounts.totals.transfer_failed_total == 0
    world.p.check()


def test_a_failed_transfer_on_which_decode_says_nothing_is_told_in_the_end() -> None:
    world = pair()
    failed(world)
    p = world.p.scheduler
    p.receive(Renew(1, 99.0), "d", 0.0)
    p.plan(LIMITS.last_word - 0.1, 0)
    world.p._collect()
    assert not world.p.asked["1-0"].ends
    p.plan(LIMITS.last_word + 0.2, 0)
    world.p._collect()
    (end,) = world.p.asked["1-0"].ends
    assert (end.finish.status, end.finish.message) == (502, "the transfer failed: not expected")
    assert p.accounts.totals.transfer_failed_total == 1


def test_pages_that_the_tree_has_already_are_kept_while_a_mover_reads_them() -> None:
    world = pair(chunk=64)
    message = reserved(world)
    ask(world.p, None)  # computes the same pages, and its copies get into the tree first
    ask(world.p, Room(1))
    p = world.p.scheduler
    p.receive(message, "d", 0.0)
    (send,) = step(world.p)
    world.p.check()
    assert p.holdings.spares["1-0"]
    assert not p.cache.allocator.free_map()[send.source].any()
    p.receive(TicketDone(send.ticket), "", 0.0)
    world.p._collect()
    assert world.p.asked["1-0"].ends
    assert p.cache.allocator.free_map()[send.source[:2]].all()


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


# ---- KV that went through a lossy codec ---------------------------------------------------------------------------------------------


def handed_over(world: Pair, number: int, prompt: np.ndarray) -> tuple[Reserve, list[int]]:
    """A whole handoff, with five tokens at its end: what was reserved, and prompt and output."""
    ask(world.d, Room(number, P), prompt, max_new_tokens=5)
    world.d.scheduler.plan(0.0, 0)
    message = next(each for each in said(world.d) if isinstance(each, Reserve))
    world.d.scheduler.receive(Landed(number, exact=False), "", 0.0)
    world.d.scheduler.receive(Arrived(number, np.array([9], dtype=np.int32)), P, 0.0)
    for _ in range(9):
        step(world.d)
    world.d._collect()
    asked = world.d.asked[f"{number}-0"]
    assert asked.ends
    return message, [*prompt.tolist(), *asked.tokens]


def test_a_conversation_moves_only_its_new_tokens_although_kv_is_compressed() -> None:
    world = pair(codec="int8")
    _, known = handed_over(world, 1, PROMPT)  # 21 + 5 tokens, of which the last has no KV: three pages of 8
    turn, _ = handed_over(world, 2, np.array([*known, *range(8, 18)], dtype=np.int32))
    assert turn.skip == 24


def test_nobody_is_told_of_compressed_pages_and_nobody_else_reads_them() -> None:
    world = pair(codec="int8")
    events = world.d.scheduler.cache.events
    handed_over(world, 1, PROMPT)
    tree = world.d.scheduler.cache.tree
    assert [node.hashes for node in tree.nodes()] == [[b"", b"", b""]]
    ask(world.d, None)
    for _ in range(9):
        step(world.d)
    world.d._collect()
    asked = world.d.asked["solo-0"]
    assert asked.ends[0].cached == 0
    world.d._check_tokens("solo-0", asked, asked.ends[0])
    assert {node.space for node in tree.nodes()} == {b"", lossy(b"", "int8")}
    assert events == []


def test_the_end_of_compressed_pages_is_no_news_either() -> None:
    cache = PrefixCache(8, 8)
    for space in (b"", lossy(b"", "int8")):
        data = PROMPT[:16].tobytes()
        node, _ = cache.match(space, data, 2)
        done = cache.commit(node, data, cache.allocate(2), 0)
        cache.release(done.node, np.empty(0, dtype=np.int32))
    assert [type(event) for event in cache.events] == [PagesStored]
    cache.allocator.free(cache.allocate(8))
    assert cache.evicted_pages == 4
    assert [type(event) for event in cache.events] == [PagesStored, PagesRemoved]
    assert set(cache.events[0].hashes) == set(cache.events[1].hashes)  # type: ignore[union-attr]


@pytest.mark.parametrize("fallback", [False, True])
def test_compressed_kv_that_was_not_asked_for_is_never_used(fallback: bool) -> None:
    world = pair(fallback=fallback)
    reserved(world)
    world.d.scheduler.receive(Landed(1, exact=False), "", 0.0)
    world.d.scheduler.receive(Arrived(1, np.array([9], dtype=np.int32)), P, 0.0)
    for _ in range(12):
        step(world.d)
    world.d._collect()
    asked = world.d.asked["1-0"]
    if fallback:
        world.d._check_tokens("1-0", asked, asked.ends[0])
    else:
        assert "--disaggregation-transfer-dtype" in asked.ends[0].finish.message
        assert asked.ends[0].finish.status == 502
    assert world.d.scheduler.cache.quarantined_pages == 3
