"""Virtual workers for the simulation: a block cache with LRU eviction, a prompt queue with a constant rate, and a decode batch.

Blocks enter the cache when a prompt arrives, tail first, so that of one prompt the tail is evicted before the head. Prompts are computed
one after the other; uncached tokens are what counts. All requests that decode advance together, a token a step. Time is an argument.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from radixpd.mini_lb.feed import Change
from radixpd.mini_lb.snapshot import DecodeModel
from radixpd.mini_lb.trace import BLOCK_TOKENS

__all__ = ["VirtualDecode", "VirtualPrefill"]

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Computed:
    """What became of a prompt: blocks that were cached, tokens computed, when its first token comes, and the events of the cache."""

    hits: int
    tokens: int
    first: float
    changes: list[Change]


class VirtualPrefill:
    """The cache and the prompt queue of one worker."""

    def __init__(self, blocks: int, tokens_per_s: float) -> None:
        self._most = blocks
        self._rate = tokens_per_s
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._free_at = 0.0
        self.computed = 0  # tokens

    def backlog_s(self, now: float) -> float:
        """Seconds of work that wait."""
        return max(0.0, self._free_at - now)

    def compute(self, now: float, tokens: int, blocks: Sequence[int]) -> Computed:
        """A prompt arrives."""
        hits = next((at for at, block in enumerate(blocks) if block not in self._cache), len(blocks))
        fresh = max(1, tokens - hits * BLOCK_TOKENS)  # the last token is always computed
        self._free_at = max(now, self._free_at) + fresh / self._rate
        self.computed += fresh
        return Computed(hits, fresh, self._free_at, self.store(blocks))

    def store(self, blocks: Sequence[int]) -> list[Change]:
        """The blocks are used, and enter the cache where they were not in it."""
        changes = [Change(tuple(blocks[start:end]), blocks[start - 1] if start else None, stored=True) for start, end in self._gaps(blocks)]
        for block in reversed(blocks):
            self._cache[block] = None
            self._cache.move_to_end(block)
        gone = tuple(self._cache.popitem(last=False)[0] for _ in range(len(self._cache) - self._most))
        return [*changes, Change(gone)] if gone else changes

    def _gaps(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Where the cache has nothing of a prompt: runs of blocks as (start, end)."""
        gaps: list[tuple[int, int]] = []
        for at, block in enumerate(blocks):
            if block in self._cache:
                continue
            if gaps and gaps[-1][1] == at:
                gaps[-1] = (gaps[-1][0], at + 1)
            else:
                gaps.append((at, at + 1))
        return gaps


class VirtualDecode(Generic[T]):
    """The decode batch of one worker. Its clock counts tokens, so that a change of speed is one for all."""

    def __init__(self, model: DecodeModel) -> None:
        self._model = model
        self._ends: list[tuple[float, int, T]] = []  # (token clock at the end, order, request)
        self._clock = 0.0
        self._at = 0.0
        self._stalled_s = 0.0
        self._order = 0

    @property
    def rows(self) -> int:
        """Requests in the batch."""
        return len(self._ends)

    def step_s(self) -> float:
        """Time per output token now."""
        return self._model.step(self.rows, 0)

    def begin(self, now: float, tokens: int, item: T) -> None:
        """A request joins the batch for so many tokens."""
        self._advance(now)
        self._order += 1
        heapq.heappush(self._ends, (self._clock + tokens, self._order, item))

    def stall(self, now: float, seconds: float) -> None:
        """The worker computes a prompt, and nobody gets a token for so long."""
        self._advance(now)
        self._stalled_s += seconds

    def next_end(self) -> float | None:
        """When the first one of the batch will be through, if nothing comes between."""
        return self._at + self._stalled_s + (self._ends[0][0] - self._clock) * self.step_s() if self._ends else None

    def end(self, now: float) -> T:
        """The first one is through."""
        self._advance(now)
        return heapq.heappop(self._ends)[2]

    def _advance(self, now: float) -> None:
        passed = now - self._at
        stalled = min(self._stalled_s, passed)
        self._stalled_s -= stalled
        if self._ends:
            self._clock += (passed - stalled) / self.step_s()
        self._at = now
