"""Fakes for unit tests: a runner without tensors whose KV is a hash of the context, and what it would answer alone.

`FakeRunner` obeys the contract of `core.step`: it keeps a token pool, a page table and page contents. The "KV" of position p is a
hash of all tokens up to p, computed from what the *page* of position p - 1 holds. So a page that was freed too early, overwritten,
wrongly shared or wrongly copied shows up as a wrong token.
"""

from __future__ import annotations

import hashlib

import numpy as np

from radixpd.core.request import SamplingParams, sample_seed
from radixpd.core.step import Forced, PromptScores, StepPlan, StepResult, TokenLogprobs

__all__ = ["FakeRunner", "continuation"]

VOCAB = 40


def _mix(state: int, token: int) -> int:
    digest = hashlib.blake2b(state.to_bytes(8, "little") + int(token).to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1  # never 0: 0 is an unwritten page


def _sample(state: int, params: SamplingParams, sample: int) -> int:
    seed = 0 if params.temperature == 0 else sample_seed(params.seed, sample)
    return _mix(state, seed & 0x7FFFFFFF) % VOCAB


def continuation(prompt: np.ndarray, params: SamplingParams, sample: int = 0, count: int = 0) -> list[int]:
    """The first `count` (default: max_new_tokens) tokens after `prompt`, without any stop rule."""
    state = 0
    for token in prompt.tolist():
        state = _mix(state, token)
    output = []
    for _ in range(count or params.max_new_tokens):
        output.append(_sample(state, params, sample))
        state = _mix(state, output[-1])
    return output


class FakeRunner:
    """Runs plans on integers."""

    fingerprint = "fake"

    def __init__(self, *, pages: int, page_size: int, slots: int, context_length: int, jump: int = 0) -> None:
        self.jump = jump  # tokens that the grammars of those who have one force behind every third token
        self.page_size = page_size
        self.tokens = np.full((slots, context_length + 2), -1, dtype=np.int64)
        self.page_table = np.full((slots, context_length // page_size + 2), -1, dtype=np.int64)
        self.kv = np.zeros((pages, page_size), dtype=np.uint64)
        self.begun: dict[int, tuple[SamplingParams, int, int]] = {}
        self.steps = 0

    def step(self, plan: StepPlan) -> StepResult:
        """One plan, in the order of the contract."""
        self.steps += 1
        assert plan.step == self.steps, "plans out of order"
        for begin in plan.begins:
            self.tokens[begin.slot] = -1
            self.tokens[begin.slot, : len(begin.tokens)] = begin.tokens
            self.begun[begin.slot] = (begin.params, begin.sample, begin.prompt_length)
        self.page_table[plan.page_slots, plan.page_positions] = plan.page_ids
        states = [self._row(*row) for row in zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True)]
        scores = tuple(self._score(plan, each.row, each.first) for each in plan.scores)
        tokens, logprobs, forced = [], [], []
        for row, slot in zip(plan.sample_rows.tolist(), plan.sample_slots.tolist(), strict=True):
            params, sample, _ = self.begun[slot]
            token = _sample(states[row], params, sample)
            self.tokens[slot, plan.starts[row] + plan.lengths[row]] = token
            tokens.append(token)
            logprobs.append(_logprob(states[row], token) if params.logprobs else None)
            if self.jump and params.may_jump and token % 3 == 0:
                after = int(plan.starts[row] + plan.lengths[row]) + 1
                forced.append(Forced(len(tokens) - 1, self._force(_mix(states[row], token), slot, after)))
        for source, target in plan.copies.tolist():
            self.kv[target] = self.kv[source]
        wanted = tuple(logprobs) if any(each is not None for each in logprobs) else ()
        return StepResult(step=plan.step, tokens=np.array(tokens, dtype=np.int32), logprobs=wanted, scores=scores, forced=tuple(forced))

    def _force(self, state: int, slot: int, begin: int) -> np.ndarray:
        """The next tokens are what would have been sampled."""
        params, sample, prompt = self.begun[slot]
        forced: list[int] = []
        while len(forced) < min(self.jump, prompt + params.max_new_tokens - begin):
            forced.append(_sample(state, params, sample))
            state = _mix(state, forced[-1])
        self.tokens[slot, begin : begin + len(forced)] = forced
        return np.array(forced, dtype=np.int32)

    def _row(self, slot: int, start: int, length: int) -> int:
        state = self._read(slot, start - 1) if start else 0
        for position in range(start, start + length):
            token = self.tokens[slot, position]
            assert token >= 0, f"slot {slot} reads position {position}, which has no token"
            state = _mix(state, int(token))
            page = self.page_table[slot, position // self.page_size]
            self.kv[page, position % self.page_size] = state
        return state

    def _read(self, slot: int, position: int) -> int:
        return int(self.kv[self.page_table[slot, position // self.page_size], position % self.page_size])

    def _score(self, plan: StepPlan, row: int, first: int) -> PromptScores:
        slot, end = int(plan.slots[row]), int(plan.starts[row] + plan.lengths[row])
        last = min(end, self.begun[slot][2] - 1)
        values = [self._read(slot, p) % 1000 + self.tokens[slot, p + 1] / 100 for p in range(first, last)]
        empty = np.empty((len(values), 0))
        return PromptScores(
            first + 1, np.array(values, np.float32), empty.astype(np.int32), empty.astype(np.float32), empty.astype(np.float32)
        )


def _logprob(state: int, token: int) -> TokenLogprobs:
    empty = np.empty(0, dtype=np.float32)
    return TokenLogprobs(float(state % 1000 + token / 100), empty.astype(np.int32), empty, empty)
