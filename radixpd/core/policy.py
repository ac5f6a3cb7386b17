"""In which order waiting requests are tried. A policy is a function of the queue and the cache; it returns a new order and keeps no state.

Whatever the policy, requests that were retracted come first, then requests that have been overtaken `OVERTAKEN_LIMIT` times (the starvation
guard: the wait is bounded under any order of arrival), both in order of arrival. `lpm` and `dfs-weight` cost a look-up per waiting request,
so above `MATCHED_LIMIT` they fall back to order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.radix_tree import TreeNode
from radixpd.core.request import Request

__all__ = ["MATCHED_LIMIT", "OVERTAKEN_LIMIT", "POLICIES", "must_go_next", "order"]

MATCHED_LIMIT = 128
OVERTAKEN_LIMIT = 64

Policy = Callable[[Sequence[Request], PrefixCache, int], list[Request]]


def must_go_next(request: Request) -> bool:
    """The request may not be passed by any other: it was retracted, or overtaken too often."""
    return request.attempt > 0 or request.overtaken >= OVERTAKEN_LIMIT


def order(waiting: Sequence[Request], policy: str, cache: PrefixCache, seed: int) -> list[Request]:
    """The queue in the order in which it should be tried now. `waiting` holds retracted requests first, then arrivals."""
    if policy == "fcfs":
        return list(waiting)
    urgent = [r for r in waiting if must_go_next(r)]
    urgent.sort(key=lambda r: (r.attempt == 0, r.order))
    rest = [r for r in waiting if not must_go_next(r)]
    return urgent + POLICIES[policy](rest, cache, seed)


def _longest_prefix(waiting: Sequence[Request], cache: PrefixCache, seed: int) -> list[Request]:
    if len(waiting) > MATCHED_LIMIT:
        return list(waiting)
    return sorted(waiting, key=lambda r: -_peek(r, cache)[1])


def _depth_first(waiting: Sequence[Request], cache: PrefixCache, seed: int) -> list[Request]:
    """Depth-first over the tree, heaviest subtree first (weight = waiting requests in it), so that sharers run together.

    A node's own requests come after its subtrees: who shares least, and so evicts most, goes last. (Built from the end backwards.)
    """
    if len(waiting) > MATCHED_LIMIT:
        return list(waiting)
    at: dict[TreeNode | None, list[Request]] = {}
    weight: dict[TreeNode, int] = {}
    children: dict[TreeNode | None, list[TreeNode]] = {None: []}
    for request in waiting:
        node, _ = _peek(request, cache)
        at.setdefault(node, []).append(request)
        for each in node.path() if node else ():
            if each not in weight:
                weight[each] = 0
                children.setdefault(each.parent, []).append(each)
            weight[each] += 1
    result: list[Request] = []
    stack: list[TreeNode | None] = [None]
    while stack:
        node = stack.pop()
        result += reversed(at.get(node, []))
        stack += sorted(children.get(node, ()), key=lambda n: -weight[n])
    result.reverse()
    return result


def _shuffled(waiting: Sequence[Request], cache: PrefixCache, seed: int) -> list[Request]:
    return [waiting[i] for i in np.random.default_rng(seed).permutation(len(waiting))]


def _priority(waiting: Sequence[Request], cache: PrefixCache, seed: int) -> list[Request]:
    return sorted(waiting, key=lambda r: -r.priority)


def _peek(request: Request, cache: PrefixCache) -> tuple[TreeNode | None, int]:
    return cache.peek(request.space, request.data, request.matchable // cache.page_size)


POLICIES: dict[str, Policy] = {
    "lpm": _longest_prefix,
    "dfs-weight": _depth_first,
    "random": _shuffled,
    "priority": _priority,
}
