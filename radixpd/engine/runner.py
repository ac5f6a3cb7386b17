"""The runner: owns model, pool, tables and sampler of one rank and runs plans, one `step` at a time, as `core.step` prescribes.

Invariant: a step's effect depends only on the plans so far, in order; nothing here decides anything. `build_runner` makes one from resolved
settings; the runner process calls `step` in a loop, tests call it with a model of their own.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch

from radixpd.attention.base import Attend, AttentionBackend
from radixpd.core.step import Fault, Forced, PromptScores, Score, StepPlan, StepResult, TokenLogprobs, no_ids
from radixpd.engine.constraints import Constraints
from radixpd.engine.inputs import SampleRows, StepInputs, sample_rows, step_inputs
from radixpd.engine.layerwise import Departures, telling
from radixpd.engine.logprobs import score_prompt, token_logprobs
from radixpd.engine.sampler import Sampler
from radixpd.engine.tables import Tables
from radixpd.kv.pool import Pool

__all__ = ["Model", "Runner"]


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states `[T, hidden]` of T tokens."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits `[R, vocab]` of R hidden states."""
        ...


class Runner:
    """One rank's worker. The attention backend was built over `pool.layers`."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        pool: Pool,
        *,
        slots: int,
        context_length: int,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        fingerprint: str = "",
    ) -> None:
        self.model = model
        self.attention = attention
        self.pool = pool
        self.page_size = pool.layout.page_size
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint  # of weights and precision: what the KV depends on beside the tokens
        self.tables = Tables(slots=slots, context_length=context_length, page_size=self.page_size)
        self.sampler = Sampler(slots=slots, vocab_size=vocab_size, eos_ids=eos_ids)
        self.departures: Departures | None = None  # of a server that has peers
        self.constraints: Constraints | None = None  # of a server that has grammars
        self._faults: tuple[Fault, ...] = ()  # of the step under way, as is
        self._forced: tuple[Forced, ...] = ()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Run one plan; the order of its parts is the contract in `core.step`."""
        began = time.perf_counter()
        if self.departures is not None:
            self.departures.begin(plan.sends)
        for begin in plan.begins:
            self.tables.begin(begin)
            self.sampler.begin(begin)
            if self.constraints is not None:
                self.constraints.begin(begin)
        self.tables.place(plan)
        tokens, logprobs, scores = self._compute(plan)
        if len(plan.copies):
            self.pool.copy_pages(plan.copies[:, 0], plan.copies[:, 1])
        faults, self._faults, forced, self._forced = self._faults, (), self._forced, ()
        return StepResult(plan.step, tokens, logprobs, scores, time.perf_counter() - began, faults, forced)

    def close(self) -> None:
        """Give the pool back."""
        if self.constraints is not None:
            self.constraints.close()
        self.pool.close()

    def _compute(self, plan: StepPlan) -> tuple[np.ndarray, tuple[TokenLogprobs | None, ...], tuple[PromptScores, ...]]:
        """Forward, then sample, then score."""
        if not len(plan.slots):
            return no_ids(), (), ()
        inputs = step_inputs(plan, self.tables, self.page_size)
        attend = self.attention.plan(inputs.attention)
        if self.departures is not None:
            attend = telling(attend, self.departures.layer_done)
        if self.constraints is not None:
            self.constraints.start(plan.sample_slots.tolist())
        hidden = self.model.forward(inputs.tokens, inputs.positions, attend)
        tokens, logprobs = self._sample(plan, inputs, hidden)
        return tokens, logprobs, tuple(self._score(plan, score, inputs, hidden) for score in plan.scores)

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor) -> tuple[np.ndarray, tuple[TokenLogprobs | None, ...]]:
        """Sample, and put the tokens where the next step reads them."""
        if not len(plan.sample_rows):
            return no_ids(), ()
        rows = sample_rows(plan, inputs.offsets)
        logits = self.model.logits(hidden[torch.from_numpy(rows.last)])
        masks = self.constraints.masks() if self.constraints is not None else {}
        tokens = self.sampler.sample(logits, which=rows.which, slots=rows.slots, positions=rows.positions, masks=masks)
        if self.constraints is not None:
            self._follow(self.constraints, rows, tokens)
        self.tables.tokens[rows.slots, rows.positions] = tokens
        wanted = [self.sampler.state.logprobs[slot] for slot in rows.slots.tolist()]
        return tokens, token_logprobs(logits, which=rows.which, tokens=tokens, wanted=wanted)

    def _follow(self, constraints: Constraints, rows: SampleRows, tokens: np.ndarray) -> None:
        """Tell the grammars what was sampled, and put down what they force behind it."""
        self._faults = constraints.accept(rows.slots, tokens)
        self._forced = constraints.jump(rows.slots, rows.positions)
        for each in self._forced:
            slot, begin = int(rows.slots[each.sample]), int(rows.positions[each.sample]) + 1
            self.tables.tokens[slot, begin : begin + len(each.tokens)] = each.tokens
            self.sampler.state.record(np.full(len(each.tokens), slot), each.tokens)

    def _score(self, plan: StepPlan, score: Score, inputs: StepInputs, hidden: torch.Tensor) -> PromptScores:
        """Score the prompt tokens that this step's part of a row predicts."""
        slot, start = int(plan.slots[score.row]), int(plan.starts[score.row])
        params = self.sampler.state.logprobs[slot]
        assert params is not None, f"slot {slot} is scored but asked for no log-probabilities"
        end = min(start + int(plan.lengths[score.row]), int(self.sampler.state.prompt_length[slot]) - 1)
        count = max(end - score.first, 0)
        begin = int(inputs.offsets[score.row]) + score.first - start
        return score_prompt(
            hidden[begin : begin + count],
            self.tables.tokens[slot, score.first + 1 : score.first + 1 + count],
            first=score.first + 1,
            params=params,
            logits=self.model.logits,
            vocab_size=self.vocab_size,
        )
