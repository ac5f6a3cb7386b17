"""Log-probabilities against a direct torch computation on the raw logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixpd.core.request import LogprobParams
from radixpd.engine import logprobs
from radixpd.engine.logprobs import score_prompt, token_logprobs

VOCAB = 50


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3)) * 4


def test_sampled_tokens(logits):
    which, tokens = np.array([2, 0, 2]), np.array([5, 6, 49], dtype=np.int32)
    wanted = [LogprobParams(top=3, token_ids=(1, 0, 1)), None, LogprobParams()]
    first, none, last = token_logprobs(logits, which=which, tokens=tokens, wanted=wanted)
    expected = logits[2].double().log_softmax(-1)
    assert none is None
    assert first.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert first.top_ids.tolist() == expected.topk(3).indices.tolist()
    np.testing.assert_allclose(first.top_logprobs, expected.topk(3).values.numpy(), atol=1e-5)
    np.testing.assert_allclose(first.asked, expected[[1, 0, 1]].numpy(), atol=1e-5)
    assert (first.top_ids.dtype, first.top_logprobs.dtype, first.asked.dtype) == (np.int32, np.float32, np.float32)
    assert last.logprob == pytest.approx(float(expected[49]), abs=1e-5)
    assert (last.top_ids.shape, last.top_logprobs.shape, last.asked.shape) == ((0,), (0,), (0,))


def test_nobody_asks(logits):
    assert token_logprobs(logits, which=np.arange(2), tokens=np.arange(2), wanted=[None, None]) == ()


def test_more_alternatives_than_tokens(logits):
    (one,) = token_logprobs(logits, which=np.array([0]), tokens=np.array([1]), wanted=[LogprobParams(top=1000)])
    assert sorted(one.top_ids.tolist()) == list(range(VOCAB))


@pytest.mark.parametrize("rows", [1, 4, 6, 100])
def test_prompt_scores_are_the_same_in_blocks_of_any_size(rows, logits, monkeypatch):
    monkeypatch.setattr(logprobs, "BLOCK_FLOATS", rows * VOCAB)
    sizes = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden * 1.0

    targets = np.array([3, 1, 4, 1, 5, 9], dtype=np.int32)
    params = LogprobParams(top=2, token_ids=(7,))
    scores = score_prompt(logits, targets, first=11, params=params, logits=head, vocab_size=VOCAB)
    expected = logits.double().log_softmax(-1)
    assert scores.first == 11
    assert max(sizes) <= rows
    np.testing.assert_allclose(scores.logprobs, expected[range(6), targets].numpy(), atol=1e-5)
    np.testing.assert_array_equal(scores.top_ids, expected.topk(2).indices.numpy())
    np.testing.assert_allclose(scores.top_logprobs, expected.topk(2).values.numpy(), atol=1e-5)
    np.testing.assert_allclose(scores.asked, expected[:, [7]].numpy(), atol=1e-5)
    assert (scores.logprobs.dtype, scores.top_ids.dtype, scores.top_logprobs.dtype) == (np.float32, np.int32, np.float32)


def test_no_prompt_token_to_score(logits):
    scores = score_prompt(
        logits[:0], np.empty(0, dtype=np.int32), first=4, params=LogprobParams(top=2), logits=lambda hidden: hidden, vocab_size=VOCAB
    )
    assert (scores.first, scores.logprobs.shape, scores.top_ids.shape, scores.asked.shape) == (4, (0,), (0, 2), (0, 0))
