"""What the brain asks the world to do: plain data that the scheduler process turns into messages.

`Scheduler` collects effects while it plans and applies; `drain()` hands them over. Invariant: every request yields exactly one
`Finished`, and nothing after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radixpd.core.grammars import GrammarOrder
from radixpd.core.handoff import MoverOrder, PeerMessage
from radixpd.core.journey import Journey
from radixpd.core.request import Finish
from radixpd.core.step import PromptScores, TokenLogprobs

__all__ = ["Effects", "Finished", "PagesRemoved", "PagesStored", "Prefilled", "CacheCleared", "TokensOut"]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A request's prompt is computed. `cached`: prompt tokens taken from a cache, `queued`: seconds from arrival to first plan; `journey`:
    so far, for an output that ends before the brain hears of it."""

    rid: str
    cached: int
    queued: float
    journey: Journey


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Prompt log-probabilities of one chunk, in order; all of them come before the request's first token."""

    rid: str
    scores: PromptScores


@dataclass(frozen=True, slots=True)
class TokensOut:
    """Tokens of one step: `ids[i]` is the next token of `rids[i]`. `logprobs` is empty or aligned with `ids`."""

    rids: tuple[str, ...]
    ids: np.ndarray  # int32 [len(rids)]
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal effect of a request. `completion` counts the output tokens that the brain keeps."""

    rid: str
    finish: Finish
    prompt: int
    completion: int
    cached: int
    retractions: int
    journey: Journey


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages entered the tree. `parent` is the hash of the page before the first, None at a namespace's root."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: np.ndarray  # int32 [len(hashes) * page_size]


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages left the tree."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The whole tree was flushed."""


CacheEvent = PagesStored | PagesRemoved | CacheCleared
ClientEffect = Prefilled | PromptScored | TokensOut | Finished


@dataclass(slots=True)
class Effects:
    """Effects in the order they happened: `client` for the tokenizer manager, `cache` for KV event subscribers, `peer` for other servers'
    brains, `mover` for the own mover, `grammars` for the model runner."""

    client: list[ClientEffect] = field(default_factory=list)
    cache: list[CacheEvent] = field(default_factory=list)
    peer: list[tuple[str, PeerMessage]] = field(default_factory=list)
    mover: list[MoverOrder] = field(default_factory=list)
    grammars: list[GrammarOrder] = field(default_factory=list)
