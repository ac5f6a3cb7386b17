"""What one worker's line learns, and how often."""

from __future__ import annotations

from radixpd.mini_lb.fit import Work
from radixpd.mini_lb.ledger import LESSON_S, LESSONS, Entry, Line
from radixpd.mini_lb.speed import Fits

EVERY_S = 0.001  # a request of its own at a time


def _serve(line: Line, count: int, start: float, token_s: float) -> float:
    """So many streams one after the other; when the last one ended."""
    now = start
    for number in range(count):
        entry = Entry(now, new=200 + 100 * (number % 5), cached=0, output=1)
        line.open(entry)
        line.first_token(entry, now + token_s * entry.new, 0)
        now += max(EVERY_S, token_s * entry.new)
        line.close(entry, now, 1)
    return now


def test_a_worker_that_answers_a_thousand_times_a_second_is_learned_from_a_hundred_times() -> None:
    common = Fits()
    line = Line(common)
    begun = _serve(line, LESSONS, 0.0, 1e-6)
    assert common.prefill.seen == LESSONS
    ended = _serve(line, 3000, begun, 1e-6)
    assert 0.5 * (ended - begun) / LESSON_S < common.prefill.seen - LESSONS <= (ended - begun) / LESSON_S + 1


def test_a_worker_that_slows_down_under_such_load_is_noticed() -> None:
    line = Line(Fits())
    now = _serve(line, LESSONS + 1000, 0.0, 1e-6)
    before = line.speed.prefill.seconds(Work.of(400, 0))
    _serve(line, 3000, now, 4e-6)
    assert line.speed.prefill.seconds(Work.of(400, 0)) > 2 * before
