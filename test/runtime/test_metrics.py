"""`/metrics` text: names, types, and values that follow the state."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from radixpd.core.load import LoadSnapshot
from radixpd.runtime.metrics import Metrics, View

NAMES = [
    "num_running_reqs",
    "num_queue_reqs",
    "num_used_tokens",
    "token_usage",
    "max_total_num_tokens",
    "cache_hit_rate",
    "gen_throughput",
    "num_retracted_requests_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "evicted_tokens_total",
    "num_requests_total",
    "num_aborted_requests_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "pages",
]


def values(metrics):
    return {
        (sample.name, sample.labels.get("owner")): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_every_name_is_there_and_every_value_is_the_states_now() -> None:
    state = LoadSnapshot(
        running=3, waiting=2, pages=10, free_pages=4, tree_pages=1, request_pages=5, prompt_tokens_total=8, cached_tokens_total=2
    )
    metrics = Metrics(lambda: View(state, 7.5), model="m")
    found = values(metrics)
    assert {f"radixpd:{name}" for name in NAMES} <= {name for name, _ in found}
    assert found["radixpd:num_running_reqs", None] == 3
    assert found["radixpd:num_used_tokens", None] == 80
    assert found["radixpd:token_usage", None] == 0.5
    assert found["radixpd:cache_hit_rate", None] == 0.25
    assert found["radixpd:gen_throughput", None] == 7.5
    assert [found["radixpd:pages", owner] for owner in ("free", "tree", "request")] == [4, 1, 5]
    state = LoadSnapshot()
    assert values(metrics)["radixpd:num_running_reqs", None] == 0


def test_latencies_are_counted_per_token() -> None:
    metrics = Metrics(lambda: View(LoadSnapshot(), 0.0), model="m")
    metrics.first_token(0.2)
    metrics.next_tokens(0.3, 3)
    metrics.ended(1.0)
    found = values(metrics)
    assert found["radixpd:inter_token_latency_seconds_count", None] == 3
    assert abs(found["radixpd:inter_token_latency_seconds_sum", None] - 0.3) < 1e-9
    assert found["radixpd:time_to_first_token_seconds_count", None] == found["radixpd:e2e_request_latency_seconds_count", None] == 1
