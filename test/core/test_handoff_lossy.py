"""Handoffs of KV that went through a lossy codec."""

from __future__ import annotations

import numpy as np
import pytest
from core.handoff_world import PROMPT, ask, pair, reserved, said, step
from core.test_handoff_sim import P, Pair

from radixpd.core.effects import PagesRemoved, PagesStored
from radixpd.core.handoff import Arrived, Landed, Reserve, Room
from radixpd.core.page_hash import lossy
from radixpd.core.prefix_cache import PrefixCache


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
