"""kv_cost: the worker with the lowest estimated time to first token, with a price on what the choice does to everybody else.

Time to first token = queued prefill + uncached prefill + transfer of what is missing + wait for a slot, for KV memory and for one decode
step. On top come prices: computing delays later requests; storing pages evicts others, which are worth the more the less idle they are
beside the other workers' ones; a worker that has had more than its share costs extra, and the more so the hotter the prefix is, so that a
hot prefix is copied (one miss moves much load) before a cold one is torn from its cache. Pure; `pairing` uses the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from radixpd.mini_lb.snapshot import Candidate, Choice, RouteAsk, Situation, Tuning, WorkerSnapshot

__all__ = ["Field", "PromptCost", "decode_wait", "eviction", "kv_cost", "lowest", "prompt_cost", "reason"]

EXPECTED_OUTPUT = 128  # tokens, where nobody says
TIE_SHARE, TIE_S = 0.01, 0.0001  # scores this close are equal: the estimate is no better
SLACK_REQUESTS = 2  # like this one: work that no worker pays for; counts are small at first

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Field:
    """What a worker is compared with: means over all that may be chosen."""

    recent_s: float
    idle_s: float

    @staticmethod
    def of(workers: Sequence[WorkerSnapshot]) -> Field:
        """The means."""
        return Field(sum(w.recent_s for w in workers) / len(workers), sum(w.idle_s for w in workers) / len(workers))


class PromptCost(NamedTuple):
    """What it takes to compute a prompt somewhere; `score` weighs it with its prices."""

    score: float
    prefill_s: float
    evict_s: float
    imbalance_s: float


def prompt_cost(ask: RouteAsk, worker: WorkerSnapshot, field: Field, situation: Situation) -> PromptCost:
    """Everything but what decoding adds."""
    tuning, hits = situation.tuning, worker.hits
    cached = min(hits.tokens, max(ask.tokens - 1, 0))  # the last token is always computed
    new = ask.tokens - cached
    prefill_s = worker.prefill.seconds(new, cached)
    if cached > hits.device:
        prefill_s += tuning.host_share * worker.prefill.work(cached - hits.device, hits.device)
    hidden_s = _hidden(ask, worker, tuning) / max(ask.tokens, 1)
    evict_s = eviction(worker, new, field, tuning, hidden_s)
    imbalance_s = _imbalance(ask, worker, field, situation)
    score = worker.queued_s + tuning.work_weight * prefill_s + hidden_s * new + evict_s + imbalance_s
    return PromptCost(score, prefill_s, evict_s, imbalance_s)


def eviction(worker: WorkerSnapshot, new: int, field: Field, tuning: Tuning, hidden_s: float = 0.0) -> float:
    """The worth of what `new` more tokens push out of the worker's cache. `hidden_s`: of a token, beyond the estimate."""
    if worker.room_tokens is None or new <= worker.room_tokens:
        return 0.0
    gone = new - max(worker.room_tokens, 0)
    idle = worker.idle_s / field.idle_s if field.idle_s > 0 else 1.0
    return tuning.evict_weight * (worker.prefill.work(gone) + hidden_s * gone) * 2 / (1 + idle * idle)


def decode_wait(ask: RouteAsk, worker: WorkerSnapshot) -> tuple[float, float]:
    """(Wait for a slot and for KV memory and one step, time per output token) at the worker that generates."""
    output = ask.output_tokens or EXPECTED_OUTPUT
    rows = worker.in_flight + 1
    slots = worker.max_running or rows
    tpot = worker.decode.step(min(rows, slots), worker.used_tokens)
    whole = output * tpot  # after which a running request gives back its slot and its memory
    wait = tpot
    if rows > slots:
        wait += whole * (rows - slots) / slots
    short = worker.used_tokens + ask.tokens + output - worker.kv_tokens
    if worker.kv_tokens and short > 0:
        wait += whole * short / worker.kv_tokens
    return wait, tpot


def lowest(scored: Sequence[tuple[float, float, T]], situation: Situation) -> T:
    """Of (score, recent work, item): the lowest score; among equals the least recent work, then chance."""
    best = min(score for score, _, _ in scored)
    equal = [(recent, item) for score, recent, item in scored if score <= best + TIE_SHARE * abs(best) + TIE_S]
    least = min(recent for recent, _ in equal)
    return situation.random.choice([item for recent, item in equal if recent <= least])


def kv_cost(ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
    """The policy for workers that answer whole requests."""
    field = Field.of(workers)
    scored = []
    for worker in workers:
        part = prompt_cost(ask, worker, field, situation)
        decode_s, tpot_s = decode_wait(ask, worker)
        scored.append((part.score + decode_s, worker.recent_s, (worker, part, decode_s, tpot_s)))
    best = lowest(scored, situation)
    candidates = [
        Candidate(
            worker.name,
            score,
            hits=worker.hits,
            queue_s=worker.queued_s,
            prefill_s=part.prefill_s,
            decode_s=decode_s,
            tpot_s=tpot_s,
            evict_s=part.evict_s,
            imbalance_s=part.imbalance_s,
        )
        for score, _, (worker, part, decode_s, tpot_s) in scored
    ]
    chosen = best[0].name
    candidates.sort(key=lambda each: (each.worker != chosen, each.score))
    return Choice(chosen, reason(ask, candidates), candidates=tuple(candidates))


def reason(ask: RouteAsk, candidates: Sequence[Candidate]) -> str:
    """Why the first of them, in a few words."""
    own, most = candidates[0].hits.tokens, max(each.hits.tokens for each in candidates)
    cached = f"{own} of {ask.tokens} tokens cached" if own else "nothing cached"
    return f"lowest estimate, {cached}" + (f", {most} elsewhere" if most > own else "")


def _imbalance(ask: RouteAsk, worker: WorkerSnapshot, field: Field, situation: Situation) -> float:
    """What a worker costs that has had more work of late than the mean: little at first, beyond the bound as much as it takes."""
    tuning, model = situation.tuning, worker.prefill
    each = model.seconds(ask.tokens) + ask.output_tokens * worker.decode.step(worker.in_flight + 1, worker.used_tokens)
    # Requests come by chance: n of them differ by about the root of n.
    slack = max(SLACK_REQUESTS * each, tuning.imbalance_noise * math.sqrt(each * field.recent_s))
    ratio = worker.recent_s / (field.recent_s + slack + TIE_S)
    price = tuning.imbalance_soft * max(0.0, ratio - 1)
    if ratio > tuning.imbalance_bound:
        price += tuning.imbalance_hard * (ratio - tuning.imbalance_bound) * (1 + min(situation.heat, tuning.hot))
    return price * (tuning.work_weight * model.work(ask.tokens) + _hidden(ask, worker, tuning))


def _hidden(ask: RouteAsk, worker: WorkerSnapshot, tuning: Tuning) -> float:
    """What the work of a whole prompt's tokens may cost beyond the estimate: noise moves it to what all prompts have in common."""
    output_s = 0.0 if ask.stream else ask.output_tokens * worker.decode.step(worker.in_flight + 1, worker.used_tokens)
    return tuning.hidden * worker.prefill.a + tuning.hidden_output * output_s
