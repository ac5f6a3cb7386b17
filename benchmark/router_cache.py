"""The prefix cache of a stub worker: blocks in the order of their last use, the longest unused go first.

Blocks are named by chained hashes, so a name stands for a block and all before it. What is behind a block that has gone stays, and is of
no use until that one comes back: as in caches of hash tables, and unlike in radix trees. Pure; also the yardstick of `router_plans`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["BlockCache", "Served"]

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Served(Generic[K]):
    """What became of a prompt: leading blocks found, new ones as ranges of its blocks, and those that went to make room."""

    hits: int
    stored: list[tuple[int, int]] = field(default_factory=list)
    removed: list[K] = field(default_factory=list)


class BlockCache(Generic[K]):
    """`blocks`: how many there is room for, None for any number."""

    def __init__(self, blocks: int | None) -> None:
        self._most = blocks
        self._used: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def serve(self, chain: Sequence[K]) -> Served[K]:
        """Look a prompt up, and keep it."""
        hits, stored = 0, list[tuple[int, int]]()
        for at, block in enumerate(chain):
            if block in self._used:
                hits += hits == at
            elif stored and stored[-1][1] == at:
                stored[-1] = (stored[-1][0], at + 1)
            else:
                stored.append((at, at + 1))
            self._used[block] = None
            self._used.move_to_end(block)
        removed = []
        while self._most is not None and len(self._used) > self._most:
            removed.append(self._used.popitem(last=False)[0])
        return Served(hits, stored, removed)

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._used.clear()
