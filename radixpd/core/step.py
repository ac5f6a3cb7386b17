"""A step as plain data: what the brain tells the runners (`StepPlan`) and what comes back (`StepResult`).

A step is "compute these token ranges of these slots": prefill, chunked prefill, a cache hit and decode are all values of
(slot, start, length). The runner keeps two tables, both indexed by slot: the *token pool* `[slots, context]` and the *page table*
`[slots, pages per slot]`. A plan first writes into them (`begins`, `page_*`), then computes its rows, then samples, then copies pages.

Contract with the runner, in this order:
1. each `SlotBegin` fills `token_pool[slot, :len(tokens)]` and resets the slot's sampler state;
2. `page_table[page_slots, page_positions] = page_ids`;
3. every row computes positions `start .. start + length - 1` of its slot; the input ids are read from the token pool, where a token
   sampled by the previous step already lies, so the brain may plan before it has seen it;
4. sample i reads the last position's logits of row `sample_rows[i]`, applies the state of slot `sample_slots[i]`, and writes
   the token to `token_pool[sample_slots[i], start + length]` of that row;
5. `copies` (source page, target page) run last: a fork copies the partial page that this very step has filled;
6. `sends` are the mover's: it reads a layer of a page once that layer is computed, and nobody waits for it.
Plans run strictly in order of `step`, so a later plan may reuse pages and slots that an earlier one still writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radixpd.core.request import SamplingParams

__all__ = ["Fault", "Forced", "PromptScores", "Score", "Send", "SlotBegin", "StepPlan", "StepResult", "TokenLogprobs", "no_ids"]


def no_ids() -> np.ndarray:
    """An empty int32 array: the neutral value of every id field."""
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SlotBegin:
    """A slot starts (or, after a retraction, starts again) to serve a request.

    `tokens`: prompt and output so far, int32 `[known]`; the first `prompt_length` are the prompt. `sample` is the index among the
    n samples of one request (the sampling seed depends on it).
    """

    slot: int
    tokens: np.ndarray
    prompt_length: int
    sample: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Score:
    """Ask for prompt log-probabilities of row `row`: logits of positions `first ..` up to the row's end or the prompt's
    last-but-one position, each scored against the token that follows it in the token pool."""

    row: int
    first: int


@dataclass(frozen=True, slots=True)
class Send:
    """Copy pages to a peer's pool: page `source[i]` of every layer into the peer's page `target[i]`, int32.

    The first `ready` of them were complete before this step; the others are complete, layer by layer, as this step's forward goes on.
    """

    ticket: int
    room: int
    peer: str
    source: np.ndarray
    target: np.ndarray
    ready: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. All arrays int32; R rows, S samples, K page-table entries, C copies."""

    step: int
    slots: np.ndarray  # [R]
    starts: np.ndarray  # [R]
    lengths: np.ndarray  # [R]
    sample_rows: np.ndarray  # [S]
    sample_slots: np.ndarray  # [S]
    page_slots: np.ndarray = field(default_factory=no_ids)  # [K]
    page_positions: np.ndarray = field(default_factory=no_ids)  # [K]
    page_ids: np.ndarray = field(default_factory=no_ids)  # [K]
    begins: tuple[SlotBegin, ...] = ()
    scores: tuple[Score, ...] = ()
    copies: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int32))  # [C, 2]
    sends: tuple[Send, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one sampled position: of the token itself, of the `top` best, and of the ids asked for."""

    logprob: float
    top_ids: np.ndarray  # int32 [top]
    top_logprobs: np.ndarray  # float32 [top]
    asked: np.ndarray  # float32 [len(token_ids)]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt tokens at positions `first, first + 1, ...` (a part of the prompt: one chunk's worth)."""

    first: int
    logprobs: np.ndarray  # float32 [k]
    top_ids: np.ndarray  # int32 [k, top]
    top_logprobs: np.ndarray  # float32 [k, top]
    asked: np.ndarray  # float32 [k, len(token_ids)]


@dataclass(frozen=True, slots=True)
class Fault:
    """The request of sample `sample` cannot go on: its token means nothing."""

    sample: int
    message: str


@dataclass(frozen=True, slots=True)
class Forced:
    """Tokens int32 `[k]` that must follow the one of sample `sample`, in the token pool already; their KV is not computed."""

    sample: int
    tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan produced. `tokens[i]` belongs to sample i, `scores[i]` to `StepPlan.scores[i]`.

    `logprobs` is empty when no sampled slot asked for any, else aligned with `tokens` (None for slots that did not ask).
    """

    step: int
    tokens: np.ndarray  # int32 [S]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    scores: tuple[PromptScores, ...] = ()
    seconds: float = 0.0
    faults: tuple[Fault, ...] = ()
    forced: tuple[Forced, ...] = ()
