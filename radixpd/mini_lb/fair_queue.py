"""A queue in which no tenant can make another wait without bound: start-time fair queueing.

Each tenant's requests stay in order. A request's turn is the later of the present turn and the end of its tenant's one before; it ends
`cost` later. Invariants: whoever comes to an empty line of his own waits for at most one request of each other tenant; when the queue is
full, the tenant that holds most of it loses its newest request, be that the newcomer. Pure; what waits is an opaque item. For the gate.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


@dataclass(slots=True)
class _Tenant(Generic[T]):
    waiting: deque[tuple[float, T]] = field(default_factory=deque)  # (turn, item)
    end: float = 0.0  # of its last turn


class FairQueue(Generic[T]):
    """At most `most` items of any number of tenants."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: dict[str, _Tenant[T]] = {}
        self._heads: list[tuple[float, int, str]] = []  # (turn of a tenant's first item, order, tenant); one entry for each tenant in line
        self._turn = 0.0
        self._order = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: str, item: T, cost: float = 1.0) -> T | None:
        """Put an item in line; what must go for it, if the queue is full: the newest item of the longest line, which may be this one."""
        gone: T | None = None
        if self._size >= self._most:
            longest = max(self._tenants, key=lambda name: len(self._tenants[name].waiting), default=tenant)
            if longest == tenant or len(self._tenants[longest].waiting) <= len(self._line(tenant).waiting) + 1:
                self._forget(tenant)
                return item
            gone = self._drop_newest(longest)
        line = self._line(tenant)
        turn = max(self._turn, line.end)
        line.end = turn + cost
        line.waiting.append((turn, item))
        self._size += 1
        if len(line.waiting) == 1:
            self._enter(tenant, turn)
        return gone

    def pop(self) -> T | None:
        """The item whose turn it is; None if nobody waits."""
        while self._heads:
            turn, _, tenant = heapq.heappop(self._heads)
            line = self._tenants.get(tenant)
            if line is None or not line.waiting or line.waiting[0][0] != turn:
                continue  # its head has left meanwhile
            self._turn = turn
            _, item = line.waiting.popleft()
            self._size -= 1
            if line.waiting:
                self._enter(tenant, line.waiting[0][0])
            self._prune()
            return item
        return None

    def remove(self, tenant: str, item: T) -> bool:
        """Take an item out of line: its client is gone, or its time is up. Whether it was there."""
        line = self._tenants.get(tenant)
        at = next((i for i, (_, each) in enumerate(line.waiting) if each is item), None) if line is not None else None
        if line is None or at is None:
            return False
        del line.waiting[at]
        self._size -= 1
        if at == 0 and line.waiting:
            self._enter(tenant, line.waiting[0][0])
        self._prune()
        return True

    def waiting(self) -> dict[str, int]:
        """Items in line of each tenant that has any."""
        return {name: len(line.waiting) for name, line in self._tenants.items() if line.waiting}

    def _line(self, tenant: str) -> _Tenant[T]:
        return self._tenants.setdefault(tenant, _Tenant())

    def _enter(self, tenant: str, turn: float) -> None:
        self._order += 1
        heapq.heappush(self._heads, (turn, self._order, tenant))

    def _drop_newest(self, tenant: str) -> T:
        line = self._tenants[tenant]
        turn, item = line.waiting.pop()
        line.end = turn
        self._size -= 1
        return item

    def _forget(self, tenant: str) -> None:
        """A tenant without items whose turns are over is as good as a new one."""
        line = self._tenants.get(tenant)
        if line is not None and not line.waiting and line.end <= self._turn:
            del self._tenants[tenant]

    def _prune(self) -> None:
        if self._size == 0:
            self._tenants.clear()
            self._heads.clear()
        elif len(self._tenants) > 2 * len(self._heads) + 64:
            for tenant in list(self._tenants):
                self._forget(tenant)
