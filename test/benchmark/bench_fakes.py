"""Stand-ins for benchmark tests: tokenizers without files, a clock without time, records of made-up timelines."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from benchmark.timeline import Failure, Record

__all__ = ["FakeClock", "LetterTokenizer", "WordTokenizer", "answered", "failed", "run_until_done"]

T = TypeVar("T")
SETTLE = 50  # turns of the loop in which everything that can go on has gone on


class WordTokenizer:
    """A word is a token: its id is the order in which words were first seen. A begin-of-sequence token stands before each text."""

    vocab_size = 500
    special_ids = frozenset({0, 1})

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self.calls = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls += 1
        return [[0, *(self._ids.setdefault(word, len(self._ids) + 2) for word in text.split())] for text in texts]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [1, *self.encode([" ".join(message["content"] for message in messages)])[0][1:], 1, 1]


class LetterTokenizer(WordTokenizer):
    """A character is a token; nothing stands before a text."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(char) for char in text] for text in texts]


class FakeClock:
    """Time that passes only when everybody waits, and then at once to the next moment that somebody waits for."""

    def __init__(self) -> None:
        self._time = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._time

    async def sleep_until(self, moment: float) -> None:
        if moment <= self._time:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (moment, next(self._order), future))
        await future

    def advance(self) -> None:
        self._time, _, future = heapq.heappop(self._sleepers)
        future.set_result(None)


async def run_until_done(clock: FakeClock, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, with time passing whenever nothing else can happen."""
    task = asyncio.ensure_future(work)
    while True:
        for _ in range(SETTLE):
            await asyncio.sleep(0)
        if task.done():
            return task.result()
        clock.advance()


def answered(sent: float, *times: float, counts: Sequence[int] = (), prompt: int = 10, cached: int | None = 0, **fields: Any) -> Record:
    """A complete answer: sent when it was due, with chunks at these times (of one token each unless `counts` says otherwise)."""
    counts = list(counts) or [1] * len(times)
    base: dict[str, Any] = {"due": sent, "started": sent, "sent": sent, "end": times[-1], "times": list(times), "counts": counts}
    base |= {"prompt_tokens": prompt, "completion_tokens": sum(counts), "cached_tokens": cached, "asked_output": sum(counts)}
    return Record(**{**base, **fields})


def failed(sent: float, end: float, kind: str, **fields: Any) -> Record:
    """A request without a complete answer."""
    return Record(due=sent, started=sent, sent=sent, end=end, failure=Failure(kind), **fields)
