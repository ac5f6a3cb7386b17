"""`/metrics`: Prometheus text computed from state.

Gauges and the brain's totals are read from the scheduler's latest `LoadSnapshot` at the moment of the scrape; nothing is counted up and
down here, so nothing can drift. What happens in the API process (latencies, HTTP answers) is collected as it happens and only grows. Names
are SGLang's after the prefix `radixpd:`; docs/operations.md explains each one, and a test compares the two. Called by the API process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixpd.core.journey import Journey
from radixpd.core.load import LoadSnapshot
from radixpd.runtime.output import Output

__all__ = ["CONTENT_TYPE", "Metrics", "View"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "radixpd:"
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
WAIT_BUCKETS = (0.001, 0.005, *LATENCY_BUCKETS)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 4, 8)
LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
COUNT_BUCKETS = (0, 1, 2, 3, 5, 10, 20)
MS_BUCKETS = (0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 120_000)
MB_BUCKETS = (0.01, 0.1, 1, 4, 16, 64, 256, 1024, 4096, 16_384)
GB_S_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)

# A second series beside each of ours, saying when its first sample came: nobody reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class View:
    """What a scrape sees. The times of the start are None until they are known."""

    load: LoadSnapshot
    throughput: float  # generated tokens a second
    startup_seconds: float | None = None
    weights_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    help: str
    value: Callable[[View], float | None]


GAUGES = (
    _Row("num_running_reqs", "Requests that hold a slot", lambda v: v.load.running),
    _Row("num_queue_reqs", "Requests that wait", lambda v: v.load.waiting),
    _Row("num_grammar_queue_reqs", "Requests whose grammar is being compiled", lambda v: v.load.grammar_queue),
    _Row("num_retracted_reqs", "Of those, requests that ran before and gave their pages back", lambda v: v.load.retracted),
    _Row("num_paused_reqs", "Requests that /pause_generation holds up", lambda v: v.load.held),
    _Row("max_running_requests", "Slots", lambda v: v.load.max_running),
    _Row(
        "num_prefill_prealloc_queue_reqs", "On a prefill server: no decode server has pages for it yet", lambda v: v.load.prefill_prealloc
    ),
    _Row("num_prefill_inflight_queue_reqs", "On a prefill server: computed, their last pages leave", lambda v: v.load.prefill_inflight),
    _Row("num_decode_prealloc_queue_reqs", "On a decode server: rooms without pages", lambda v: v.load.decode_prealloc),
    _Row("num_decode_transfer_queue_reqs", "On a decode server: first token or KV is still to come", lambda v: v.load.decode_transfer),
    _Row("num_used_tokens", "Tokens of KV pages that a request owns or locks, or in quarantine", lambda v: v.load.used_tokens),
    _Row("max_total_num_tokens", "Tokens that the KV pool holds", lambda v: v.load.pages * v.load.page_size),
    _Row("token_usage", "Share of the KV pool that is used", lambda v: v.load.token_usage),
    _Row("utilization", "The larger one of token_usage and the share of slots in use", lambda v: v.load.utilization),
    _Row("cache_hit_rate", "Share of all prompt tokens that came from the cache", lambda v: v.load.hit_rate),
    _Row("gen_throughput", "Generated tokens a second, over the last seconds", lambda v: v.throughput),
    _Row("new_token_ratio", "Share of the asked output that admission reserves", lambda v: v.load.new_token_ratio),
    _Row("engine_startup_time", "Seconds from the command to the first request that could be served", lambda v: v.startup_seconds),
    _Row("engine_load_weights_time", "Seconds that the runner took to load weights and touch its pool", lambda v: v.weights_seconds),
)
TOTALS = (
    _Row("prompt_tokens", "Prompt tokens of requests that were planned", lambda v: v.load.prompt_tokens_total),
    _Row("cached_tokens", "Of those, tokens that came from the cache", lambda v: v.load.cached_tokens_total),
    _Row("generation_tokens", "Tokens that were generated", lambda v: v.load.generated_tokens_total),
    _Row("evicted_tokens", "Tokens that left the cache for want of pages", lambda v: v.load.evicted_tokens_total),
    _Row("num_retracted_requests", "Times that a running request went back to the queue", lambda v: v.load.retractions_total),
    _Row("num_retracted_input_tokens", "Prompt tokens of the requests that were retracted", lambda v: v.load.retracted_input_tokens_total),
    _Row(
        "num_retracted_output_tokens", "Output tokens of the requests that were retracted", lambda v: v.load.retracted_output_tokens_total
    ),
    _Row("num_requests", "Requests that have ended", lambda v: v.load.finished_total),
    _Row("num_aborted_requests", "Of those, requests that ended by an abort", lambda v: v.load.aborted_total),
    _Row("num_bootstrap_failed_reqs", "Handoffs that failed before a page could be sent", lambda v: v.load.bootstrap_failed_total),
    _Row("num_transfer_failed_reqs", "Handoffs that failed later", lambda v: v.load.transfer_failed_total),
    _Row("num_fallback_reqs", "Prompts that a decode server computed for want of its prefill server", lambda v: v.load.fallbacks_total),
    _Row("kv_transfer_pages", "KV pages that a prefill server has sent", lambda v: v.load.sent_pages_total),
    _Row("num_steps", "Steps that were planned", lambda v: v.load.steps_total),
    _Row("execution_seconds", "Seconds that the runner spent on steps", lambda v: v.load.execution_seconds_total),
)


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric with a sample for each value of one label."""

    name: str
    help: str
    label: str
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    values: Callable[[LoadSnapshot], dict[str, float]]


