"""The request's phases, derived lengths, and how much of it may come from the cache."""

from __future__ import annotations

import numpy as np
import pytest

from radixpd.core.page_hash import token_bytes
from radixpd.core.request import MOVES, Phase, Request, SamplingParams, sample_seed


def _request(length: int = 10, **fields: object) -> Request:
    fields = {"scored": length} | fields
    return Request("r", np.arange(length, dtype=np.int32), length, SamplingParams(max_new_tokens=5), **fields)  # type: ignore[arg-type]


LEGAL = {
    (Phase.PARKED, Phase.WAITING),
    (Phase.PARKED, Phase.RUNNING),  # a handoff has landed
    (Phase.WAITING, Phase.RUNNING),
    (Phase.RUNNING, Phase.WAITING),  # a retraction
    (Phase.RUNNING, Phase.SENDING),
} | {(phase, Phase.FINISHED) for phase in Phase if phase is not Phase.FINISHED}


@pytest.mark.parametrize("target", Phase)
@pytest.mark.parametrize("source", Phase)
def test_phase_table(source: Phase, target: Phase) -> None:
    request = _request(phase=source)
    if (source, target) in LEGAL:
        request.move(target)
        assert request.phase is target
    else:
        with pytest.raises(AssertionError):
            request.move(target)
        assert request.phase is source
    assert (target in MOVES[source]) == ((source, target) in LEGAL)


def test_nothing_leaves_the_end() -> None:
    assert MOVES[Phase.FINISHED] == frozenset()


def test_requeue_is_a_new_attempt_with_all_that_is_known() -> None:
    request = _request(phase=Phase.RUNNING)
    request.requeue(np.arange(13, dtype=np.int32))
    assert (request.attempt, request.phase, request.prompt_length, len(request.tokens)) == (1, Phase.WAITING, 10, 13)
    assert request.data == token_bytes(np.arange(13))
    assert request.length_limit == 15, "the limit does not move with the output"


@pytest.mark.parametrize(
    ("scored", "matchable"),
    [
        (10, 9),  # nothing to score: all but the last token
        (4, 3),  # log-probabilities from position 4 on: their logits come from position 3
        (1, 0),
    ],
)
def test_matchable_leaves_what_must_be_computed(scored: int, matchable: int) -> None:
    assert _request(scored=scored).matchable == matchable


def test_matchable_after_a_retraction_covers_the_output_too() -> None:
    request = _request(phase=Phase.RUNNING)
    request.requeue(np.arange(14, dtype=np.int32))
    assert request.matchable == 13


def test_sample_seeds_differ_by_seed_and_sample_and_fit_63_bits() -> None:
    seeds = {sample_seed(seed, sample) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for sample in range(20)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
