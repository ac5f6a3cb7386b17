"""What a server does with a request before and after its prompt is computed. One small object per role on the same scheduler loop.

`Aggregated` serves a request from prompt to last token. `PrefillRole` and `DecodeRole` of a disaggregated group implement the same
protocol. A role decides; it acts only through its `Desk`, the part of the scheduler that it may use.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Protocol

from radixpd.core.handoff import Arrived, MoverOrder, MoverReport, PeerMessage, Room
from radixpd.core.holdings import Holdings
from radixpd.core.load import Queues, Totals
from radixpd.core.plan_builder import PlanBuilder
from radixpd.core.request import Finish, Phase, Request
from radixpd.core.step import TokenLogprobs
from radixpd.core.whereabouts import Stage

__all__ = ["Aggregated", "Desk", "MakeRole", "Next", "Role"]


class Next(enum.Enum):
    """Where a request goes once its whole prompt is planned."""

    DECODE = "decode"
    SEND = "send"


class Desk(Protocol):
    """What a role may do."""

    holdings: Holdings
    now: float  # of the call under way

    @property
    def totals(self) -> Totals:
        """The scheduler's counters: a role counts its handoffs there."""
        ...

    @property
    def planned_step(self) -> int:
        """Number of the latest plan."""
        ...

    @property
    def applied_step(self) -> int:
        """Number of the latest plan whose result is here; later ones may still write into pages that were given up since."""
        ...

    @property
    def retracted_wait(self) -> bool:
        """Whether somebody who has run before waits for room."""
        ...

    def fits(self, request: Request, matched: int) -> bool:
        """Whether pages suffice for the prompt behind `matched` pages, its expected output, and what others are expected to need."""
        ...

    def enqueue(self, request: Request) -> None:
        """Let the request compute its prompt here, in its turn."""
        ...

    def land(self, request: Request, arrived: Arrived) -> None:
        """The KV of the request's prompt is on its pages, and these are its first tokens: go on generating."""
        ...

    def finish(self, request: Request, finish: Finish, completion: int) -> None:
        """End the request."""
        ...

    def tell(self, peer: str, message: PeerMessage) -> None:
        """Say something to a peer's brain."""
        ...

    def order(self, order: MoverOrder) -> None:
        """Say something to the own mover."""
        ...


class Role(Protocol):
    """The scheduler asks; the role decides. Beyond five methods: `on_sampled` and `on_end` are what sending needs besides, `on_refused`
    spares the other half of a handoff a wait, and `stages` and `queues` say how far handoffs are, to people and to metrics."""

    def arrive(self, request: Request, now: float) -> Phase:
        """Where a new request starts: WAITING, or PARKED until the role releases it."""
        ...

    def on_refused(self, room: Room, reason: str, status: int) -> None:
        """A request that names this room was turned away."""
        ...

    def on_message(self, message: PeerMessage | MoverReport, peer: str, now: float) -> None:
        """A peer's brain, or the own mover (`peer` empty), has news."""
        ...

    def on_piece(self, builder: PlanBuilder, request: Request, start: int, end: int) -> Next:
        """A step is being planned that computes positions `start .. end - 1` of the prompt."""
        ...

    def on_sampled(self, request: Request, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """The first token of a request that is sent away."""
        ...

    def on_end(self, request: Request, finish: Finish) -> None:
        """The request ends now; it still holds what it holds."""
        ...

    def tick(self, now: float) -> None:
        """Time has passed: deadlines, reservations."""
        ...

    def stages(self) -> Iterable[Stage]:
        """Every part of a handoff that something waits in."""
        ...

    def queues(self) -> Queues:
        """How many requests wait in handoffs."""
        ...


MakeRole = Callable[[Desk], Role]


class Aggregated:
    """Prefill and decode in one place."""

    def __init__(self, desk: Desk) -> None:
        pass

    def arrive(self, request: Request, now: float) -> Phase:
        """Every request may run at once."""
        return Phase.WAITING

    def on_refused(self, room: Room, reason: str, status: int) -> None:
        """There are no rooms."""

    def on_message(self, message: PeerMessage | MoverReport, peer: str, now: float) -> None:
        """There are no peers."""

    def on_piece(self, builder: PlanBuilder, request: Request, start: int, end: int) -> Next:
        """Decode here."""
        return Next.DECODE

    def on_sampled(self, request: Request, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Nothing is sent away."""

    def on_end(self, request: Request, finish: Finish) -> None:
        """Nobody else is interested."""

    def tick(self, now: float) -> None:
        """Nothing waits for a peer."""

    def stages(self) -> Iterable[Stage]:
        """There are no handoffs."""
        return ()

    def queues(self) -> Queues:
        """Nobody waits in one."""
        return Queues()
