"""Clients that each wait for their answer, against virtual workers under a virtual clock: what a choice does to the ones after it.

Unlike the simulation's workers these compute prompts side by side, and what they publish of their caches comes late.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from radixpd.mini_lb.dispatch import Dispatcher
from radixpd.mini_lb.snapshot import RouteAsk, WorkerSnapshot
from radixpd.mini_lb.trace import BLOCK_TOKENS
from radixpd.mini_lb.virtual import VirtualPrefill

TOKEN_S = 2e-6
STEP_S = 0.0005
OUTPUT = 8

Prompt = tuple[int, ...]


def pages(*names: object) -> Prompt:
    """One page for each name, its id chained on those before it."""
    return tuple(hash(names[: end + 1]) & (2**64 - 1) for end in range(len(names)))


@dataclass
class Outcome:
    """What a run came to, in pages."""

    asked: int = 0
    hits: int = 0
    ideal: int = 0  # hits of one cache that never evicts
    requests: Counter[str] = field(default_factory=Counter)

    @property
    def share_of_ideal(self) -> float:
        return self.hits / self.ideal

    @property
    def imbalance(self) -> float:
        """Requests of the busiest worker over the mean."""
        return max(self.requests.values()) * len(self.requests) / sum(self.requests.values())


def run(
    dispatcher: Dispatcher,
    talks: Sequence[Sequence[Prompt]],
    *,
    workers: int = 4,
    blocks: int = 10**6,
    clients: int = 16,
    events: bool = True,
    stream: bool = True,
    event_lag: float = 0.002,
    seed: int = 0,
) -> Outcome:
    """Each talk's prompts one after the other, `clients` talks at a time."""
    draw, outcome = random.Random(seed), Outcome()
    names = [f"w{i}" for i in range(workers)]
    tokens = blocks * BLOCK_TOKENS
    fleet = [WorkerSnapshot(name, events=events, kv_tokens=tokens, free_tokens=tokens) for name in names]
    caches = {name: VirtualPrefill(blocks, 1 / TOKEN_S) for name in names}
    feeds = {name: dispatcher.feed(name) for name in names}
    published = Counter[str]()
    outcome.requests.update(dict.fromkeys(names, 0))
    seen: set[int] = set()
    heap: list[tuple[float, int, str, Any]] = []
    waiting = list(talks)[::-1]

    def push(at: float, kind: str, what: Any) -> None:
        heapq.heappush(heap, (at, len(seen) + draw.getrandbits(60), kind, what))

    def send(now: float, talk: Sequence[Prompt]) -> None:
        prompt = talk[0]
        size = len(prompt) * BLOCK_TOKENS
        text = b"".join(page.to_bytes(8, "little") * 8 for page in prompt)
        ask = RouteAsk(tokens=size, pages=prompt if events else (), page_size=BLOCK_TOKENS, prompt=b"" if events else text, stream=stream)
        choice = dispatcher.pick(ask, fleet, now)
        account = dispatcher.dispatched(ask, choice, now)
        computed = caches[choice.worker].compute(now, size, prompt)
        outcome.asked += len(prompt)
        outcome.hits += computed.hits
        outcome.ideal += next((at for at, page in enumerate(prompt) if page not in seen), len(prompt))
        outcome.requests[choice.worker] += 1
        seen.update(prompt)
        first = now + computed.tokens * TOKEN_S + STEP_S * (1 + draw.random() / 2)
        cached = computed.hits * BLOCK_TOKENS
        if events:
            push(first + event_lag, "events", (choice.worker, published[choice.worker], computed.changes))
            published[choice.worker] += 1
        if stream:
            push(first, "first", (account, cached))
        push(first + (OUTPUT - 1) * STEP_S * (1 + draw.random() / 5), "end", (account, cached, talk[1:]))

    for _ in range(min(clients, len(waiting))):
        send(0.0, waiting.pop())
    while heap:
        now, _, kind, what = heapq.heappop(heap)
        if kind == "events":
            worker, sequence, changes = what
            feed = feeds[worker]
            (feed.live if sequence >= feed.next else feed.replayed)(sequence, changes, now)
        elif kind == "first":
            what[0].first_token(now, what[1])
        else:
            account, cached, rest = what
            if not stream:
                account.first_token(now, cached)
            account.done(now, output_tokens=OUTPUT)
            if rest:
                send(now, rest)
            elif waiting:
                send(now, waiting.pop())
    return outcome
