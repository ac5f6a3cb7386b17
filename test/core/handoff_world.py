"""A prefill and a decode brain beside each other, and a look at what each says, for tests that go through a handoff by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from core.test_handoff_sim import P, Pair
from core.test_scheduler_sim import Asked

from radixpd.core.handoff import PeerMessage, Reserve, Room
from radixpd.core.page_hash import prompt_digest
from radixpd.core.request import SamplingParams
from radixpd.core.step import Send

__all__ = ["DIGEST", "PROMPT", "ask", "ordered", "pair", "reserved", "said", "step"]

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
