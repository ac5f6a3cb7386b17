"""What a step may take on, and the estimate of what running requests will still write."""

from __future__ import annotations

import pytest

from radixpd.core.budget import CLIP_NEW_TOKENS, DECAY_STEPS, INITIAL_RATIO, MINIMUM_SHARE, Budget, NewTokenRatio


def test_pieces_are_cut_to_what_is_left() -> None:
    budget = Budget(tokens=100, cut=True)
    assert budget.piece(70) == 70
    budget.take(70)
    assert (budget.left, budget.piece(50)) == (30, 30)
    budget.take(30)
    assert (budget.left, budget.piece(50)) == (0, 0)


def test_an_uncut_prompt_fits_whole_or_not_at_all() -> None:
    budget = Budget(tokens=100, cut=False)
    budget.take(40)
    assert budget.piece(60) == 60
    assert budget.piece(61) == 0


def test_an_uncut_prompt_over_any_budget_runs_alone() -> None:
    budget = Budget(tokens=100, cut=False)
    assert budget.piece(500) == 500
    budget.take(500)
    assert budget.left == 0
    assert budget.piece(1) == 0


def test_ratio_decays_to_its_minimum_and_a_retraction_resets_it() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == INITIAL_RATIO
    values = [ratio.value]
    for _ in range(DECAY_STEPS + 100):
        ratio.decay()
        values.append(ratio.value)
    assert values == sorted(values, reverse=True)
    assert values[DECAY_STEPS // 2] == pytest.approx(INITIAL_RATIO * (1 + MINIMUM_SHARE) / 2)
    assert ratio.value == pytest.approx(INITIAL_RATIO * MINIMUM_SHARE)
    ratio.reset()
    assert ratio.value == INITIAL_RATIO


def test_conservativeness_scales_and_never_exceeds_one() -> None:
    assert NewTokenRatio(0.5).value == pytest.approx(INITIAL_RATIO / 2)
    assert NewTokenRatio(10.0).value == 1.0


def test_expected_output_is_a_share_and_is_clipped() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.expected(1000) == 700
    assert ratio.expected(0) == 0
    assert ratio.expected(10**9) == int(CLIP_NEW_TOKENS * INITIAL_RATIO)
