"""The measured speed of a link: from confirmation to confirmation, idle time and single pieces aside, and never the codec's own speed."""

from __future__ import annotations

import pytest

from radixpd.kv.link_speed import DOUBTED, KEPT, LinkSpeed

MEGA = 1e6


def carry(speed, count, *, size, seconds, start=100.0, overlap=True, limit=float("inf")):
    """`count` pieces one after the other, each taken before (or after) the one before it is confirmed; when the last one is."""
    now = start
    for _ in range(count):
        taken = now - seconds / 2 if overlap else now
        now += seconds
        speed.confirmed(size, now, taken=taken if overlap else now - seconds / 4, limit=limit)
    return now


def test_nothing_is_known_at_first_nor_from_one_piece():
    speed = LinkSpeed()
    assert speed.now is None
    speed.confirmed(10 << 20, 100.0, taken=99.0)
    assert speed.now is None


def test_the_speed_of_a_busy_link():
    speed = LinkSpeed()
    carry(speed, 40, size=12_500, seconds=0.001)  # 100 Mbit/s in pieces of a millisecond
    assert speed.now == pytest.approx(12.5 * MEGA)


def test_large_pieces_count_however_fast_they_come():
    speed = LinkSpeed()
    carry(speed, 3, size=2_000_000, seconds=0.0005)
    assert speed.now == pytest.approx(4000 * MEGA)


def test_pieces_that_come_about_one_by_one_say_nothing_of_the_link():
    speed = LinkSpeed()
    carry(speed, 1000, size=50_000, seconds=0.01, overlap=False)
    assert speed.now is None


def test_idle_time_does_not_count():
    speed = LinkSpeed()
    now = 100.0
    for _ in range(10):
        now = carry(speed, 40, size=12_500, seconds=0.001, start=now + 60)
    assert speed.now == pytest.approx(12.5 * MEGA, rel=0.05)


def test_small_pieces_at_once_show_what_a_frame_costs():
    speed = LinkSpeed()
    carry(speed, 400, size=20_000, seconds=0.0002)
    assert speed.now is None


def test_a_link_that_becomes_slower_is_seen_after_a_few_samples():
    speed = LinkSpeed()
    now = carry(speed, 20, size=2_000_000, seconds=0.01)
    carry(speed, KEPT, size=2_000_000, seconds=0.1, start=now)
    assert speed.now == pytest.approx(20 * MEGA)


def test_the_speed_of_a_codec_is_not_taken_for_the_links():
    """A codec that feeds 300 MB/s to a link says nothing of a link that could take more; in the end nothing is known any more."""
    speed = LinkSpeed()
    now = carry(speed, 3, size=1_000_000, seconds=0.01)
    for _ in range(DOUBTED - 2):
        now = carry(speed, 1, size=1_000_000, seconds=1 / 300, start=now, limit=250 * MEGA)
        assert speed.now == pytest.approx(100 * MEGA)
    carry(speed, 2, size=1_000_000, seconds=1 / 300, start=now, limit=250 * MEGA)
    assert speed.now is None


def test_a_coded_send_over_a_slow_link_counts():
    speed = LinkSpeed()
    carry(speed, 20, size=300_000, seconds=0.1, limit=250 * MEGA)
    assert speed.now == pytest.approx(3 * MEGA)