FAMILIES = (
    _Family(
        "pages",
        "KV pages by owner",
        "owner",
        GaugeMetricFamily,
        lambda load: {
            "free": load.free_pages,
            "tree": load.tree_pages,
            "request": load.request_pages,
            "quarantine": load.quarantine_pages,
        },
    ),
    _Family(
        "kv_transfer_bytes",
        "KV that a decode server has received: as it lies in its pages, and as it was on the wire",
        "kind",
        CounterMetricFamily,
        lambda load: {"raw": load.received_bytes_total, "wire": load.wire_bytes_total},
    ),
    _Family(
        "realtime_tokens",
        "Tokens by how they came to be, retracted work included",
        "mode",
        CounterMetricFamily,
        lambda load: {
            "prefill_compute": load.computed_tokens_total,
            "prefill_cache": load.cached_tokens_total,
            "decode": load.generated_tokens_total,
        },
    ),
)


class _StateCollector(Collector):
    """Computes every gauge and total when asked."""

    def __init__(self, view: Callable[[], View], model: str) -> None:
        self._view = view
        self._model = model

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        for rows, kind in ((GAUGES, GaugeMetricFamily), (TOTALS, CounterMetricFamily)):
            for row in rows:
                value = row.value(view)
                if value is not None:
                    metric = kind(PREFIX + row.name, row.help, labels=("model_name",))
                    metric.add_metric((self._model,), value)
                    yield metric
        for family in FAMILIES:
            metric = family.kind(PREFIX + family.name, family.help, labels=("model_name", family.label))
            for label, value in family.values(view.load).items():
                metric.add_metric((self._model, label), value)
            yield metric


