"""`/metrics`: Prometheus text computed from state.

Gauges and totals are read from the scheduler's latest `LoadSnapshot` at the moment of the scrape; nothing is counted up and down here, so
nothing can drift. Only latencies are collected as they happen. Names are SGLang's after the prefix `radixpd:`. Called by the API process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixpd.core.load import LoadSnapshot

__all__ = ["CONTENT_TYPE", "Metrics", "View"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "radixpd:"
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class View:
    """What a scrape sees."""

    load: LoadSnapshot
    throughput: float  # generated tokens a second


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    help: str
    value: Callable[[View], float]


GAUGES = (
    _Row("num_running_reqs", "Requests that hold a slot", lambda v: v.load.running),
    _Row("num_queue_reqs", "Requests that wait", lambda v: v.load.waiting),
    _Row("num_parked_reqs", "Requests that their role holds back", lambda v: v.load.parked),
    _Row("num_used_tokens", "Tokens of KV pages that a request owns or locks", lambda v: v.load.used_tokens),
    _Row(
        "token_usage",
        "Share of the KV pool that requests own or lock",
        lambda v: v.load.used_tokens / max(1, v.load.pages * v.load.page_size),
    ),
    _Row("max_total_num_tokens", "Tokens that the KV pool holds", lambda v: v.load.pages * v.load.page_size),
    _Row("max_running_requests", "Slots", lambda v: v.load.max_running),
    _Row("cache_hit_rate", "Share of all prompt tokens that came from the cache", lambda v: v.load.hit_rate),
    _Row("gen_throughput", "Generated tokens a second, over the last seconds", lambda v: v.throughput),
    _Row("new_token_ratio", "Share of the asked output that admission reserves", lambda v: v.load.new_token_ratio),
)
TOTALS = (
    _Row("prompt_tokens", "Prompt tokens of requests that were planned", lambda v: v.load.prompt_tokens_total),
    _Row("cached_tokens", "Prompt tokens that came from the cache", lambda v: v.load.cached_tokens_total),
    _Row("computed_tokens", "Prompt tokens that were computed", lambda v: v.load.computed_tokens_total),
    _Row("generation_tokens", "Tokens that were generated", lambda v: v.load.generated_tokens_total),
    _Row("evicted_tokens", "Tokens that left the cache for want of pages", lambda v: v.load.evicted_tokens_total),
    _Row("num_retracted_requests", "Times that a running request went back to the queue", lambda v: v.load.retractions_total),
    _Row("num_requests", "Requests that have ended", lambda v: v.load.finished_total),
    _Row("num_aborted_requests", "Requests that ended by an abort", lambda v: v.load.aborted_total),
    _Row("num_steps", "Steps that were planned", lambda v: v.load.steps_total),
)


class _StateCollector(Collector):
    """Computes every gauge and total when asked."""

    def __init__(self, view: Callable[[], View], model: str) -> None:
        self._view = view
        self._model = model

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        for row in GAUGES:
            gauge = GaugeMetricFamily(PREFIX + row.name, row.help, labels=("model_name",))
            gauge.add_metric((self._model,), row.value(view))
            yield gauge
        for row in TOTALS:
            total = CounterMetricFamily(PREFIX + row.name, row.help, labels=("model_name",))
            total.add_metric((self._model,), row.value(view))
            yield total
        yield self._pages(view.load)

    def _pages(self, load: LoadSnapshot) -> Metric:
        pages = GaugeMetricFamily(PREFIX + "pages", "KV pages by owner", labels=("model_name", "owner"))
        for owner, count in (("free", load.free_pages), ("tree", load.tree_pages), ("request", load.request_pages)):
            pages.add_metric((self._model, owner), count)
        return pages


class Metrics:
    """The registry of one server, and the observer of its outputs."""

    def __init__(self, view: Callable[[], View], *, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StateCollector(view, model))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, help, ("model_name",), buckets=buckets, registry=self._registry)
            return made.labels(model)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token", LATENCY_BUCKETS)
        self._next = histogram("inter_token_latency_seconds", "Between tokens of one output", TOKEN_BUCKETS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end", LATENCY_BUCKETS)

    def first_token(self, seconds: float) -> None:
        """See `output.Observer`."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """See `output.Observer`."""
        for _ in range(count):
            self._next.observe(seconds / count)

    def ended(self, seconds: float) -> None:
        """See `output.Observer`."""
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
