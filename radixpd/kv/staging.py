"""A bounded stretch of memory for coded pieces on their way: from the codec to the wire, or from the wire to the codec.

One allocation, made once, so that a transport may register it. Spans are cut from it first fit, lowest address first: memory that was in
use a moment ago is used again, and the rest is never touched. Invariants: spans never overlap; whoever asks is served in the order of
asking, so a small wish never overtakes a large one for ever; a span is given back once. Owned by the mover's thread.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

import torch

__all__ = ["Span", "Staging"]


@dataclass(slots=True, eq=False)
class Span:
    """`size` bytes from `start` on, until `release`."""

    home: Staging
    start: int
    size: int
    released: bool = field(default=False)

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [size]."""
        return self.home.memory[self.start : self.start + self.size]

    @property
    def view(self) -> memoryview:
        """The same bytes for a socket."""
        return self.bytes.numpy().data

    def release(self) -> None:
        """Give it back. Twice is once."""
        if not self.released:
            self.released = True
            self.home.give_back(self)


class Staging:
    """`size` bytes."""

    def __init__(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8)
        self._spans: list[Span] = []  # by start
        self._queue: deque[object] = deque()

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return sum(each.size for each in self._spans)

    @property
    def first(self) -> object | None:
        """Who asked first of those that are still waiting."""
        return self._queue[0] if self._queue else None

    def fits(self, size: int) -> bool:
        """Whether so many bytes are free in one stretch."""
        return self._gap(size) is not None

    def take(self, size: int, who: object) -> Span | None:
        """A span, or None: not yet. Who is told so asks again when `first`, or calls `leave`."""
        assert size <= len(self.memory), f"{size} bytes never fit into {len(self.memory)}"
        if who not in self._queue:
            self._queue.append(who)
        start = self._gap(size) if self._queue[0] is who else None
        if start is None:
            return None
        self._queue.popleft()
        span = Span(self, start, size)
        insort(self._spans, span, key=lambda each: each.start)
        return span

    def leave(self, who: object) -> None:
        """Ask no more."""
        if who in self._queue:
            self._queue.remove(who)

    def give_back(self, span: Span) -> None:
        """See `Span.release`."""
        self._spans.remove(span)

    def _gap(self, size: int) -> int | None:
        """Where so many bytes are free."""
        start = 0
        for each in self._spans:
            if each.start - start >= size:
                return start
            start = each.start + each.size
        return start if len(self.memory) - start >= size else None
