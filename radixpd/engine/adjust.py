"""What a request changes about its own logits before anything is chosen: bias, penalties, and the ids barred until `min_new_tokens`.

The order is fixed: logit_bias, repetition (over prompt and output), frequency and presence (over output only), then the barred ids.
Invariant: an `Adjustment` can be rebuilt from the tokens so far at any time, so a retracted request goes on exactly where it was. One per
slot that needs it, held by `SamplingState`; counts grow by `record`, one token at a time.
"""

from __future__ import annotations

import numpy as np
import torch

from radixpd.core.request import SamplingParams
from radixpd.core.step import SlotBegin

__all__ = ["Adjustment", "needs_adjustment"]


def needs_adjustment(params: SamplingParams) -> bool:
    """Whether these parameters ever change a logit."""
    return bool(params.logit_bias) or params.min_new_tokens > 0 or penalises(params)


def penalises(params: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


class Adjustment:
    """The logit changes of one slot."""

    def __init__(self, begin: SlotBegin, *, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        params = begin.params
        self.params = params
        self.bias_ids = torch.tensor([id for id, _ in params.logit_bias], dtype=torch.int64)
        self.bias = torch.tensor([value for _, value in params.logit_bias], dtype=torch.float32)
        # Ends that the vocabulary lacks can never be sampled: nothing to bar.
        ends = sorted({id for id in (*eos_ids, *params.stop_token_ids) if 0 <= id < vocab_size})
        self.barred_ids = torch.tensor(ends, dtype=torch.int64)
        self.counts: torch.Tensor | None = None  # float32 [vocab]: occurrences in the output
        self.in_prompt: torch.Tensor | None = None  # bool [vocab]
        if penalises(params):
            tokens = np.asarray(begin.tokens)
            prompt, output = tokens[: begin.prompt_length], tokens[begin.prompt_length :]
            self.counts = torch.from_numpy(np.bincount(output, minlength=vocab_size).astype(np.float32))
            self.in_prompt = torch.from_numpy(np.bincount(prompt, minlength=vocab_size) > 0)

    def apply(self, logits: torch.Tensor, made: int) -> None:
        """Change one row of logits `[vocab]` in place; `made` output tokens precede the one to be sampled."""
        if len(self.bias_ids):
            logits.index_add_(0, self.bias_ids, self.bias)
        if self.counts is not None and self.in_prompt is not None:
            self._penalise(logits, self.counts, self.in_prompt)
        if made < self.params.min_new_tokens:
            logits[self.barred_ids] = -torch.inf

    def record(self, token: int) -> None:
        """A token has been sampled."""
        if self.counts is not None:
            self.counts[token] += 1

    def _penalise(self, logits: torch.Tensor, counts: torch.Tensor, in_prompt: torch.Tensor) -> None:
        params, made = self.params, counts > 0
        if params.repetition_penalty != 1.0:
            # Towards "less likely" on either side of zero.
            weaker = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            torch.where(made | in_prompt, weaker, logits, out=logits)
        if params.frequency_penalty != 0.0:
            logits.sub_(counts, alpha=params.frequency_penalty)
        if params.presence_penalty != 0.0:
            logits.sub_(made.to(logits.dtype), alpha=params.presence_penalty)
