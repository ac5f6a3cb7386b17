"""The order of the queue: what each policy promises, the fallback for long queues, and who may never be passed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixpd.core.page_hash import token_bytes
from radixpd.core.policy import MATCHED_LIMIT, OVERTAKEN_LIMIT, POLICIES, must_go_next, order
from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.request import Phase, Request, SamplingParams

SIZE = 4


def _tokens(*pages: int) -> np.ndarray:
    return np.repeat(np.array(pages, dtype=np.int32), SIZE)


def _cache(*prompts: tuple[int, ...]) -> PrefixCache:
    cache = PrefixCache(200, SIZE)
    for prompt in prompts:
        data = token_bytes(_tokens(*prompt))
        node, found = cache.match(b"", data, len(prompt))
        fresh = cache.allocate(len(prompt) - len(found))
        done = cache.commit(node, data[len(found) * 4 * SIZE :], fresh, 0)
        cache.release(done.node, fresh[:0])
    return cache


def _request(number: int, *pages: int, **fields: object) -> Request:
    """Its last page is one more than asked for: the last token of a prompt never comes from the cache."""
    tokens = _tokens(*pages, 99)
    fields = {"order": number, "scored": len(tokens)} | fields
    return Request(str(number), tokens, len(tokens), SamplingParams(), **fields)  # type: ignore[arg-type]


def _names(queue: list[Request]) -> str:
    return "".join(request.rid for request in queue)


CACHE = ((1, 2, 3, 4), (1, 2, 5), (6,))
QUEUE = ((9,), (6,), (1, 2, 3, 4), (1, 2), (7,), (1, 2, 5))


def _queue(**fields: object) -> list[Request]:
    return [_request(number, *pages, **fields) for number, pages in enumerate(QUEUE)]


def test_fcfs_is_the_order_of_arrival() -> None:
    assert _names(order(_queue(), "fcfs", _cache(*CACHE), 0)) == "012345"


def test_lpm_is_longest_cached_prefix_first_then_arrival() -> None:
    assert _names(order(_queue(), "lpm", _cache(*CACHE), 0)) == "253104"


def test_lpm_looks_only_at_what_may_come_from_the_cache() -> None:
    """Request 2 wants log-probabilities from its first token on, so it can take nothing."""
    queue = _queue()
    queue[2].scored = 1
    assert _names(order(queue, "lpm", _cache(*CACHE), 0)) == "531024"


def test_lpm_sees_only_the_own_namespace() -> None:
    assert _names(order(_queue(space=b"x" * 32), "lpm", _cache(*CACHE), 0)) == "012345"


def test_dfs_weight_keeps_the_heaviest_subtree_together() -> None:
    """Three requests lie below pages 1, 2 (deepest first), one at page 6; whoever has nothing cached comes last."""
    names = _names(order(_queue(), "dfs-weight", _cache(*CACHE), 0))
    assert names == "253104"


def test_dfs_weight_follows_weight_not_arrival() -> None:
    cache = _cache((1,), (2,))
    queue = [_request(0, 1), _request(1, 2), _request(2, 1), _request(3, 2), _request(4, 2)]
    assert _names(order(queue, "dfs-weight", cache, 0)) == "13402"


def test_dfs_weight_differs_from_lpm() -> None:
    """One request has the longest match, but two share another subtree."""
    queue = [_request(0, 1, 2), _request(1, 6), _request(2, 6)]
    cache = _cache((1, 2), (6,))
    assert _names(order(queue, "lpm", cache, 0)) == "012"
    assert _names(order(queue, "dfs-weight", cache, 0)) == "120"


def test_random_follows_the_seed_of_the_call_alone() -> None:
    queue, cache = _queue(), _cache()
    random.seed(1)
    np.random.seed(1)
    first = [_names(order(queue, "random", cache, seed)) for seed in range(20)]
    random.seed(2)
    np.random.seed(2)
    assert [_names(order(queue, "random", cache, seed)) for seed in range(20)] == first
    assert len(set(first)) > 10
    assert {name[0] for name in first} == set("012345")


def test_priority_is_highest_first_then_arrival() -> None:
    queue = [_request(n, 1, priority=p) for n, p in enumerate((0, 5, -1, 5, 0))]
    assert _names(order(queue, "priority", _cache(), 0)) == "13042"


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_long_queues_fall_back_to_arrival(policy: str) -> None:
    cache = _cache((1, 2, 3))
    short = [_request(n) for n in range(MATCHED_LIMIT - 1)] + [_request(MATCHED_LIMIT - 1, 1, 2, 3)]
    assert order(short, policy, cache, 0)[0] is short[-1]
    long = [*short[:-1], _request(MATCHED_LIMIT - 1), _request(MATCHED_LIMIT, 1, 2, 3)]
    assert order(long, policy, cache, 0) == long


def test_must_go_next() -> None:
    request = _request(0)
    request.overtaken = OVERTAKEN_LIMIT - 1
    assert not must_go_next(request)
    request.overtaken += 1
    assert must_go_next(request)
    retracted = _request(1, phase=Phase.RUNNING)
    retracted.requeue(retracted.tokens)
    assert must_go_next(retracted)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_retracted_then_overtaken_requests_come_first_in_order_of_arrival(policy: str) -> None:
    queue = [_request(n, 1, 2, 3, 4, priority=9) for n in range(3)] + [_request(n) for n in range(3, 7)]
    for late in (queue[4], queue[6]):
        late.attempt = 1
    for passed in (queue[3], queue[5]):
        passed.overtaken = OVERTAKEN_LIMIT
    assert _names(order(queue, policy, _cache(*CACHE), 3))[:4] == "4635"


@pytest.mark.parametrize("policy", ["fcfs", *POLICIES])
def test_ordering_keeps_everyone_and_leaves_queue_and_cache_alone(policy: str) -> None:
    cache, queue = _cache(*CACHE), _queue()
    nodes = len(list(cache.tree.nodes()))
    before = queue.copy()
    assert sorted(order(queue, policy, cache, 1), key=lambda r: r.order) == before
    assert queue == before
    assert (len(list(cache.tree.nodes())), cache.tree.locked_pages) == (nodes, 0)
