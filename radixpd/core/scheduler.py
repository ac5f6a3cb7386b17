"""The brain: it plans steps and applies their results. Pure: no clock, no sockets, no tensors; the scheduler process is its rim.

A request arrives (`arrive`), waits, runs over some steps, and leaves by exactly one `Finished` effect. `plan` may be called while
up to `depth` steps are in flight; `apply` takes results in the order of the plans. Whatever happens to a request in between (abort,
stop string, end of sequence, retraction) goes through `Holdings.release`, and results still in flight for it are recognised by
their epoch and dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from radixpd.config.settings import CacheSettings, SchedulerSettings
from radixpd.core.accounts import Accounts
from radixpd.core.budget import NewTokenRatio
from radixpd.core.decode import Decode
from radixpd.core.effects import Effects, Finished, Prefilled, PromptScored, TokensOut
from radixpd.core.holdings import Holdings
from radixpd.core.load import LoadSnapshot
from radixpd.core.plan_builder import InFlight, Piece, PlanBuilder, StepStats
from radixpd.core.prefill import Prefill
from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.request import Finish, Phase, Request, SamplingParams
from radixpd.core.roles import Aggregated, Role
from radixpd.core.slots import SlotTable
from radixpd.core.step import StepPlan, StepResult
from radixpd.core.stop import ended, finish_of

__all__ = ["PAUSE_MODES", "PROMPT_STEPS", "Scheduler"]

PAUSE_MODES = ("abort", "retract", "in_place")
PROMPT_STEPS = 8  # in a row, before running requests get a step of their own


class Scheduler:
    """All requests of one server."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cache: CacheSettings,
        *,
        pages: int,
        context_length: int,
        eos_ids: Sequence[int],
        role: Role | None = None,
    ) -> None:
        slots = settings.max_running_requests
        assert slots is not None, "settings are not resolved"
        self.role: Role = role or Aggregated()
        self.depth = 0 if settings.disable_overlap_schedule else 1
        self.mixed = settings.enable_mixed_chunk
        self.context_length = context_length
        self.eos_ids = np.asarray(eos_ids, dtype=np.int32)
        self.cache = PrefixCache(
            pages,
            cache.page_size,
            eviction_policy=cache.radix_eviction_policy,
            reuse=not cache.disable_radix_cache,
        )
        self.table = SlotTable(slots, context_length, cache.page_size)
        self.holdings = Holdings(self.table, self.cache)
        self.ratio = NewTokenRatio(settings.schedule_conservativeness)
        self.decode = Decode(self.holdings, self.ratio)
        self.prefill = Prefill(settings, self.holdings, self.decode, self.ratio, self.role)
        self.accounts = Accounts(self.holdings, self.prefill, slots)
        self.requests: dict[str, Request] = {}
        self.max_running = slots
        self.max_queued = settings.max_queued_requests
        self.paused = False
        self._in_flight: deque[InFlight] = deque()
        self._effects = Effects()
        self._steps = 0
        self._prompt_steps = 0  # in a row, without a decode row
        self._arrivals = 0
        self._bounded = 0  # place of the newest request that will not be turned away any more

    def identify(self, fingerprint: str) -> None:
        """Name the weights and the precision that this pool's KV comes from; page hashes start from it. Before the first plan."""
        assert self._steps == 0
        self.cache.fingerprint = fingerprint

    # ---- requests come and go -------------------------------------------------------------------------------------------------

    def arrive(
        self,
        rids: Sequence[str],
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        namespace: bytes = b"",
        priority: int = 0,
        now: float = 0.0,
    ) -> None:
        """Take in one prompt with `len(rids)` samples. One that can never run ends at once with status 400, one too many with 503."""
        self._arrivals += 1
        start = params.logprobs.start if params.logprobs else -1
        samples = [
            Request(
                rid=rid,
                tokens=prompt,
                prompt_length=len(prompt),
                params=params,
                space=namespace if self.cache.reuse else b"private" + rids[0].encode(),
                priority=priority,
                arrived=now,
                order=self._arrivals,
                sample=index,
                scored=max(start, 1) if start >= 0 and index == 0 else len(prompt),
            )
            for index, rid in enumerate(rids)
        ]
        leader = samples[0]
        leader.siblings = tuple(samples[1:])
        for request in samples:
            assert request.rid not in self.requests, "two live requests with one rid"
            self.requests[request.rid] = request
            request.leader = leader if request is not leader else None
        refusal = self._refusal(leader)
        if refusal:
            self._finish(leader, Finish("abort", message=refusal, status=400), 0)
            return
        leader.phase = self.role.arrive(leader, now)
        if leader.phase is Phase.WAITING:
            self.prefill.enqueue(leader)
            if self.max_queued is not None and self.prefill.surplus(self.max_queued) > 0:
                self._turn_away(leader)

    def abort(self, rid: str, message: str, status: int, now: float = 0.0) -> None:
        """End a request wherever it is; unknown rids are ignored. Before a fork, one sample's abort ends all samples."""
        request = self.requests.get(rid)
        if request is None:
            return
        request = request.leader or request
        self._finish(request, Finish("abort", message=message, status=status), self.accounts.completion(request))

    def stop(self, rid: str, keep: int, matched: str, now: float = 0.0) -> None:
        """A stop string ended the request after `keep` output tokens."""
        request = self.requests.get(rid)
        if request is not None:
            self._finish(request, Finish("stop", matched=matched), keep)

    def flush(self) -> bool:
        """Empty the prefix cache; False (and nothing done) while it is in use or any step is in flight."""
        if self.in_use or self._in_flight:
            return False
        self.cache.flush()
        return True

    @property
    def in_use(self) -> bool:
        """Whether a request stands in the way of a flush: any live one, but while paused only those that hold pages."""
        return self.accounts.running > 0 if self.paused else bool(self.requests)

    def pause(self, mode: str, now: float = 0.0) -> None:
        """Plan nothing until `resume`. Running requests keep their pages (`in_place`), or go back to the queue (`retract`); with `abort`
        every live request ends. Requests that arrive meanwhile wait."""
        assert mode in PAUSE_MODES
        self.paused = True
        if mode == "abort":
            for rid in list(self.requests):
                self.abort(rid, "aborted by a pause", 499, now)
        elif mode == "retract":
            # Siblings that wait for their fork hold a slot too, and go with their leader.
            for request in [r for r in self.table.requests if r is not None and r.phase is Phase.RUNNING]:
                self._retract(request)

    def resume(self) -> None:
        """Plan again."""
        self.paused = False

    # ---- steps ----------------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Plans sent whose results have not been applied."""
        return len(self._in_flight)

    def plan(self, now: float, seed: int) -> StepPlan | None:
        """The next step, or None: nothing to do, or enough in flight."""
        if len(self._in_flight) > self.depth:
            return None
        self.role.tick(now)
        if self.paused:
            return None
        builder = PlanBuilder()
        self._fill(builder, now, seed)
        self._bound_queue()
        if builder.empty:
            return None
        self._steps += 1
        self._prompt_steps = 0 if len(builder.decode) else self._prompt_steps + 1
        plan, record = builder.build(self._steps, self.table, self.holdings.take_changed())
        self._in_flight.append(record)
        self.accounts.planned(builder, self._steps)
        return plan

    def _fill(self, builder: PlanBuilder, now: float, seed: int) -> None:
        """Prompts first, as time to first token demands; but running requests get a step at least after every `PROMPT_STEPS`."""
        decode_first = self.mixed or self._prompt_steps >= PROMPT_STEPS
        if decode_first:
            self.decode.plan(builder, self._retract, self.prefill.filling)
        if self.mixed or builder.empty:
            self.prefill.plan(builder, now, seed)
        if not decode_first and builder.empty:
            self.decode.plan(builder, self._retract, self.prefill.filling)

    def _bound_queue(self) -> None:
        """After a look at the whole queue: turn away the newest of those who came on the credit of a free slot and found no pages."""
        settled = self.prefill.settled
        if self.max_queued is None or settled == self._bounded:
            return
        surplus = self.prefill.surplus(self.max_queued)
        for request in reversed(self.prefill.waiting.copy()):
            if surplus <= 0 or request.order <= self._bounded:
                break
            if not request.sample:  # a sibling whose leader has a seat stays
                surplus -= len(request.samples)
                self._turn_away(request)
        self._bounded = settled

    def apply(self, result: StepResult, now: float = 0.0) -> None:
        """Take in what the oldest step in flight produced."""
        record = self._in_flight.popleft()
        assert record.step == result.step, f"result of step {result.step}, expected {record.step}"
        self.accounts.applied(result.seconds)
        for piece, scores in zip(record.scored, result.scores, strict=True):
            if piece.alive:
                piece.request.scored = piece.scored_end
                self._effects.client.append(PromptScored(piece.request.rid, scores))
        for piece in record.pieces:
            if piece.alive:
                self._apply_piece(piece)
            for sibling in piece.forked:
                if sibling.phase is Phase.RUNNING and not self.prefill.holds(sibling):
                    self._prompt_done(sibling)
        if len(record.sample_slots):
            self._apply_tokens(record, result)

    def drain(self) -> Effects:
        """Effects since the last call."""
        effects, self._effects = self._effects, Effects()
        effects.cache, self.cache.events = self.cache.events, []
        return effects

    def _apply_piece(self, piece: Piece) -> None:
        """The KV of one piece of a prompt exists: share its full pages; after the last piece, the prompt is done."""
        request = piece.request
        if self.cache.reuse:
            self.holdings.commit(request.slot, piece.end)
        self.role.on_computed(request, piece.start, piece.end)
        if piece.final:
            self.prefill.settling.remove(request)
            self._prompt_done(request)

    def _prompt_done(self, request: Request) -> None:
        """Say so, once; a request that wants no token ends here."""
        if not request.prefilled:
            request.prefilled = True
            self._effects.client.append(Prefilled(request.rid, max(request.cached, 0), request.queued))
        if request.length_limit == len(request.tokens):
            self._finish(request, Finish("length"), 0)

    def _apply_tokens(self, record: InFlight, result: StepResult) -> None:
        """Append the sampled tokens of everyone who is still there, share pages that became full, end who has ended."""
        table = self.table
        alive = table.epoch[record.sample_slots] == record.epochs
        slots, ids, logprobs = record.sample_slots, result.tokens, result.logprobs
        if not alive.all():
            slots, ids = slots[alive], ids[alive]
            logprobs = tuple(each for each, there in zip(logprobs, alive) if there)
        if not len(slots):
            return
        known = table.known[slots]
        table.tokens[slots, known] = ids
        table.known[slots] = known + 1
        self.accounts.totals.generated_tokens_total += len(slots)
        self._effects.client.append(TokensOut(tuple(table.rids[slots].tolist()), ids, logprobs))
        if self.cache.reuse:
            for slot in slots[known // self.cache.page_size > table.shared[slots]].tolist():
                self.holdings.commit(slot, int(table.known[slot]) - 1)
        for at in np.flatnonzero(ended(table, slots, ids, self.eos_ids)).tolist():
            request: Request = table.requests[slots[at]]
            finish = finish_of(request, int(table.known[slots[at]]), int(ids[at]), self.eos_ids)
            if finish:
                self._finish(request, finish, self.accounts.completion(request))

    # ---- endings --------------------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, finish: Finish, completion: int) -> None:
        """The one way out: give everything back, then say so once for the request and each sibling it carries."""
        samples = request.samples
        if request.phase is Phase.RUNNING:
            self._leave(request)
        self.prefill.forget(request)
        for each in samples:
            each.move(Phase.FINISHED)
            del self.requests[each.rid]
            self._effects.client.append(
                Finished(each.rid, finish, each.prompt_length, completion, max(each.cached, 0), retractions=each.attempt)
            )
        self.accounts.ended(len(samples), finish)

    def _turn_away(self, request: Request) -> None:
        message = f"the queue is full: --max-queued-requests is {self.max_queued}"
        self._finish(request, Finish("abort", message=message, status=503), 0)

    def _leave(self, request: Request) -> None:
        """Out of the running ones, with nothing left behind."""
        self.decode.remove(request.slot)
        self.holdings.release(request)

    def _retract(self, request: Request) -> None:
        """Back to the queue: its pages are needed. Full pages stay in the tree as long as nobody needs those too."""
        tokens = self.table.known_tokens(request.slot)
        self.accounts.retracted(request, len(tokens))
        self._leave(request)
        self.prefill.forget(request)
        request.requeue(tokens)
        self.prefill.enqueue(request)

    def _refusal(self, request: Request) -> str:
        """Why a request can never run here; empty if it can."""
        samples, pages = len(request.samples), self.cache.allocator.pages
        if samples > self.max_running:
            return f"n = {samples} exceeds the server's limit of {self.max_running} running requests (--max-running-requests)"
        if request.length_limit > self.context_length:
            return f"prompt and max_new_tokens make {request.length_limit} tokens, over the context length of {self.context_length}"
        if self.cache.pages_for(request.length_limit) + samples - 1 > pages:
            size = pages * self.cache.page_size
            return f"prompt and max_new_tokens make {request.length_limit} tokens, over the KV pool of {size} (--max-total-tokens)"
        return ""

    # ---- numbers --------------------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> StepStats:
        """What the latest plan is made of."""
        return self.accounts.last_step

    def load(self) -> LoadSnapshot:
        """How busy the server is now."""
        return self.accounts.load(self.requests.values(), steps=self._steps, new_token_ratio=self.ratio.value, paused=self.paused)

    def state(self) -> dict[str, object]:
        """Where every request is, for people."""
        requests = [self.accounts.whereabouts(request) for request in self.requests.values()]
        return {"in_flight": self.in_flight, "requests": requests}
