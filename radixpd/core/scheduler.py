"""The brain: it plans steps and applies their results. Pure: no clock, no sockets, no tensors; the scheduler process is its rim.

A request arrives (`arrive`), waits, runs over some steps, and leaves by exactly one `Finished` effect. `plan` may be called while
up to `depth` steps are in flight; `apply` takes results in the order of the plans. Whatever happens to a request in between (abort,
stop string, end of sequence, retraction) goes through `Holdings.release`, and results still in flight for it are recognised by
their epoch and dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np

from radixpd.config.settings import CacheSettings, SchedulerSettings
from radixpd.core.accounts import Accounts
from radixpd.core.budget import NewTokenRatio
from radixpd.core.decode import Decode
from radixpd.core.effects import Effects
from radixpd.core.grammars import Grammars
from radixpd.core.handoff import Arrived, MoverOrder, MoverReport, PeerMessage, Room
from radixpd.core.holdings import Holdings
from radixpd.core.load import LoadSnapshot, Totals
from radixpd.core.outcomes import Outcomes
from radixpd.core.plan_builder import InFlight, PlanBuilder, StepStats
from radixpd.core.prefill import Prefill
from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.queue_bound import QueueBound
from radixpd.core.request import Finish, Phase, Request, SamplingParams
from radixpd.core.roles import Aggregated, MakeRole, Role
from radixpd.core.roster import Roster
from radixpd.core.slots import SlotTable
from radixpd.core.step import StepPlan, StepResult
from radixpd.core.whereabouts import whereabouts

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
        role: MakeRole = Aggregated,
    ) -> None:
        slots = settings.max_running_requests
        assert slots is not None, "settings are not resolved"
        self.depth = 0 if settings.disable_overlap_schedule else 1
        self.mixed = settings.enable_mixed_chunk
        self.context_length = context_length
        self.cache = PrefixCache(
            pages,
            cache.page_size,
            eviction_policy=cache.radix_eviction_policy,
            reuse=not cache.disable_radix_cache,
        )
        self.table = SlotTable(slots, context_length, cache.page_size, jump=not settings.disable_jump_forward)
        self.holdings = Holdings(self.table, self.cache)
        self.ratio = NewTokenRatio(settings.schedule_conservativeness)
        self.decode = Decode(self.holdings, self.ratio)
        self.role: Role = role(self)
        self.prefill = Prefill(settings, self.holdings, self.decode, self.ratio, self.role)
        self.accounts = Accounts(self.holdings, self.prefill, slots)
        self.grammars = Grammars()
        self.roster = Roster(self.holdings, self.decode, self.prefill, self.accounts, self.role, self.grammars)
        self._outcomes = Outcomes(
            self.roster,
            self.holdings,
            self.prefill,
            self.decode,
            self.accounts,
            role=self.role,
            eos_ids=np.asarray(eos_ids, dtype=np.int32),
        )
        self.max_running = slots
        self._bound = QueueBound(settings.max_queued_requests, self.prefill, self.roster)
        self.paused = False
        self.now = 0.0
        self._messages: list[tuple[str, PeerMessage]] = []
        self._orders: list[MoverOrder] = []
        self._in_flight: deque[InFlight] = deque()
        self._steps = 0
        self._prompt_steps = 0  # in a row, without a decode row
        self._arrivals = 0

    def identify(self, fingerprint: str) -> None:
        """Name the weights and the precision that this pool's KV comes from; page hashes start from it. Before the first plan."""
        assert self._steps == 0
        self.cache.fingerprint = fingerprint

    @property
    def requests(self) -> Mapping[str, Request]:
        """The live ones, by rid."""
        return self.roster.live

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
        room: Room | None = None,
    ) -> None:
        """Take in one prompt with `len(rids)` samples. One that can never run ends at once with status 400, one too many with 503."""
        self._at(now)
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
                since=now,
                order=self._arrivals,
                sample=index,
                scored=max(start, 1) if start >= 0 and index == 0 else len(prompt),
            )
            for index, rid in enumerate(rids)
        ]
        leader = samples[0]
        self.roster.enter(samples)
        unready = self.grammars.enter(leader)
        refusal = self._refusal(leader)
        if refusal:
            if room is not None:
                self.role.on_refused(room, refusal, 400)
            self.roster.finish(leader, Finish("abort", message=refusal, status=400), 0)
            return
        leader.room = room
        if unready:
            leader.phase = Phase.PARKED
        else:
            self._place(leader, now)

    def grammar_answered(self, id: int, error: str, status: int, now: float = 0.0) -> None:
        """The runner has made a grammar ready, or says why it cannot."""
        self._at(now)
        for request in self.grammars.answered(id, ready=not error):
            if not error:
                self._place(request, now)
                continue
            if request.room is not None:
                self.role.on_refused(request.room, error, status)
            self.roster.finish(request, Finish("abort", message=error, status=status), 0)

    def _place(self, leader: Request, now: float) -> None:
        """Where the role wants it."""
        leader.since = now
        leader.phase = self.role.arrive(leader, now)
        if leader.phase is Phase.WAITING:
            self.prefill.enqueue(leader)
            self._bound.entered(leader)

    def refuse(self, room: Room, reason: str, status: int, now: float = 0.0) -> None:
        """A request that names this room was turned away before it came here."""
        self._at(now)
        self.role.on_refused(room, reason, status)

    def abort(self, rid: str, message: str, status: int, now: float = 0.0) -> None:
        """End a request wherever it is; unknown rids are ignored. Before a fork, one sample's abort ends all samples."""
        self._at(now)
        request = self.roster.live.get(rid)
        if request is None:
            return
        request = request.leader or request
        if request.room is not None and self.grammars.waits(request):
            self.role.on_refused(request.room, message, status)
        self.roster.finish(request, Finish("abort", message=message, status=status), self.accounts.completion(request))

    def stop(self, rid: str, keep: int, matched: str, now: float = 0.0) -> None:
        """A stop string ended the request after `keep` output tokens."""
        self._at(now)
        request = self.roster.live.get(rid)
        if request is not None:
            self.roster.finish(request, Finish("stop", matched=matched), keep)

    def receive(self, message: PeerMessage | MoverReport, peer: str = "", now: float = 0.0) -> None:
        """A peer's brain or the own mover (`peer` empty) has news."""
        self._at(now)
        self.role.on_message(message, peer, now)

    def flush(self) -> bool:
        """Empty the prefix cache; False (and nothing done) while it is in use or any step is in flight."""
        if self.in_use or self._in_flight:
            return False
        self.cache.flush()
        return True

    @property
    def in_use(self) -> bool:
        """Whether a request stands in the way of a flush: any live one, but while paused only those that hold pages."""
        return self.accounts.running > 0 if self.paused else bool(self.roster.live)

    def pause(self, mode: str, now: float = 0.0) -> None:
        """Plan nothing until `resume`. Running requests keep their pages (`in_place`), or go back to the queue (`retract`; not those whose
        pages a peer reads); with `abort` every live request ends. Requests that arrive meanwhile wait."""
        assert mode in PAUSE_MODES
        self._at(now)
        self.paused = True
        if mode == "abort":
            for rid in list(self.roster.live):
                self.abort(rid, "aborted by a pause", 499, now)
        elif mode == "retract":
            # Siblings that wait for their fork hold a slot too, and go with their leader.
            for request in [r for r in self.table.requests if r is not None and r.phase is Phase.RUNNING and not r.pinned]:
                self.roster.retract(request, now)

    def resume(self) -> None:
        """Plan again."""
        self.paused = False

    @property
    def is_settled(self) -> bool:
        """Whether nothing is open: no request, no step, no page that a peer may still write into."""
        return not self.roster.live and not self._in_flight and self.cache.quarantined_pages == 0

    def switch(self, role: MakeRole) -> None:
        """Another role, with the same cache. Only once settled."""
        assert self.is_settled
        self.role = self.prefill.role = self.roster.role = self._outcomes.role = role(self)

    # ---- steps ----------------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Plans sent whose results have not been applied."""
        return len(self._in_flight)

    def plan(self, now: float, seed: int) -> StepPlan | None:
        """The next step, or None: nothing to do, or enough in flight."""
        if len(self._in_flight) > self.depth:
            return None
        self._at(now)
        self.role.tick(now)
        if self.paused:
            return None
        builder = PlanBuilder()
        self._fill(builder, now, seed)
        self._outcomes.land(builder, now)
        self._bound.planned()
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
        retract = partial(self.roster.retract, now=now)
        if decode_first:
            self.decode.plan(builder, retract, self.prefill.filling)
        if self.mixed or builder.empty:
            self.prefill.plan(builder, now, seed)
        if not decode_first and builder.empty:
            self.decode.plan(builder, retract, self.prefill.filling)

    def apply(self, result: StepResult, now: float = 0.0) -> None:
        """Take in what the oldest step in flight produced."""
        self._at(now)
        record = self._in_flight.popleft()
        assert record.step == result.step, f"result of step {result.step}, expected {record.step}"
        self._outcomes.apply(record, result, now)

    def drain(self) -> Effects:
        """Effects since the last call."""
        effects = Effects(
            client=self.roster.effects,
            cache=self.cache.events,
            peer=self._messages,
            mover=self.take_orders(),
            grammars=self.grammars.orders,
        )
        self.roster.effects, self.cache.events, self._messages, self.grammars.orders = [], [], [], []
        return effects

    def take_orders(self) -> list[MoverOrder]:
        """Orders to the mover since the last call, here or of `drain`: those of before a plan must reach it before the plan does."""
        orders, self._orders = self._orders, []
        return orders

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

    def _at(self, now: float) -> None:
        # A request's arrival may lie before what has been seen since.
        self.now = max(self.now, now)

    # ---- what the role may do (`roles.Desk`) -----------------------------------------------------------------------------------

    @property
    def totals(self) -> Totals:
        """See `Desk`."""
        return self.accounts.totals

    @property
    def planned_step(self) -> int:
        """See `Desk`."""
        return self._steps

    @property
    def applied_step(self) -> int:
        """See `Desk`."""
        return self._in_flight[0].step - 1 if self._in_flight else self._steps

    @property
    def retracted_wait(self) -> bool:
        """See `Desk`."""
        return any(request.attempt for request in self.prefill.waiting)

    def fits(self, request: Request, matched: int) -> bool:
        """See `Desk`."""
        return self.prefill.fits(request, matched)

    def enqueue(self, request: Request) -> None:
        """See `Desk`."""
        request.since = self.now
        request.move(Phase.WAITING)
        self.prefill.enqueue(request)

    def land(self, request: Request, arrived: Arrived) -> None:
        """See `Desk`."""
        self._outcomes.landing.append((request, arrived))

    def finish(self, request: Request, finish: Finish, completion: int) -> None:
        """See `Desk`."""
        self.roster.finish(request, finish, completion)

    def tell(self, peer: str, message: PeerMessage) -> None:
        """See `Desk`."""
        self._messages.append((peer, message))

    def order(self, order: MoverOrder) -> None:
        """See `Desk`."""
        self._orders.append(order)

    # ---- numbers --------------------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> StepStats:
        """What the latest plan is made of."""
        return self.accounts.last_step

    def load(self) -> LoadSnapshot:
        """How busy the server is now."""
        return self.accounts.load(
            self.roster.live.values(),
            self.role.queues(),
            self.grammars.queued,
            steps=self._steps,
            new_token_ratio=self.ratio.value,
            paused=self.paused,
        )

    def state(self, now: float, rids: Collection[str] | None = None) -> dict[str, object]:
        """Where every request is, for people: all of them, and what rooms there are without one, or only the requests `rids`."""
        live = self.roster.live
        requests = list(live.values()) if rids is None else [live[rid] for rid in rids if rid in live]
        filling = (*self.prefill.filling, *self.prefill.settling)
        unready = [request for request in requests if self.grammars.waits(request)]
        found = whereabouts(requests, self.role.stages(), self.table, filling=filling, unready=unready, now=now, paused=self.paused)
        return {"in_flight": self.in_flight, "requests": [asdict(each) for each in found if rids is None or each.rid is not None]}
