"""Early rejection: the decode load that counts is the one to come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.mini_lb.admission import HEADROOM, Decoding, Slo, broken
from radixpd.mini_lb.snapshot import Candidate, DecodeModel

STEP = DecodeModel(base=0.02, per_row=0.001)  # 30 rows: 50 ms
SLO = Slo(ttft_s=10.0, tpot_s=0.05)
MOST_ROWS = int((HEADROOM * SLO.tpot_s - STEP.base) / STEP.per_row) - 1
SOON = Candidate("w", 0.0, queue_s=0.1, prefill_s=0.4)
LATE = Candidate("w", 0.0, queue_s=6.0, prefill_s=1.0)


def _decoding(*starts: float, lasts_s: float = 10.0) -> Decoding:
    return Decoding(STEP, starts, lasts_s)


def test_a_long_wait_for_the_first_token_is_refused_with_its_figures() -> None:
    slow = Candidate("w", 0.0, queue_s=8.0, prefill_s=2.5)
    assert str(broken(slow, _decoding(), SLO, 0.0)) == "the first token would take 10.500 s, more than 0.9 of the limit of 10.000 s"
    assert broken(LATE, _decoding(), SLO, 0.0) is None
    assert broken(slow, _decoding(), Slo(), 0.0) is None


def test_a_full_decode_batch_is_refused() -> None:
    running = [-1.0] * MOST_ROWS
    assert broken(SOON, _decoding(*running), SLO, 0.0) is None
    reason = broken(SOON, _decoding(*running, -1.0, -1.0), SLO, 0.0)
    assert reason is not None
    assert str(reason).endswith("the limit of 50.00 ms")


def test_requests_whose_prefill_ends_first_count_though_they_do_not_decode_yet() -> None:
    """Judged by the load of now, decode looks idle; all of these will be there when this one is."""
    coming = [1.0 + i / 10 for i in range(2 * MOST_ROWS)]
    assert broken(LATE, _decoding(*coming), SLO, 0.0, predict=False) is None
    assert broken(LATE, _decoding(*coming), SLO, 0.0) is not None


def test_requests_that_come_later_do_not_count() -> None:
    later = [20.0] * (3 * MOST_ROWS)
    assert broken(LATE, _decoding(*later), SLO, 0.0) is None


def test_those_that_will_be_through_are_dropped_by_their_chance() -> None:
    decoding = _decoding(*[0.0] * 30)
    assert decoding.rows(0.0, 0.0) == 30
    assert decoding.rows(10.0, 0.0) == pytest.approx(30 / 2.71828, rel=1e-3)
    assert _decoding(-100.0).rows(0.0, 0.0) == 1  # it has outlived the mean, but it is there


def test_an_idle_worker_is_never_refused() -> None:
    """Estimates may be wrong; if nobody were let in, nobody would ever find out."""
    slow = Candidate("w", 0.0, prefill_s=100.0)
    assert broken(slow, Decoding(DecodeModel(base=9.0), (), 10.0), SLO, 0.0) is None


@settings(deadline=None)
@given(st.lists(st.floats(-50, 50), max_size=40), st.floats(0, 50), st.floats(0.1, 100))
def test_predicted_rows_are_never_more_than_there_are_requests(starts: list[float], at: float, lasts_s: float) -> None:
    rows = _decoding(*starts, lasts_s=lasts_s).rows(at, 0.0)
    assert 0 <= rows <= len([start for start in starts if start <= at])
