"""Two real brains, two fake runners, a fake network and fake movers: handoffs under every order of events, loss and death.

Pages travel when the mover gets to it, read at that moment, so a page that prefill gave up too early, or that decode handed out while a
writer was still at it, shows up as a wrong token. At the end every request has ended once on each side, decode's with the tokens it would
get alone and with a journey in which each token of its prompt counts once, and both pools are whole. With a codec the pages change on
their way: then whoever reads one of them without having asked for it gets a wrong token.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from core.test_scheduler_sim import Asked, World, scheduler_settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixpd.config.settings import CacheSettings
from radixpd.core.decode_role import DecodeRole
from radixpd.core.effects import Effects
from radixpd.core.handoff import (
    CancelRoom,
    ExpectRoom,
    HandoffLimits,
    Landed,
    MoverOrder,
    PeerLost,
    PeerMessage,
    Quiet,
    Reserve,
    Room,
    TicketDone,
)  # fmt: skip
from radixpd.core.journey import Journey
from radixpd.core.page_hash import lossy
from radixpd.core.prefill_role import PrefillRole
from radixpd.core.request import LogprobParams, SamplingParams
from radixpd.core.step import Send, StepPlan

P = "prefill:1"
D = "decode:1"
PARTS = {
    "parked": {"awaiting_reserve", "reserving", "reserved", "receiving", "arrived", "landed", "landing", "fork"},
    "waiting": {"queued", "fork"},
    "running": {"prefill", "decode", "fork"},
    "sending": {"sending"},
    None: {"awaiting_body", "draining", "quarantine"},
}
LIMITS = HandoffLimits(body=3.0, lease=2.0, renew=0.5, reserve=6.0, transfer=4.0, tombstone=5.0, local_tokens=4, peer_tokens=200)


class Side(World):
    """One server. `inbox` holds messages under way to it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.peer: list[tuple[str, PeerMessage]] = []
        self.orders: list[MoverOrder] = []
        self.planned: list[Send] = []

    def plan(self) -> bool:
        before = len(self.sent)
        moved = super().plan()
        if len(self.sent) > before:
            self.on_plan(self.sent[-1])
        return moved

    def on_plan(self, plan: StepPlan) -> None:
        self.planned += plan.sends

    def _take(self) -> Effects:
        effects = super()._take()
        self.peer += effects.peer
        self.orders += effects.mover
        return effects


@dataclass
class Write:
    """Pages on their way: one ticket's worth."""

    send: Send
    step: int
    left: list[int]


