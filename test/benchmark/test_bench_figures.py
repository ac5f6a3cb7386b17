"""Figures of a run, on made-up timelines whose sums can be done by hand."""

from __future__ import annotations

import pytest
from bench_fakes import answered, failed

from benchmark.figures import Slo, summarize
from benchmark.timeline import Record

NO_SLO = Slo()


def test_throughput_counts_complete_answers_over_the_whole_run() -> None:
    records = [answered(0.0, 1.0, 2.0, prompt=30), answered(1.0, 3.0, 4.0, prompt=10), failed(1.0, 5.0, "HTTP 503", prompt_tokens=99)]
    figures = summarize(records, NO_SLO)
    assert (figures["requests"], figures["completed"], figures["failed"]) == (3, 2, 1)
    assert figures["duration"] == 5.0  # the failed one kept the run going
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (40, 4)
    assert figures["request_throughput"] == pytest.approx(2 / 5)
    assert figures["input_throughput"] == pytest.approx(40 / 5)
    assert figures["output_throughput"] == pytest.approx(4 / 5)
    assert figures["total_throughput"] == pytest.approx(44 / 5)
    assert figures["concurrency"] == pytest.approx((2 + 3) / 5)


def test_a_run_begins_when_the_first_request_is_due() -> None:
    late = answered(0.5, 1.0, due=0.0, started=0.5)
    assert summarize([late], NO_SLO)["duration"] == 1.0
    assert summarize([late], NO_SLO)["max_send_lag_ms"] == pytest.approx(500)


def test_percentiles_interpolate() -> None:
    figures = summarize([answered(0.0, ttft) for ttft in (0.1, 0.2, 0.3, 0.4)], NO_SLO)
    assert figures["mean_ttft_ms"] == pytest.approx(250)
    assert figures["median_ttft_ms"] == pytest.approx(250)
    assert figures["p99_ttft_ms"] == pytest.approx(397)
    assert figures["max_ttft_ms"] == pytest.approx(400)
    assert figures["std_ttft_ms"] == pytest.approx(111.803, abs=1e-3)


def test_failed_requests_are_counted_by_kind_and_stay_out_of_latencies() -> None:
    records = [answered(0.0, 1.0), failed(0.0, 99.0, "HTTP 503"), failed(0.0, 99.0, "HTTP 503"), failed(0.0, 99.0, "connection lost")]
    figures = summarize(records, NO_SLO)
    assert figures["errors"] == {"HTTP 503": 2, "connection lost": 1}
    assert figures["max_e2e_latency_ms"] == pytest.approx(1000)


def test_nothing_answered_gives_figures_without_latencies() -> None:
    figures = summarize([failed(0.0, 1.0, "cannot connect")], Slo(ttft_ms=1))
    assert (figures["completed"], figures["mean_ttft_ms"], figures["cache_hit_rate"], figures["goodput"]) == (0, None, None, 0)


def test_the_hit_rate_is_over_the_answers_that_tell() -> None:
    records = [
        answered(0.0, 1.0, prompt=100, cached=64),
        answered(0.0, 1.0, prompt=60, cached=16),
        answered(0.0, 1.0, prompt=999, cached=None),
    ]
    figures = summarize(records, NO_SLO)
    assert (figures["total_cached_tokens"], figures["cache_hit_rate"]) == (80, 0.5)
    silent = summarize([answered(0.0, 1.0, cached=None)], NO_SLO)
    assert (silent["total_cached_tokens"], silent["cache_hit_rate"]) == (None, None)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(ttft_ms=500), 3),
        (Slo(tpot_ms=100), 3),
        (Slo(ttft_ms=500, tpot_ms=100), 2),
        (Slo(ttft_ms=499), 1),
        (Slo(ttft_ms=10_000, tpot_ms=10_000), 4),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(slo: Slo, met: int) -> None:
    records = [
        answered(0.0, 0.5, 0.6, end=0.6),  # on both limits
        answered(0.0, 0.25, 1.25),  # slow later tokens
        answered(0.0, 2.0, 2.05, end=2.05),  # slow first token
        answered(0.0, 0.5, completion_tokens=1),  # one token: no later token is late
        failed(0.0, 4.0, "HTTP 503"),  # no answer meets nothing
    ]
    figures = summarize(records, slo)
    assert figures["goodput"] == pytest.approx(met / 4.0)
    assert figures["slo_attainment"] == pytest.approx(met / 5)


def test_without_objectives_there_is_no_goodput() -> None:
    assert "goodput" not in summarize([answered(0.0, 1.0)], NO_SLO)


def test_rounds_of_conversations_are_told_apart() -> None:
    records = [
        answered(0.0, 1.0, prompt=100, cached=0, session=0, turn=0),
        answered(0.0, 3.0, prompt=100, cached=0, session=1, turn=0),
        answered(4.0, 4.5, prompt=200, cached=150, session=0, turn=1),
        failed(4.0, 5.0, "HTTP 500", session=1, turn=1),
    ]
    first, second = summarize(records, NO_SLO)["rounds"]
    assert (first["round"], first["completed"], first["cache_hit_rate"], first["mean_ttft_ms"]) == (1, 2, 0.0, 2000.0)
    assert (second["round"], second["completed"], second["cache_hit_rate"], second["mean_ttft_ms"]) == (2, 1, 0.75, 500.0)


def test_tokens_per_chunk_shows_that_gaps_are_those_of_chunks() -> None:
    assert summarize([answered(0.0, 1.0, 2.0, completion_tokens=6)], NO_SLO)["tokens_per_chunk"] == 3
    assert summarize([Record(sent=0.0, end=1.0, streamed=False, completion_tokens=6)], NO_SLO)["tokens_per_chunk"] is None
