"""Collects the rows of one step and turns them into a `StepPlan`, with a record of who takes part for when the result comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radixpd.core.request import Phase, Request
from radixpd.core.slots import SlotTable
from radixpd.core.step import Score, Send, SlotBegin, StepPlan

__all__ = ["InFlight", "Piece", "PlanBuilder", "StepStats"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions `start .. end - 1` of one request's prompt in one step. `final`: the prompt ends with it. `scored_end`: prompt tokens
    below it have their log-probability after this step (0 when none is asked). `forked`: siblings that go their own way after it."""

    request: Request
    attempt: int
    start: int
    end: int
    final: bool
    scored_end: int
    forked: tuple[Request, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether the request is still the one that this piece was planned for."""
        return self.request.phase is Phase.RUNNING and self.request.attempt == self.attempt


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a step is made of, for logs and metrics."""

    step: int = 0
    new_sequences: int = 0
    new_tokens: int = 0  # prompt tokens to compute
    cached_tokens: int = 0  # prompt tokens found by the sequences that start in this step
    decode_rows: int = 0
    running: int = 0
    waiting: int = 0
    retracted: int = 0


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan that was sent and not yet applied. `epochs`: of the sampled slots when it was planned."""

    step: int
    pieces: tuple[Piece, ...]
    scored: tuple[Piece, ...]
    sample_slots: np.ndarray
    epochs: np.ndarray


@dataclass(slots=True)
class PlanBuilder:
    """Rows in the order in which they were added: pieces of prompts first, then decode rows."""

    pieces: list[Piece] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    sample_slots: list[int] = field(default_factory=list)
    begins: list[SlotBegin] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    scored: list[Piece] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    decode: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    decode_starts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    decode_lengths: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    prompt_tokens: int = 0  # of the requests that start for the first time
    cached_tokens: int = 0  # of those, found in the cache
    retracted: int = 0

    @property
    def empty(self) -> bool:
        """Nothing to compute."""
        return not self.pieces and not len(self.decode) and not self.begins

    def build(self, step: int, table: SlotTable, changed: tuple[np.ndarray, np.ndarray, np.ndarray]) -> tuple[StepPlan, InFlight]:
        """The plan and its record."""
        rows = len(self.pieces)
        head = np.array([(p.request.slot, p.start, p.end - p.start) for p in self.pieces], dtype=np.int32).reshape(rows, 3)
        decode_rows = np.arange(rows, rows + len(self.decode), dtype=np.int32)
        sample_slots = np.concatenate([np.array(self.sample_slots, dtype=np.int32), self.decode])
        plan = StepPlan(
            step=step,
            slots=np.concatenate([head[:, 0], self.decode]),
            starts=np.concatenate([head[:, 1], self.decode_starts]),
            lengths=np.concatenate([head[:, 2], self.decode_lengths]),
            sample_rows=np.concatenate([np.array(self.sample_rows, dtype=np.int32), decode_rows]),
            sample_slots=sample_slots,
            page_slots=changed[0],
            page_positions=changed[1],
            page_ids=changed[2],
            begins=tuple(self.begins),
            scores=tuple(self.scores),
            copies=np.array(self.copies, dtype=np.int32).reshape(-1, 2),
            sends=tuple(self.sends),
        )
        return plan, InFlight(step, tuple(self.pieces), tuple(self.scored), sample_slots, table.epoch[sample_slots])
