"""Where every live request is, since when, and whom it waits for: the answer to "why is it stuck?".

A role says in which part of a handoff its rooms are (`Stage`); everything else follows from phase, queues and slots. Pages and rooms that
no request here stands for any more (or yet) are told too, without a rid. Reads only. Called by the scheduler's `state`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from radixpd.core.request import NO_SLOT, Phase, Request
from radixpd.core.slots import SlotTable

__all__ = ["OWN_MOVER", "OWN_POOL", "OWN_QUEUE", "RUNNER", "Part", "Stage", "Whereabouts", "whereabouts"]

Part = Literal[
    "grammar", "queued", "prefill", "decode", "fork",  # on every server
    "reserving", "reserved", "receiving", "arrived", "landed", "landing", "quarantine",  # on a decode server
    "awaiting_reserve", "awaiting_body", "sending", "draining",  # on a prefill server
]  # fmt: skip
RUNNER = "runner"
OWN_QUEUE = "own queue"
OWN_POOL = "own pool"
OWN_MOVER = "own mover"
COMPILER = "grammar compiler"
CONTINUE = "continue_generation"  # what ends a pause


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a handoff. `request`: None where there is none. `since`: on the scheduler's clock; `waits_for`: a peer's name, or one of
    the words above."""

    part: Part
    since: float
    waits_for: str
    room: int
    request: Request | None = None
    peer: str = ""
    pages: int = 0  # held without a slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """One live request, or (with `rid` null) a room or pages without one. Times in seconds before now; lengths in tokens."""

    rid: str | None
    part: Part
    since: float
    waits_for: str
    phase: str | None = None
    age: float | None = None  # since it arrived
    room: int | None = None
    peer: str | None = None
    slot: int | None = None
    pages: int = 0  # that it holds, the tree's included
    attempt: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


def whereabouts(
    requests: Iterable[Request],
    stages: Iterable[Stage],
    table: SlotTable,
    *,
    filling: Iterable[Request],
    unready: Iterable[Request],
    now: float,
    paused: bool,
) -> list[Whereabouts]:
    """All of these requests, then what stands for itself. `filling`: whose prompts are under way; `unready`: whose grammar is not ready."""
    found = list(stages)
    staged = {stage.request.rid: stage for stage in found if stage.request is not None}
    busy = {request.rid: Phase.RUNNING for request in filling} | {request.rid: Phase.PARKED for request in unready}
    shown = [_of(request, staged.get(request.rid), table, busy=busy, now=now, paused=paused) for request in requests]
    return shown + [_alone(stage, now) for stage in found if stage.request is None]


def _of(request: Request, stage: Stage | None, table: SlotTable, *, busy: dict[str, Phase], now: float, paused: bool) -> Whereabouts:
    part, waits_for = (stage.part, stage.waits_for) if stage is not None else _plain(request, busy)
    if paused and waits_for in (RUNNER, OWN_QUEUE):
        waits_for = CONTINUE
    slot, room = request.slot, (request.leader or request).room
    peer = stage.peer if stage is not None else room.peer if room is not None else ""
    known = int(table.known[slot]) if request.phase is Phase.RUNNING else len(request.tokens)
    return Whereabouts(
        rid=request.rid,
        part=part,
        since=_ago(now, stage.since if stage is not None else request.since),
        waits_for=waits_for,
        phase=request.phase.value,
        age=_ago(now, request.arrived),
        room=room.number if room is not None else None,
        peer=peer or None,
        slot=slot if slot != NO_SLOT else None,
        pages=int(table.page_count[slot]) if slot != NO_SLOT else 0,
        attempt=request.attempt,
        prompt_tokens=request.prompt_length,
        output_tokens=known - request.prompt_length,
        cached_tokens=request.trail.cached,
    )


def _plain(request: Request, busy: dict[str, Phase]) -> tuple[Part, str]:
    """Of a request that is in no part of a handoff that its role knows of."""
    if request.leader is not None:
        return "fork", "sample 0"
    if request.phase is Phase.PARKED and request.rid in busy:
        return "grammar", COMPILER
    if request.phase is Phase.PARKED:  # the next plan takes it in
        return "landing", RUNNER
    if request.phase is Phase.WAITING:
        return "queued", OWN_QUEUE
    return ("prefill" if request.rid in busy else "decode"), RUNNER


def _alone(stage: Stage, now: float) -> Whereabouts:
    return Whereabouts(
        rid=None,
        part=stage.part,
        since=_ago(now, stage.since),
        waits_for=stage.waits_for,
        room=stage.room,
        peer=stage.peer or None,
        pages=stage.pages,
    )


def _ago(now: float, then: float) -> float:
    return round(now - then, 3)
