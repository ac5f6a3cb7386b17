"""Who serves a request where prefill and decode are apart: the pair is chosen together, or the request is not taken apart at all.

With kv_cost for both halves every pair is compared: prefill hit and queue at P; at D the tokens that need not move, slots and memory;
between them the transfer, most of which hides behind the prefill. Beside the pairs stand all workers that can do it alone: a decode
server that has most of the prompt, or a short prompt, is often quicker without a handoff, at a price for the requests that its prefill
stalls. With any other policy each half is chosen by itself. Where one half is missing, the other answers whole requests. Pure; called by
`dispatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from radixpd.errors import Overloaded
from radixpd.mini_lb.balance import POLICIES, choose
from radixpd.mini_lb.cost import Field, PromptCost, decode_wait, eviction, lowest, prompt_cost, reason
from radixpd.mini_lb.snapshot import Candidate, Choice, RouteAsk, Situation, WorkerSnapshot

__all__ = ["Policies", "route"]

MOST_PAIRS = 256  # that are compared; of larger fleets the best halves only
TOGETHER = "kv_cost"
NO_PROMPT = PromptCost(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Policies:
    """By name: for whole requests, for the prefill half, for the decode half."""

    whole: str
    prefill: str
    decode: str

    @property
    def exact(self) -> bool:
        """Whether the workers' own word is asked for, and nobody insists on what was sent."""
        return "known" in self.hits() and "sent" not in self.hits()

    def hits(self) -> set[str]:
        """What they want to know of caches."""
        return {POLICIES[name].hits for name in (self.whole, self.prefill, self.decode)}


def route(ask: RouteAsk, workers: Sequence[WorkerSnapshot], policies: Policies, situation: Situation) -> Choice:
    """The worker or the pair for `ask`."""
    usable = [worker for worker in workers if worker.usable]
    prefills = [worker for worker in usable if worker.role == "prefill"]
    decodes = [worker for worker in usable if worker.role == "decode"]
    whole = [worker for worker in usable if worker.role == "regular"]
    if not usable:
        raise Overloaded("no worker is available")
    if not (prefills and decodes):
        return choose(policies.whole, ask, whole or decodes or prefills, situation)
    if policies.prefill == policies.decode == TOGETHER:
        return _together(ask, prefills, decodes, whole, situation)
    if policies.prefill != TOGETHER:
        prefills = _only(prefills, choose(policies.prefill, ask, prefills, situation))
    if policies.decode != TOGETHER:
        decodes = _only(decodes, choose(policies.decode, ask, decodes, situation))
    choice = _together(ask, prefills, decodes, [], situation, alone=False)
    return replace(choice, reason=f"prefill by {policies.prefill}, decode by {policies.decode}")


@dataclass(frozen=True, slots=True)
class _Half:
    """One worker as one side of a pair, with its own part of the score."""

    worker: WorkerSnapshot
    score: float
    prompt: PromptCost = NO_PROMPT
    decode_s: float = 0.0
    tpot_s: float = 0.0


def _together(
    ask: RouteAsk,
    prefills: Sequence[WorkerSnapshot],
    decodes: Sequence[WorkerSnapshot],
    whole: Sequence[WorkerSnapshot],
    situation: Situation,
    *,
    alone: bool = True,
) -> Choice:
    field, behind = Field.of(prefills), Field.of(decodes)
    firsts = [_first(ask, worker, field, situation) for worker in prefills]
    seconds = [_second(ask, worker, behind, situation) for worker in decodes]
    if len(firsts) * len(seconds) > MOST_PAIRS:
        most = int(MOST_PAIRS**0.5)
        firsts = sorted(firsts, key=lambda half: half.score)[:most]
        seconds = sorted(seconds, key=lambda half: half.score)[:most]
    found = [_pair(ask, first, second, situation) for first in firsts for second in seconds]
    if alone:
        short = [worker for worker in decodes if ask.tokens - worker.hits.tokens <= situation.tuning.alone_tokens]
        found += [_alone(ask, worker, behind, situation) for worker in short]
        found += [_alone(ask, worker, Field.of(whole), situation) for worker in whole]
    chosen = lowest([(candidate.score, recent, candidate) for candidate, recent in found], situation)
    candidates = sorted((candidate for candidate, _ in found), key=lambda each: (each is not chosen, each.score))
    why = reason(ask, candidates) if chosen.decode or not alone else f"not taken apart: {reason(ask, candidates)}"
    return Choice(chosen.worker, why, decode=chosen.decode, candidates=tuple(candidates))


def _first(ask: RouteAsk, worker: WorkerSnapshot, field: Field, situation: Situation) -> _Half:
    prompt = prompt_cost(ask, worker, field, situation)
    return _Half(worker, prompt.score, prompt=prompt)


def _second(ask: RouteAsk, worker: WorkerSnapshot, field: Field, situation: Situation) -> _Half:
    """The generating side: it stores what it lacks, so that evicts there too."""
    decode_s, tpot_s = decode_wait(ask, worker)
    missing = ask.tokens - min(worker.hits.tokens, ask.tokens)
    return _Half(worker, decode_s + eviction(worker, missing, field, situation.tuning), decode_s=decode_s, tpot_s=tpot_s)


def _pair(ask: RouteAsk, first: _Half, second: _Half, situation: Situation) -> tuple[Candidate, float]:
    tuning = situation.tuning
    missing = ask.tokens - min(second.worker.hits.tokens, ask.tokens)
    move_s = missing * tuning.bytes_per_token / tuning.link_bytes_per_s
    transfer_s = tuning.handoff_s + max(0.0, move_s - tuning.overlap * first.prompt.prefill_s)
    candidate = Candidate(
        first.worker.name,
        first.score + second.score + transfer_s,
        decode=second.worker.name,
        hits=first.worker.hits,
        decode_hits=second.worker.hits,
        queue_s=first.worker.queued_s,
        prefill_s=first.prompt.prefill_s,
        transfer_s=transfer_s,
        decode_s=second.decode_s,
        tpot_s=second.tpot_s,
        evict_s=first.prompt.evict_s + second.score - second.decode_s,
        imbalance_s=first.prompt.imbalance_s,
    )
    return candidate, first.worker.recent_s + second.worker.recent_s


def _alone(ask: RouteAsk, worker: WorkerSnapshot, field: Field, situation: Situation) -> tuple[Candidate, float]:
    prompt = prompt_cost(ask, worker, field, situation)
    decode_s, tpot_s = decode_wait(ask, worker)
    stalled_s = situation.tuning.stall * prompt.prefill_s * worker.in_flight
    candidate = Candidate(
        worker.name,
        prompt.score + decode_s + stalled_s,
        hits=worker.hits,
        queue_s=worker.queued_s,
        prefill_s=prompt.prefill_s,
        decode_s=decode_s,
        tpot_s=tpot_s,
        evict_s=prompt.evict_s,
        imbalance_s=prompt.imbalance_s + stalled_s,
    )
    return candidate, worker.recent_s


def _only(workers: Sequence[WorkerSnapshot], choice: Choice) -> list[WorkerSnapshot]:
    return [worker for worker in workers if worker.name == choice.worker]
