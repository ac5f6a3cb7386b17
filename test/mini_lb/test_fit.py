"""A worker's speed is learned: from few requests, through outliers and changes, whether prompts queue or run side by side."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.mini_lb.fit import DecodeFit, LeastSquares, PrefillFit, Work

NOBODY = Work()


def _seconds(new: int, cached: int = 0, *, b: float = 1e-4, c: float = 1e-9) -> float:
    return 0.01 + b * new + c * new * (new + 2 * cached)


def _watch(fit: PrefillFit, count: int, draw: random.Random, *, slower: float = 1.0, outliers: float = 0.0, longest: int = 8000) -> None:
    """Prompts alone at an idle worker, measured with 5 % noise."""
    for _ in range(count):
        new, cached = draw.randint(10, longest), draw.choice((0, draw.randint(0, 8000)))
        took = slower * _seconds(new, cached) * draw.gauss(1, 0.05)
        if draw.random() < outliers:
            took *= 30
        fit.observe(Work.of(new, cached), NOBODY, begun=0.0, seconds=took)


def _error(fit: PrefillFit, *, slower: float = 1.0) -> float:
    """The largest relative error over prompts of all kinds."""
    kinds = [(200, 0), (200, 8000), (2000, 0), (2000, 8000), (8000, 0)]
    return max(abs(fit.model.seconds(*kind) / (slower * _seconds(*kind)) - 1) for kind in kinds)


def test_the_model_is_learned_from_a_few_prompts() -> None:
    fit = PrefillFit()
    _watch(fit, 50, random.Random(0))
    assert _error(fit) < 0.15
    _watch(fit, 200, random.Random(1))
    assert _error(fit) < 0.06


def test_frequent_outliers_do_not_mislead_it() -> None:
    fit = PrefillFit()
    _watch(fit, 300, random.Random(2), outliers=0.05)
    assert _error(fit) < 0.15


def test_a_single_outlier_hardly_moves_it() -> None:
    fit = PrefillFit()
    _watch(fit, 50, random.Random(3))
    before = fit.model.seconds(2000)
    fit.observe(Work.of(2000, 0), NOBODY, begun=0.0, seconds=1000.0)
    assert fit.model.seconds(2000) == pytest.approx(before, rel=0.1)


def test_a_worker_that_becomes_slow_is_found_out() -> None:
    fit = PrefillFit()
    _watch(fit, 200, random.Random(4))
    _watch(fit, 60, random.Random(5), slower=4.0)
    assert _error(fit, slower=4.0) < 0.2


def test_what_is_not_observed_for_long_is_not_forgotten() -> None:
    """A thousand short prompts say nothing new about long ones."""
    fit = PrefillFit()
    _watch(fit, 100, random.Random(6))
    _watch(fit, 1000, random.Random(7), longest=60)
    assert fit.model.seconds(8000) == pytest.approx(_seconds(8000), rel=0.2)


@pytest.mark.parametrize(("queueing", "expected"), [(1.0, 1.0), (0.0, 0.0)])
def test_it_finds_out_whether_prompts_wait_for_each_other(queueing: float, expected: float) -> None:
    """Never idle: every prompt comes behind others. One after the other, or side by side."""
    draw = random.Random(8)
    fit = PrefillFit()
    for _ in range(200):
        new = draw.choice((50, 1000, 4000))
        others = [draw.choice((50, 1000, 4000)) for _ in range(draw.randint(1, 5))]
        ahead = Work(len(others), sum(others), sum(n * n for n in others))
        took = _seconds(new) + queueing * sum(_seconds(n) for n in others)
        fit.observe(Work.of(new, 0), ahead, begun=0.0, seconds=took * draw.gauss(1, 0.03))
    assert fit.queueing == expected
    assert _error(fit) < 0.15


def test_a_prompt_that_was_begun_waits_less_for_the_rest() -> None:
    draw = random.Random(9)
    fit = PrefillFit()
    for _ in range(100):
        new, head = draw.randint(10, 4000), draw.randint(10, 4000)
        begun = draw.random() * _seconds(head)
        fit.observe(Work.of(new, 0), Work.of(head, 0), begun=begun, seconds=_seconds(new) + _seconds(head) - begun)
    assert fit.queueing == 1.0
    assert _error(fit) < 0.1


def test_plain_answers_teach_it_too() -> None:
    """Only the end of the whole answer is seen: output tokens explain the rest."""
    draw = random.Random(10)
    fit = PrefillFit()
    for _ in range(200):
        new, output = draw.randint(10, 8000), draw.randint(1, 200)
        fit.observe(Work.of(new, 0), NOBODY, begun=0.0, seconds=_seconds(new) + 0.02 * output, output=output)
    assert fit.token_s == pytest.approx(0.02, rel=0.1)
    assert fit.model.seconds(4000) == pytest.approx(_seconds(4000), rel=0.15)


def test_decode_steps_are_learned() -> None:
    draw = random.Random(11)
    fit = DecodeFit()
    for _ in range(200):
        rows = draw.randint(1, 60)
        fit.observe(rows, 500 * rows, (0.02 + 0.0005 * rows) * draw.gauss(1, 0.03))
    assert fit.model.step(10, 5000) == pytest.approx(0.025, rel=0.1)
    assert fit.model.step(60, 30_000) == pytest.approx(0.05, rel=0.1)


MEASURED = st.floats(0, 1e6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7), MEASURED, MEASURED), max_size=60))
def test_no_history_makes_it_predict_nonsense(history: list[tuple[int, int, float, float]]) -> None:
    fit = PrefillFit()
    for new, cached, begun, took in history:
        fit.observe(Work.of(new, cached), Work.of(cached, new), begun=begun, seconds=took)
        for kind in ((1, 0), (1000, 0), (1000, 100_000), (10**7, 0)):
            assert 0 <= fit.model.seconds(*kind) < float("inf")


def test_uncertainty_stays_bounded_when_nothing_varies() -> None:
    """The same prompt a million times over must not blow up what it knows of other prompts."""
    fit = LeastSquares((0.0, 0.1), (1.0, 1.0))
    for _ in range(20_000):
        fit.observe((1.0, 0.5), 0.3)
    assert all(abs(value) < 10 for row in fit._cov for value in row)
    assert fit.predict((1.0, 0.5)) == pytest.approx(0.3)
