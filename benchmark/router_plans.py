"""What `bench_router` asks for: workloads made from a seed, and what the best caches could have of them.

A plan is a list of talks; a talk's prompts follow one another, each with the answer to the one before in it (stub workers always say the
same). Pure. Invariant: the same name, seed and size give the same plan, and other seeds share no text with it. Hits are counted in whole
blocks, with the very cache of the stub workers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmark.router_cache import BlockCache
from radixpd.mini_lb.prefix_index import text_keys

__all__ = ["ANSWER", "BLOCK", "PLANS", "Plan", "ideal_hits", "make", "pooled_hits", "rendered"]

BLOCK = 64  # characters; one token each
ANSWER = " tok" * 8  # of every stub worker
LETTERS = "abcdefghijklmnopqrstuvwxyz" + " " * 5

Talk = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Talks, each a sequence of user messages that hold the whole history."""

    name: str
    talks: tuple[Talk, ...]

    @property
    def requests(self) -> int:
        """How many prompts there are."""
        return sum(map(len, self.talks))

    @property
    def chars(self) -> int:
        """Of all prompts as workers see them."""
        return sum(len(rendered(prompt)) for talk in self.talks for prompt in talk)

    def order(self, clients: int) -> Iterator[str]:
        """Prompts as so many clients of equal speed send them: each takes the next talk when it is through with its own."""
        waiting = iter(self.talks)
        open_ = deque(iter(talk) for _, talk in zip(range(clients), waiting))
        while open_:
            talk = open_.popleft()
            prompt = next(talk, None)
            if prompt is not None:
                yield prompt
                open_.append(talk)
            elif (following := next(waiting, None)) is not None:
                open_.appendleft(iter(following))


def rendered(message: str) -> str:
    """A user message through the stub's chat template."""
    return f"user:{message}"


def make(name: str, seed: int, requests: int = 0) -> Plan:
    """The plan of that name. `requests`: how many, at most, instead of its own number."""
    build, own = PLANS[name]
    return Plan(name, tuple(build(random.Random(f"{name} {seed}"), requests or own)))


def ideal_hits(plan: Plan, block: int = BLOCK) -> int:
    """Characters that one cache without an end would have."""
    return _hits(plan, BlockCache(None), block, 1)


def pooled_hits(plan: Plan, chars: int, clients: int, block: int = BLOCK) -> int:
    """Characters that one LRU cache of so many would have, if all workers shared it."""
    return _hits(plan, BlockCache(chars // block), block, clients)


def _hits(plan: Plan, cache: BlockCache[int], block: int, clients: int) -> int:
    return sum(cache.serve(text_keys(rendered(prompt).encode(), b"", block)).hits for prompt in plan.order(clients)) * block


def _text(draw: random.Random, chars: int) -> str:
    return "".join(draw.choices(LETTERS, k=chars))


def _asked(history: str, question: str) -> str:
    return f"{history}\nUser: {question}\nAssistant:"


def _shared(draw: random.Random, requests: int, *, prefixes: int, chars: int, zipf: float = 0.0, own: int = 200) -> list[Talk]:
    """Prefixes in common, each prompt with an end of its own."""
    texts = [_text(draw, chars) for _ in range(prefixes)]
    weights = [1 / (rank + 1) ** zipf for rank in range(prefixes)]
    return [(_asked(prefix, _text(draw, own)),) for prefix in draw.choices(texts, weights, k=requests)]


def _turns(draw: random.Random, requests: int, *, turns: int, prefixes: int, chars: int, own: int) -> list[Talk]:
    """Conversations that begin with one of a few prefixes."""
    texts = [_text(draw, chars) for _ in range(prefixes)]
    talks: list[Talk] = []
    for _ in range(-(-requests // turns)):
        history = draw.choice(texts)
        talk: list[str] = []
        for _ in range(min(turns, requests - turns * len(talks))):
            talk.append(_asked(history, _text(draw, own)))
            history = talk[-1] + ANSWER
        talks.append(tuple(talk))
    return talks


# How each is made, and of how many requests.
PLANS: dict[str, tuple[Callable[[random.Random, int], list[Talk]], int]] = {
    "prefixes": (partial(_shared, prefixes=60, chars=4000), 1000),
    "turns": (partial(_turns, turns=4, prefixes=8, chars=1000, own=1500), 800),
    "zipf": (partial(_shared, prefixes=200, chars=3000, zipf=1.0), 1000),
    "exceeding": (partial(_shared, prefixes=267, chars=3000, zipf=1.0), 2000),
    "repeated": (partial(_shared, prefixes=8, chars=2000), 600),
}