@dataclass
class Pair:
    """A prefill and a decode server and what lies between them."""

    case: dict[str, object]
    rng: random.Random
    writes: list[Write] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    expected: dict[int, set[int]] = field(default_factory=dict)
    to_p: deque[PeerMessage] = field(default_factory=deque)
    to_d: deque[PeerMessage] = field(default_factory=deque)
    prompts: list[np.ndarray] = field(default_factory=list)
    rooms: int = 0
    asked: dict[int, Reserve] = field(default_factory=dict)  # by room
    arrived: dict[int, int] = field(default_factory=dict)  # pages of rooms that have landed
    looks: int = 0
    landed: int = 0
    pages_sent: int = 0
    paused: bool = False

    def __post_init__(self) -> None:
        self.limits = replace(LIMITS, fallback=bool(self.case["fallback"]), codec=self.codec)
        self.now = 0.0
        self.p = self._side(PrefillRole, "p")
        self.d = self._side(DecodeRole, "d")

    @property
    def codec(self) -> str:
        return str(self.case.get("codec", "none"))

    def _side(self, role: type, name: str) -> Side:
        case = self.case
        page = int(case["page"])  # type: ignore[call-overload]
        return Side(
            scheduler_settings(
                max_running_requests=case["slots"],
                chunked_prefill_size=case["chunk"],
                disable_overlap_schedule=not case["overlap"],
                schedule_conservativeness=0.05,
            ),
            CacheSettings(page_size=page, disable_radix_cache=not case["reuse"]),
            pages=int(case[f"{name}_tokens"]) // page,  # type: ignore[call-overload]
            seed=self.rng.randrange(2**32),
            role=partial(role, limits=self.limits),
        )

    # ---- the world's moves ----

    def arrive(self) -> None:
        rng = self.rng
        if self.prompts and rng.random() < 0.5:
            old = rng.choice(self.prompts)
            prompt = np.concatenate([old[: rng.randint(1, len(old))], self.d._ids(rng.choice((0, 1, 7, 20)))])[:60]
        else:
            prompt = self.d._ids(rng.randint(1, 40))
        self.prompts.append(prompt)
        params = SamplingParams(
            max_new_tokens=rng.choice((0, 1, 2, 9, 25)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(1000),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice(((), (3, 11))),
            n=rng.choice((1, 1, 1, 2, 3)),
            logprobs=rng.choice((None, LogprobParams(), LogprobParams(start=0))),
        )
        self.rooms += 1
        sides = [(self.p, Room(self.rooms)), (self.d, Room(self.rooms, P))]
        if rng.random() < 0.15:  # without a room: served by one side alone
            sides = [(rng.choice((self.p, self.d)), None)]  # type: ignore[list-item]
        elif rng.random() < 0.05:  # one body got lost
            sides.pop(rng.randrange(2))
        rng.shuffle(sides)
        for side, room in sides:
            rids = tuple(f"r{self.rooms}-{i}" for i in range(params.n))
            for index, rid in enumerate(rids):
                exact = room is None or side is self.p or self.codec == "none" or not params.max_new_tokens
                side.asked[rid] = Asked(prompt, params, index, b"" if exact else lossy(b"", self.codec), exact=exact)
            own = params if room is None or side is self.d else replace(params, seed=params.seed + 1)  # each draws its own; decode's counts
            side.scheduler.arrive(rids, prompt, own, now=self.now, room=room)
            self.settle()
            if rng.random() < 0.3:
                for _ in range(rng.randrange(8)):
                    self.move(arrivals=False)

    def exchange(self) -> bool:
        """One message arrives somewhere."""
        queues = [
            (queue, side) for queue, side in ((self.to_p, self.p), (self.to_d, self.d)) if queue and not (self.paused and side is self.p)
        ]
        if not queues:
            return False
        queue, side = self.rng.choice(queues)
        side.scheduler.receive(queue.popleft(), D if side is self.p else P, self.now)
        return True

    def copy(self) -> bool:
        """Prefill's mover writes one page."""
        ready = [write for write in self.writes if write.step <= self.p.runner.steps or write.left[0] < write.send.ready]
        if not ready or self.paused:
            return False
        write = self.rng.choice(ready)
        send, at = write.send, write.left.pop(0)
        self.d.runner.kv[send.target[at]] = self.p.runner.kv[send.source[at]] ^ np.uint64(self.codec != "none")
        self.pages_sent += 1
        left = self.expected.get(send.room)
        if left is not None and send.room not in self.cancelled:  # what its mover does after a cancellation does not count
            left.discard(int(send.target[at]))
            if not left:
                del self.expected[send.room]
                self.landed += 1
                pages = self.arrived[send.room] = len(self.asked[send.room].pages)
                self.d.scheduler.receive(Landed(send.room, 100 * pages, 60 * pages, exact=self.codec == "none"), "", self.now)
        if not write.left:
            self.writes.remove(write)
            self.p.scheduler.receive(TicketDone(send.ticket), "", self.now)
        return True

    def quiet(self) -> bool:
        """A cancelled room's last write has happened, or never will."""
        if not self.cancelled or self.paused:
            return False
        room = self.rng.choice(sorted(self.cancelled))
        self.cancelled.discard(room)
        self.writes = [write for write in self.writes if write.send.room != room]
        self.p.scheduler.receive(Quiet(room), "", self.now)
        return True

    def fail_ticket(self) -> None:
        if self.writes and not self.paused:
            write = self.rng.choice(self.writes)
            self.writes.remove(write)
            self.p.scheduler.receive(TicketDone(write.send.ticket, "cut"), "", self.now)

    def restart_prefill(self) -> None:
        """kill -9 and a new process: everything it had is gone, and its clients know."""
        self.writes.clear()
        self.cancelled.clear()
        self.to_p.clear()
        self.to_d.clear()
        self.p = self._side(PrefillRole, "p")
        self.paused = False
        self.d.scheduler.receive(PeerLost(P, "killed"), "", self.now)

    def hold(self) -> None:
        """An operator stops planning for a while."""
        self.rng.choice((self.p, self.d)).scheduler.pause(self.rng.choice(("retract", "in_place")), self.now)

    def resume(self) -> None:
        for side in (self.p, self.d):
            side.scheduler.resume()

    def move(self, *, arrivals: bool) -> None:
        self.now += self.rng.choice((0.001, 0.01, 0.05))
        self.p.now = self.d.now = self.now
        names = ["plan", "run", "apply", "exchange", "copy", "quiet", "abort", "stop", "fail_ticket", "restart_prefill", "pause", "hold",
                 "resume", "arrive"]  # fmt: skip
        faults = (0.1, 0.02, 0.05, 0.1, 0.5) if self.case["faults"] else (0, 0, 0, 0, 0)
        weights = [8, 8, 8, 8, 8, 1, 0.3, 0.3, *faults, 2 if arrivals else 0]
        name = self.rng.choices(names, weights)[0]
        if name in ("plan", "run", "apply", "abort", "stop"):
            side = self.rng.choice((self.p, self.d))
            if not (side is self.p and self.paused):
                getattr(side, name)()
        elif name == "pause":
            self.paused = not self.paused
        else:
            getattr(self, name)()
        self.settle()

    def settle(self) -> None:
        """Hand out what both brains have said; look at both."""
        for side, outbox in ((self.p, self.to_d), (self.d, self.to_p)):
            side._collect()
            outbox.extend(message for _, message in side.peer)
            self.asked |= {message.room: message for _, message in side.peer if isinstance(message, Reserve)}
            side.peer.clear()
            for order in side.orders:
                match order:
                    case ExpectRoom(room, _, pages):
                        self.expected[room] = set(pages.tolist())
                    case CancelRoom(room) if side is self.d:
                        self.expected.pop(room, None)
                    case CancelRoom(room):
                        self.cancelled.add(room)
            side.orders.clear()
            for send in side.planned:
                self.writes.append(Write(send, self.p.scheduler._steps, list(range(len(send.source)))))
            side.planned.clear()
            side.check()
        self.looks += 1
        if self.looks % 31 == 0:
            for side in (self.p, self.d):
                self.check_state(side)

    def check_state(self, side: Side) -> None:
        """Everybody is somewhere, and the numbers of people and of metrics are the same."""
        scheduler = side.scheduler
        entries = scheduler.state(self.now)["requests"]
        assert sorted(each["rid"] for each in entries if each["rid"] is not None) == sorted(scheduler.requests)
        assert all(each["waits_for"] and each["since"] >= 0 for each in entries)
        for each in entries:
            assert each["part"] in PARTS[each["phase"]], each
            assert (each["slot"] is not None) <= (each["pages"] > 0)
            if each["room"] is not None and side is self.d:
                assert each["peer"] == P
        load = scheduler.load()
        assert load.free_pages + load.tree_pages + load.request_pages + load.quarantine_pages == side.pages
        assert load.quarantine_pages == sum(each["pages"] for each in entries if each["part"] == "quarantine")
        parts = [each["part"] for each in entries]
        assert load.prefill_prealloc == parts.count("awaiting_reserve")
        assert load.decode_prealloc == parts.count("reserving")
        assert load.decode_transfer == sum(map(parts.count, ("reserved", "receiving", "arrived", "landed")))
        assert load.prefill_inflight == len({each["room"] for each in entries if each["part"] == "sending"})

    def finish(self) -> None:
        """Until both sides are idle; time passes when nothing else does."""
        self.paused = False
        self.resume()
        idle = 0
        while idle < 400:
            self.now += 0.005
            self.p.now = self.d.now = self.now
            moved = False
            for name in ("plan", "run", "apply"):
                for side in (self.p, self.d):
                    moved |= getattr(side, name)()
                    self.settle()
            for step in (self.exchange, self.copy, self.quiet):
                moved |= step()
                self.settle()
            if not moved:
                self.now += 0.05
                idle += 1
            elif self.p.scheduler.requests or self.d.scheduler.requests:
                idle = 0
        for side in (self.p, self.d):
            assert all(asked.ends for asked in side.asked.values()), "somebody waits for ever"

    def check_end(self) -> None:
        for side in (self.p, self.d):
            self.check_journeys(side)
            assert not side.scheduler.role.rooms
            assert side.scheduler.cache.quarantined_pages == 0
        assert not self.p.scheduler.role.draining
        assert not self.p.scheduler.role._tickets
        self.d.check_end()
        for side in (self.p, self.d):
            load = side.scheduler.load()
            assert (load.running, load.waiting, load.parked, load.locked_pages) == (0, 0, 0, 0)
            assert side.scheduler.flush()
            assert side.scheduler.load().free_pages == side.pages

    def check_journeys(self, side: Side) -> None:
        """Each token of a prompt counts once; both legs tell the same story."""
        page = side.scheduler.cache.page_size
        for rid, asked in side.asked.items():
            end, journey = asked.ends[0], asked.ends[0].journey
            room = int(rid[1:].split("-")[0])
            parts = origins(journey)
            assert min(parts) >= 0
            assert journey.prompt_tokens == len(asked.prompt)
            assert sum(parts) <= len(asked.prompt)
            assert min(journey.queue_ms, journey.reserve_ms, journey.prefill_ms, journey.visible_transfer_ms) >= 0
            assert journey.transfer_ms >= journey.visible_transfer_ms
            if asked.prefilled:
                assert sum(parts) == len(asked.prompt), "a token of the prompt has two origins, or none"
            if end.retractions == 0:
                assert journey.recomputed_tokens == 0
            if side is self.p and journey.leg:
                assert journey.local_computed_tokens == 0
                continue
            assert end.cached == journey.decode_hit_tokens + journey.prefill_hit_tokens <= len(asked.prompt)
            brought = journey.prefill_computed_tokens > 0
            assert not (brought and journey.fallback)
            if brought and asked.sample == 0:
                assert journey.decode_hit_tokens == self.asked[room].skip
                assert journey.pages_sent == self.arrived[room] == -(-len(asked.prompt) // page) - self.asked[room].skip // page
                assert (journey.bytes_raw, journey.bytes_wire) == (100 * journey.pages_sent, 60 * journey.pages_sent)
                other = self.p.asked.get(rid)
                if other is not None and other.prefilled:
                    assert origins(other.ends[0].journey) == parts


def origins(journey: Journey) -> tuple[int, int, int, int]:
    return (
        journey.decode_hit_tokens, journey.prefill_hit_tokens, journey.prefill_computed_tokens, journey.local_computed_tokens,
    )  # fmt: skip


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "page": st.sampled_from((1, 4, 16)),
        "p_tokens": st.sampled_from((128, 512)),
        "d_tokens": st.sampled_from((128, 512)),
        "slots": st.sampled_from((4, 8)),
        "chunk": st.sampled_from((-1, 5, 16)),
        "overlap": st.booleans(),
        "reuse": st.booleans(),
        "faults": st.booleans(),
        "fallback": st.booleans(),
        "codec": st.sampled_from(("none", "none", "int8")),
    }
)


def run(case: dict[str, object], moves: int) -> Pair:
    pair = Pair(case, random.Random(int(case["seed"])))  # type: ignore[call-overload]
    for _ in range(moves):
        pair.move(arrivals=True)
    pair.finish()
    pair.check_end()
    return pair


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases)
def test_handoffs_under_every_order_of_events(case: dict[str, object]) -> None:
    run(case, 300)


@pytest.mark.full
@pytest.mark.timeout(900)
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases)
def test_handoffs_for_long(case: dict[str, object]) -> None:
    run(case, 500)
