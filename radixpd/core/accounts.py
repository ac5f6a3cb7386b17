"""What the scheduler counts and what it reports: totals, the latest step, the load.

Totals only grow; everything else is read from the scheduler's structures when asked, so nothing can drift.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from radixpd.core.holdings import Holdings
from radixpd.core.load import LoadSnapshot, Queues, Totals
from radixpd.core.plan_builder import PlanBuilder, StepStats
from radixpd.core.prefill import Prefill
from radixpd.core.request import Finish, Phase, Request

__all__ = ["Accounts"]


class Accounts:
    """The books of one scheduler."""

    def __init__(self, holdings: Holdings, prefill: Prefill, slots: int) -> None:
        self.totals = Totals()
        self.last_step = StepStats()
        self._table = holdings.table
        self._cache = holdings.cache
        self._prefill = prefill
        self._slots = slots

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return self._slots - self._table.free_slots

    def planned(self, builder: PlanBuilder, step: int) -> None:
        """A step was planned."""
        computed = sum(piece.end - piece.start for piece in builder.pieces)
        self.totals.prompt_tokens_total += builder.prompt_tokens
        self.totals.cached_tokens_total += builder.cached_tokens
        self.totals.computed_tokens_total += computed
        self.last_step = StepStats(
            step=step,
            new_sequences=len(builder.begins),
            new_tokens=computed,
            cached_tokens=builder.cached_tokens,
            decode_rows=len(builder.decode),
            running=self.running,
            waiting=len(self._prefill.waiting),
            retracted=builder.retracted,
        )

    def applied(self, seconds: float) -> None:
        """A step has run for so long."""
        self.totals.execution_seconds_total += seconds

    def retracted(self, request: Request, tokens: int) -> None:
        """A running request went back to the queue with so many tokens known."""
        self.totals.retractions_total += 1
        self.totals.retracted_input_tokens_total += request.prompt_length
        self.totals.retracted_output_tokens_total += tokens - request.prompt_length

    def ended(self, samples: int, finish: Finish) -> None:
        """Requests have ended."""
        self.totals.finished_total += samples
        self.totals.aborted_total += samples if finish.kind == "abort" else 0

    def load(
        self, requests: Iterable[Request], queues: Queues, grammar_queue: int, *, steps: int, new_token_ratio: float, paused: bool
    ) -> LoadSnapshot:
        """How busy the server is now."""
        cache = self._cache
        pages, free, tree, quarantine = cache.allocator.pages, cache.allocator.free_pages, cache.tree.pages, cache.quarantined_pages
        return LoadSnapshot(
            **asdict(self.totals),
            **asdict(queues),
            running=self.running,
            waiting=sum(len(request.samples) for request in self._prefill.waiting),
            retracted=sum(len(request.samples) for request in self._prefill.waiting if request.attempt),
            grammar_queue=grammar_queue,
            parked=sum(len(request.samples) for request in requests if request.phase is Phase.PARKED),
            pages=pages,
            free_pages=free,
            tree_pages=tree,
            locked_pages=cache.tree.locked_pages,
            request_pages=pages - free - tree - quarantine,
            quarantine_pages=quarantine,
            page_size=cache.page_size,
            max_running=self._slots,
            new_token_ratio=new_token_ratio,
            steps_total=steps,
            evicted_tokens_total=cache.evicted_pages * cache.page_size,
            paused=paused,
        )

    def completion(self, request: Request) -> int:
        """Output tokens known so far."""
        known = int(self._table.known[request.slot]) if request.phase is Phase.RUNNING else len(request.tokens)
        return known - request.prompt_length
