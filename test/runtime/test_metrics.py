"""`/metrics` text: names, types, and values that follow the state."""

from __future__ import annotations

import types

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixpd.core.journey import Journey
from radixpd.core.load import LoadSnapshot
from radixpd.runtime.metrics import Metrics, View


def values(metrics, label="owner"):
    return {
        (sample.name.removeprefix("radixpd:"), sample.labels.get(label)): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def output(**stamps):
    """Arrived at 100, left for the scheduler at 100.5, planned after 2 s, tokens from 103 to 109, ended at 110."""
    usual = {"arrived": 100.0, "sent": 100.5, "queued": 2.0, "first": 103.0, "last": 109.0, "ended": 110.0}
    return types.SimpleNamespace(prompt=np.arange(20), ids=[1, 2, 3], **{"journey": None, "sample": 0, **usual, **stamps})


def test_every_value_is_the_states_now() -> None:
    state = LoadSnapshot(
        running=3, waiting=2, retracted=1, pages=10, free_pages=4, tree_pages=1, request_pages=5, max_running=5, prompt_tokens_total=8,
        cached_tokens_total=2, computed_tokens_total=7, generated_tokens_total=9, retracted_output_tokens_total=4,
        quarantine_pages=2, prefill_prealloc=11, prefill_inflight=12, decode_prealloc=13, decode_transfer=14, bootstrap_failed_total=15,
        transfer_failed_total=16, fallbacks_total=17, sent_pages_total=18, received_bytes_total=19, wire_bytes_total=20,
    )  # fmt: skip
    metrics = Metrics(lambda: View(state, 7.5, startup_seconds=3.0), model="m")
    found = values(metrics)
    assert found["num_running_reqs", None] == 3
    assert found["num_retracted_reqs", None] == 1
    assert found["num_used_tokens", None] == 112, "nobody can use what is in quarantine"
    assert found["token_usage", None] == 0.7
    assert found["utilization", None] == 0.7
    assert found["cache_hit_rate", None] == 0.25
    assert found["gen_throughput", None] == 7.5
    assert found["num_retracted_output_tokens_total", None] == 4
    assert found["engine_startup_time", None] == 3
    assert ("engine_load_weights_time", None) not in found  # not known yet
    assert [found["pages", owner] for owner in ("free", "tree", "request", "quarantine")] == [4, 1, 5, 2]
    queues = ("prefill_prealloc", "prefill_inflight", "decode_prealloc", "decode_transfer")
    assert [found[f"num_{queue}_queue_reqs", None] for queue in queues] == [11, 12, 13, 14]
    failures = ("num_bootstrap_failed_reqs", "num_transfer_failed_reqs", "num_fallback_reqs", "kv_transfer_pages")
    assert [found[f"{name}_total", None] for name in failures] == [15, 16, 17, 18]
    moved = values(metrics, "kind")
    assert [moved["kv_transfer_bytes_total", kind] for kind in ("raw", "wire")] == [19, 20]
    tokens = values(metrics, "mode")
    assert [tokens["realtime_tokens_total", mode] for mode in ("prefill_compute", "prefill_cache", "decode")] == [7, 2, 9]
    state = LoadSnapshot()
    assert values(metrics)["num_running_reqs", None] == 0


def test_latencies_are_counted_per_token() -> None:
    metrics = Metrics(lambda: View(LoadSnapshot(), 0.0), model="m")
    metrics.first_token(output())
    metrics.next_tokens(0.3, 3)
    metrics.ended(output())
    metrics.left(output(), 2)
    found = values(metrics)
    assert found["inter_token_latency_seconds_count", None] == 3
    assert found["inter_token_latency_seconds_sum", None] == pytest.approx(0.3)
    assert found["time_to_first_token_seconds_sum", None] == 3
    assert found["e2e_request_latency_seconds_sum", None] == 10
    assert found["queue_time_seconds_sum", None] == 2
    assert found["num_retractions_sum", None] == 2


def test_stages_add_up_to_the_whole() -> None:
    metrics = Metrics(lambda: View(LoadSnapshot(), 0.0), model="m")
    metrics.ended(output(ended=109.0))
    found = values(metrics, "stage")
    stages = {stage: found["per_stage_req_latency_seconds_sum", stage] for stage in ("tokenize", "queue", "prefill", "decode")}
    assert stages == {"tokenize": 0.5, "queue": 1.5, "prefill": 1.0, "decode": 6.0}
    assert sum(stages.values()) == found["e2e_request_latency_seconds_sum", None]


def test_a_request_that_never_ran_has_no_later_stages() -> None:
    metrics = Metrics(lambda: View(LoadSnapshot(), 0.0), model="m")
    metrics.ended(output(queued=None, first=0.0, last=0.0))
    found = values(metrics, "stage")
    assert found["per_stage_req_latency_seconds_count", "tokenize"] == 1
    assert not {("per_stage_req_latency_seconds_count", stage) for stage in ("queue", "prefill", "decode")} & set(found)
    assert found["queue_time_seconds_count", None] == 0


def test_handoffs_are_measured_once_and_only_where_there_are_some() -> None:
    metrics = Metrics(lambda: View(LoadSnapshot(), 0.0), model="m")
    decode = {"leg": "decode", "reserve_ms": 3.0, "transfer_ms": 50.0, "visible_transfer_ms": 20.0, "pages_sent": 2, "bytes_raw": 4_000_000}
    for sample in (0, 1):
        metrics.left(output(sample=sample, journey=Journey(prompt_tokens=20, **decode)), 0)
    metrics.left(output(journey=Journey(prompt_tokens=20, local_computed_tokens=20)), 0)
    found = values(metrics)
    sums = {name: found[f"kv_transfer_{name}_sum", None] for name in ("alloc_ms", "latency_ms", "visible_ms", "total_mb", "speed_gb_s")}
    assert sums == {"alloc_ms": 3.0, "latency_ms": 50.0, "visible_ms": 20.0, "total_mb": 4.0, "speed_gb_s": 0.08}
    assert all(found[f"kv_transfer_{name}_count", None] == 1 for name in sums)
    assert found["kv_transfer_bootstrap_ms_count", None] == 0
    metrics.left(output(journey=Journey(prompt_tokens=20, leg="prefill", transfer_ms=60.0, pages_sent=2)), 0)
    found = values(metrics)
    assert (found["kv_transfer_bootstrap_ms_count", None], found["kv_transfer_latency_ms_count", None]) == (1, 2)
    assert found["kv_transfer_total_mb_count", None] == 1, "who receives counts the bytes"


def test_lengths_are_kept_only_when_asked() -> None:
    plain, asked = (Metrics(lambda: View(LoadSnapshot(), 0.0), model="m", lengths=lengths) for lengths in (False, True))
    for metrics in (plain, asked):
        metrics.ended(output())
    assert not any(name.endswith("_tokens_histogram_sum") for name, _ in values(plain))
    assert values(asked)["prompt_tokens_histogram_sum", None] == 20
    assert values(asked)["generation_tokens_histogram_sum", None] == 3


def test_http_answers_are_counted_by_route_and_status() -> None:
    metrics = Metrics(lambda: View(LoadSnapshot(), 0.0), model="m")
    for status in (200, 200, 400):
        metrics.answered("/generate", "POST", status)
    found = values(metrics, "status")
    assert [found["http_requests_total", status] for status in ("200", "400")] == [2, 1]


def test_nothing_but_what_is_documented_is_exposed() -> None:
    metrics = Metrics(lambda: View(LoadSnapshot(), 0.0), model="m")
    metrics.first_token(output())
    assert not [name for name, _ in values(metrics) if name.endswith("_created")]
