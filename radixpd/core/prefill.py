"""The prompt side of planning: which requests start, and which pieces of which prompts this step computes.

Requests already under way come first, then the queue in policy order while the budget lasts. A request that shares an uncached
prefix with one that is being computed waits for it (it will find the prefix cached); one that does not fit stops the walk, so that
nobody small can starve somebody big. A refused request gives back the lock that its match took. Called by `Scheduler.plan`.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator

from radixpd.config.settings import SchedulerSettings
from radixpd.core import policy
from radixpd.core.budget import Budget, NewTokenRatio
from radixpd.core.decode import Decode
from radixpd.core.holdings import Holdings
from radixpd.core.plan_builder import Piece, PlanBuilder
from radixpd.core.request import Phase, Request
from radixpd.core.roles import Next, Role
from radixpd.core.step import Score, SlotBegin

__all__ = ["Prefill"]

SHARED_TOKENS = 32  # an uncached common prefix shorter than this is not worth waiting for
DEFERRED_LIMIT = 128  # a look at this many waiting sharers is enough for one step: the rest of a long queue most likely shares too


class Verdict(enum.Enum):
    """What became of a waiting request in this step."""

    ADMITTED = 1
    DEFERRED = 2
    NO_SLOT = 3
    NO_PAGES = 4
    NO_TOKENS = 5  # left in the step's budget


class Prefill:
    """Waiting requests and prompts under way."""

    def __init__(self, settings: SchedulerSettings, holdings: Holdings, decode: Decode, ratio: NewTokenRatio, role: Role) -> None:
        chunk = settings.chunked_prefill_size
        self.cut = chunk is not None and chunk > 0
        self.step_tokens = min(settings.max_prefill_tokens, chunk) if chunk and self.cut else settings.max_prefill_tokens
        self.policy = settings.schedule_policy
        self.holdings = holdings
        self.decode = decode
        self.ratio = ratio
        self.role = role
        self.waiting: list[Request] = []  # in order of arrival
        self.filling: list[Request] = []  # seated, prompt not wholly planned
        self.settling: list[Request] = []  # prompt wholly planned, its last step not yet applied
        self._short = False  # the last look at the queue ended for want of pages
        self.settled = 0  # place of the newest request of the last look that found who has room and who has not

    def enqueue(self, request: Request) -> None:
        """Join the queue at the place that the order of arrival gives."""
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def forget(self, request: Request) -> None:
        """The request leaves, wherever it is."""
        for queue in (self.waiting,) if request.phase is Phase.WAITING else (self.filling, self.settling):
            if request in queue:
                queue.remove(request)

    def holds(self, request: Request) -> bool:
        """Whether the request's prompt is under way (again)."""
        return request in self.filling or request in self.settling

    def surplus(self, most: int) -> int:
        """Samples that wait beyond `most`, apart from those that a free slot takes at once (none does while pages are short)."""
        free = 0 if self._short and self.waiting else self.holdings.table.free_slots
        return sum(len(request.samples) for request in self.waiting) - free - most

    def plan(self, builder: PlanBuilder, now: float, seed: int) -> None:
        """Add pieces of prompts to the step."""
        budget = Budget(self.step_tokens, self.cut)
        for request in list(self.filling):
            self._add_piece(builder, budget, request)
        if not self.waiting or not budget.left:
            return
        newest = self.waiting[-1].order
        deferred = 0
        for request in policy.order(self.waiting, self.policy, self.holdings.cache, seed):
            verdict = self._admit(builder, budget, request, now)
            deferred += verdict is Verdict.DEFERRED
            if verdict not in (Verdict.ADMITTED, Verdict.DEFERRED) or deferred == DEFERRED_LIMIT:
                break
        self._short = verdict is Verdict.NO_PAGES
        if verdict is not Verdict.NO_TOKENS:
            self.settled = newest

    def _admit(self, builder: PlanBuilder, budget: Budget, request: Request, now: float) -> Verdict:
        """Match, check room, take slots and pages, and plan the first piece."""
        cache, table = self.holdings.cache, self.holdings.table
        if table.free_slots < len(request.samples):
            return Verdict.NO_SLOT
        limit = request.matchable // cache.page_size
        _, found = cache.peek(request.space, request.data, limit)
        if self._worth_waiting(request, found):
            return Verdict.DEFERRED
        if not budget.piece(len(request.tokens) - found * cache.page_size):
            return Verdict.NO_TOKENS
        node, matched = cache.match(request.space, request.data, limit, request.priority)
        if not self.fits(request, len(matched)):
            cache.release(node, matched[:0])
            return Verdict.NO_PAGES
        self.waiting.remove(request)
        self.holdings.seat(request, node, matched)
        self._start(builder, request, len(matched) * cache.page_size, now)
        self._add_piece(builder, budget, request)
        return Verdict.ADMITTED

    def _worth_waiting(self, request: Request, found: int) -> bool:
        """Whether a prompt under way will put pages into the tree that this request would otherwise compute again."""
        if not self.holdings.cache.reuse:
            return False
        size = self.holdings.cache.page_size
        end = (found + -(-SHARED_TOKENS // size)) * size
        if end > request.matchable:
            return False
        head = request.data[: 4 * end]
        return any(
            other.space == request.space and len(other.tokens) >= end and other.data[: 4 * end] == head
            for other in (*self.filling, *self.settling)
        )

    def fits(self, request: Request, matched: int) -> bool:
        """Whether pages suffice for the prompt, its expected output, and what running requests are expected to need."""
        cache = self.holdings.cache
        samples = len(request.samples)
        need = cache.pages_for(len(request.tokens)) - matched + samples - 1
        if not self.decode.slots_held and not self.filling and not self.settling:
            return need <= cache.available
        remaining = request.length_limit - len(request.tokens)
        expected = samples * cache.pages_for(self.ratio.expected(remaining))
        return need + expected + self._reserve() <= cache.available

    def _reserve(self) -> int:
        """Pages that running requests are expected to need beyond those they hold."""
        size = self.holdings.cache.page_size
        tokens = self.decode.expected_tokens(self.ratio)
        for request in self.filling:
            tokens += len(request.samples) * self.ratio.expected(request.length_limit - len(request.tokens))
        return -(-tokens // size)

    def _start(self, builder: PlanBuilder, request: Request, cached: int, now: float) -> None:
        """Count the hit, tell the runner about the new owner of the slots, and let those who were passed grow older."""
        request.move(Phase.RUNNING)
        request.since = now
        trail = request.trail
        trail.found(min(cached, request.prompt_length))
        if trail.queued < 0:
            trail.queued = now - request.arrived
            builder.prompt_tokens += request.prompt_length
            builder.cached_tokens += trail.hit
        builder.begins.append(self.begin(request))
        self.filling.append(request)
        if self.policy != "fcfs":
            for other in self._passed_by(request):
                other.overtaken += 1

    def _passed_by(self, request: Request) -> Iterator[Request]:
        for other in self.waiting:
            if other.order >= request.order:
                return
            yield other

    def begin(self, request: Request) -> SlotBegin:
        """Tell the runner who has the slot now, and what is known."""
        known = self.holdings.table.known_tokens(request.slot)
        return SlotBegin(request.slot, known, request.prompt_length, request.sample, request.params)

    def _add_piece(self, builder: PlanBuilder, budget: Budget, request: Request) -> None:
        """One row: as much of the rest of this prompt as the budget allows."""
        table = self.holdings.table
        start, length = int(table.planned[request.slot]), len(request.tokens)
        size = budget.piece(length - start)
        if not size:
            return
        final = start + size == length
        destiny = self.role.on_piece(builder, request, start, start + size)
        if final and destiny is Next.DECODE and request.siblings and not self.holdings.can_fork(request):
            for sibling in self.holdings.unseat_siblings(request):
                self.enqueue(sibling)
        budget.take(size)
        scored_end = self._add_score(builder, request, start, start + size)
        forked = request.siblings if final and destiny is Next.DECODE else ()
        piece = Piece(request, request.attempt, start, start + size, final, scored_end, forked)
        builder.pieces.append(piece)
        if scored_end:
            builder.scored.append(piece)
        table.planned[request.slot] = start + size
        if final:
            self._complete(builder, request, forked, destiny)

    def _add_score(self, builder: PlanBuilder, request: Request, start: int, end: int) -> int:
        """Ask for the prompt log-probabilities that positions `start .. end - 1` can give: the end of what is scored then, or 0."""
        first, last = max(start, request.scored - 1), min(end, request.prompt_length - 1)
        if first >= last:
            return 0
        builder.scores.append(Score(row=len(builder.pieces), first=first))
        return last + 1

    def _complete(self, builder: PlanBuilder, request: Request, forked: tuple[Request, ...], destiny: Next) -> None:
        """The step ends this prompt: sample the first token of each sample, fork siblings that go on here, hand them to decode."""
        row = len(builder.pieces) - 1
        self.filling.remove(request)
        self.settling.append(request)
        samples = request.samples
        if forked:
            builder.copies += self.holdings.fork(request)
        for sibling in samples[1:]:
            sibling.move(Phase.RUNNING)
            sibling.trail.found(int(self.holdings.table.shared[request.slot]) * self.holdings.cache.page_size)
            sibling.trail.queued, sibling.since = request.trail.queued, request.since
            builder.prompt_tokens += sibling.prompt_length
            builder.cached_tokens += sibling.trail.hit
            builder.begins.append(self.begin(sibling))
        if request.length_limit == len(request.tokens):  # nothing to generate: the prompt was the purpose
            return
        for each in samples:
            builder.sample_rows.append(row)
            builder.sample_slots.append(each.slot)
            if destiny is Next.DECODE:
                self.decode.add(each.slot)
            else:
                self.holdings.table.sending[each.slot] = True
