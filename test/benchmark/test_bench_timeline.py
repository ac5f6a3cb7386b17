"""Latencies of one request, on made-up timelines."""

from __future__ import annotations

import pytest
from bench_fakes import answered

from benchmark.timeline import Record


def test_latencies_of_a_plain_stream() -> None:
    record = answered(10.0, 10.5, 10.6, 10.9)
    assert record.ttft == pytest.approx(0.5)
    assert record.e2e == pytest.approx(0.9)
    assert record.tpot == pytest.approx(0.2)  # 0.4 s for the two tokens after the first
    assert record.itls == pytest.approx([0.1, 0.3])


def test_tokens_of_one_chunk_share_its_gap_and_each_counts() -> None:
    record = answered(0.0, 1.0, 1.6, 1.7, counts=[2, 3, 1])
    assert record.itls == pytest.approx([0.2, 0.2, 0.2, 0.1])
    assert record.tpot == pytest.approx(0.7 / 5)


def test_the_end_may_come_after_the_last_token() -> None:
    record = answered(0.0, 1.0, 2.0, end=3.0)
    assert (record.e2e, record.tpot, record.itls) == (3.0, 2.0, [1.0])


def test_latency_starts_at_sending_and_waits_before_it_are_told_apart() -> None:
    record = answered(2.0, 3.0, due=1.0, started=1.25)
    assert (record.lag, record.held, record.ttft) == (0.25, 0.75, 1.0)


def test_one_token_has_no_time_per_later_token() -> None:
    record = answered(0.0, 1.0)
    assert (record.ttft, record.tpot, record.itls) == (1.0, None, [])


def test_an_answer_without_visible_output_has_its_first_token_at_the_end() -> None:
    record = Record(sent=1.0, end=4.0, completion_tokens=1)
    assert (record.ttft, record.tpot) == (3.0, None)


def test_without_a_stream_only_the_whole_is_measured() -> None:
    record = Record(sent=1.0, end=4.0, completion_tokens=8, streamed=False)
    assert (record.e2e, record.ttft, record.tpot, record.itls) == (3.0, None, None, [])