class Metrics:
    """The registry of one server, and the observer of its outputs. `lengths`: also keep histograms of prompt and output lengths."""

    def __init__(self, view: Callable[[], View], *, model: str, lengths: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StateCollector(view, model))
        self._model = model
        self.startup_seconds: float | None = None  # set once, by whoever opens the server

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, help, ("model_name",), buckets=buckets, registry=self._registry)
            return made.labels(model)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token", LATENCY_BUCKETS)
        self._next = histogram("inter_token_latency_seconds", "Between tokens of one output", TOKEN_BUCKETS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end", LATENCY_BUCKETS)
        self._queue = histogram("queue_time_seconds", "From arrival to the first step that computes", WAIT_BUCKETS)
        self._retractions = histogram("num_retractions", "Retractions of one request", COUNT_BUCKETS)
        self._prompts = histogram("prompt_tokens_histogram", "Tokens of one prompt", LENGTH_BUCKETS) if lengths else None
        self._outputs = histogram("generation_tokens_histogram", "Tokens of one output", LENGTH_BUCKETS) if lengths else None
        self._bootstrap = histogram("kv_transfer_bootstrap_ms", "On a prefill server: until decode had reserved pages", MS_BUCKETS)
        self._alloc = histogram("kv_transfer_alloc_ms", "On a decode server: from arrival until it had pages", MS_BUCKETS)
        self._transfer = histogram("kv_transfer_latency_ms", "From the first page given to the mover to the last byte", MS_BUCKETS)
        self._visible = histogram("kv_transfer_visible_ms", "Of those, after the first token was known", MS_BUCKETS)
        self._sizes = histogram("kv_transfer_total_mb", "Megabytes of KV of one handoff, as they lie in the pages", MB_BUCKETS)
        self._speeds = histogram("kv_transfer_speed_gb_s", "These by the seconds of the transfer", GB_S_BUCKETS)
        self._stages = Histogram(
            PREFIX + "per_stage_req_latency_seconds",
            "Seconds of one request in one stage: tokenize, queue, prefill, decode",
            ("model_name", "stage"),
            buckets=WAIT_BUCKETS,
            registry=self._registry,
        )
        self._answers = Counter(
            PREFIX + "http_requests",
            "HTTP requests that were answered",
            ("model_name", "route", "method", "status"),
            registry=self._registry,
        )

    def first_token(self, output: Output) -> None:
        """See `output.Observer`."""
        self._first.observe(output.first - output.arrived)

    def next_tokens(self, seconds: float, count: int) -> None:
        """See `output.Observer`."""
        for _ in range(count):
            self._next.observe(seconds / count)

    def ended(self, output: Output) -> None:
        """See `output.Observer`."""
        self._whole.observe(output.ended - output.arrived)
        self._stage("tokenize", output.sent - output.arrived)
        if output.queued is not None:
            self._queue.observe(output.queued)
            self._stage("queue", output.queued - (output.sent - output.arrived))
            if output.first:
                self._stage("prefill", output.first - output.arrived - output.queued)
                self._stage("decode", output.last - output.first)
        if self._prompts is not None and self._outputs is not None:
            self._prompts.observe(len(output.prompt))
            self._outputs.observe(len(output.ids))

    def left(self, output: Output, retractions: int) -> None:
        """See `output.Observer`."""
        self._retractions.observe(retractions)
        if output.journey is not None and output.sample == 0:  # what crosses does so once for all samples
            self._handoff(output.journey)

    def _handoff(self, journey: Journey) -> None:
        if journey.reserve_ms or journey.pages_sent:
            (self._bootstrap if journey.leg == "prefill" else self._alloc).observe(journey.reserve_ms)
        if journey.transfer_ms:
            self._transfer.observe(journey.transfer_ms)
            self._visible.observe(journey.visible_transfer_ms)
        if journey.transfer_ms and journey.bytes_raw:
            self._sizes.observe(journey.bytes_raw / 1e6)
            self._speeds.observe(journey.bytes_raw / 1e6 / journey.transfer_ms)

    def answered(self, route: str, method: str, status: int) -> None:
        """One HTTP request was answered. `route` is the route's pattern, so that clients cannot make labels."""
        self._answers.labels(self._model, route, method, str(status)).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def _stage(self, stage: str, seconds: float) -> None:
        # Stamps of two processes: the difference may be a hair below zero.
        self._stages.labels(self._model, stage).observe(max(0.0, seconds))
