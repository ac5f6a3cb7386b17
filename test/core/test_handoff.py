"""Handoffs one by one: who says what to whom, and what is sent."""

from __future__ import annotations

import numpy as np
import pytest
from core.handoff_world import DIGEST, PROMPT, ask, ordered, pair, reserved, said, step
from core.test_handoff_sim import LIMITS, P, Pair
from core.test_scheduler_sim import EOS
from fakes import continuation

from radixpd.core.handoff import (
    Arrived,
    CancelRoom,
    Drained,
    Landed,
    NotNeeded,
    PeerAbort,
    PeerLost,
    Quiet,
    Renew,
    Reserve,
    Room,
    TicketDone,
)
from radixpd.core.request import SamplingParams


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
