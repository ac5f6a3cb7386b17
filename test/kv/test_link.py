"""The link: exact pace on a clock of our own, nothing saved up while idle, lateness made good."""

from __future__ import annotations

import math

import pytest

from radixpd.kv.link import GRAIN, LATE, Link


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_without_a_limit_everything_goes_at_once(clock):
    link = Link(0.0, clock)
    assert link.piece(1 << 20) == 1 << 20
    assert [link.carry(1 << 30) for _ in range(3)] == [100.0] * 3


def test_each_piece_has_crossed_after_the_one_before(clock):
    link = Link(8.0, clock)  # 10^9 bytes a second
    assert link.carry(500_000_000) == pytest.approx(100.5)
    assert link.carry(250_000_000) == pytest.approx(100.75)


def test_a_late_caller_catches_up_but_not_without_bound(clock):
    link = Link(8.0, clock)
    assert link.carry(1_000_000) == pytest.approx(100.001)
    clock.now = 100.004
    assert link.carry(1_000_000) == pytest.approx(100.002)
    clock.now = 200.0
    assert link.carry(1_000_000) == pytest.approx(200.0 - LATE + 0.001)


def test_an_idle_link_saves_nothing_up(clock):
    link = Link(8.0, clock)
    link.carry(1_000_000)
    link.rest()
    clock.now = 100.01
    assert link.carry(1_000_000) == pytest.approx(100.011)


def test_rest_does_not_make_a_busy_link_free(clock):
    link = Link(8.0, clock)
    link.carry(1_000_000_000)
    link.rest()
    assert link.carry(1_000_000_000) == pytest.approx(102.0)


@pytest.mark.parametrize(("gbps", "size"), [(25, 3_125_000), (0.001, 125), (1e-9, 1), (1e6, 4 << 20)])
def test_a_piece_is_a_grain_of_link_time(clock, gbps, size):
    assert Link(gbps, clock).piece(4 << 20) == size


@pytest.mark.parametrize("gbps", [1, 25, 400])
@pytest.mark.parametrize("step", [0.0001, 0.001, 0.003])
def test_over_a_stretch_of_work_the_rate_is_kept_whatever_the_timer(clock, gbps, step):
    link, sent, total = Link(gbps, clock), 0, int(gbps * 1e9 / 8)  # one second's worth
    due = None
    while sent < total:
        if due is None:
            size = min(total - sent, link.piece(2 << 20))
            due = link.carry(size)
        if due <= clock.now:
            sent, due = sent + size, None
        else:
            clock.now += step
        assert sent <= (clock.now - 100.0) * link.rate + 1
    assert clock.now - 100.0 == pytest.approx(1.0, abs=0.001 + step + GRAIN)


@pytest.mark.parametrize("gbps", [-1, math.nan, math.inf])
def test_senseless_rates_name_the_flag(gbps):
    with pytest.raises(ValueError, match="--disaggregation-link-gbps"):
        Link(gbps)
