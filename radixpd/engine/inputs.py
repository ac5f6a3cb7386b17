"""From a plan and the runner's tables to what the model and the attention backend take: flat, ragged, without a loop over tokens.

Rows lie behind each other: row r owns the flat entries `offsets[r] : offsets[r + 1]`. Called by `Runner.step`, once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixpd.attention.base import AttentionInputs
from radixpd.attention.paged_index import paged_index
from radixpd.core.step import StepPlan
from radixpd.engine.tables import Tables

__all__ = ["SampleRows", "StepInputs", "sample_rows", "step_inputs"]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's ragged batch of R rows, T tokens in all."""

    tokens: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    attention: AttentionInputs
    offsets: np.ndarray  # int64 [R + 1]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Where S samples come from. Samples that share a row share its logits."""

    last: np.ndarray  # int64 [U]: flat index of the last token of each row that is sampled, each row once
    which: np.ndarray  # int64 [S]: sample i reads the logits of `last[which[i]]`
    slots: np.ndarray  # int32 [S]
    positions: np.ndarray  # int64 [S]: where the sampled token goes


def step_inputs(plan: StepPlan, tables: Tables, page_size: int) -> StepInputs:
    """Inputs of the forward pass."""
    lengths = plan.lengths.astype(np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    positions = np.arange(offsets[-1]) + np.repeat(plan.starts - offsets[:-1], lengths)
    tokens = tables.tokens[np.repeat(plan.slots, lengths), positions]
    index = paged_index(tables.pages, plan.slots, plan.starts, plan.lengths, page_size)
    attention = AttentionInputs(
        qo_indptr=torch.from_numpy(index.qo_indptr),
        indptr=torch.from_numpy(index.indptr),
        indices=torch.from_numpy(index.indices),
        last_page_len=torch.from_numpy(index.last_page_len),
        page_size=page_size,
    )
    return StepInputs(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(positions), attention, offsets)


def sample_rows(plan: StepPlan, offsets: np.ndarray) -> SampleRows:
    """Which hidden states need logits for sampling, and who reads them."""
    rows, which = np.unique(plan.sample_rows, return_inverse=True)
    ends = plan.starts.astype(np.int64) + plan.lengths
    return SampleRows(offsets[rows + 1] - 1, which, plan.sample_slots, ends[plan.sample_rows])
