"""`/metrics` of the load balancer: gauges and counts are read from the fleet and the gate when asked; only latencies are collected.

Names start with `radixpd_lb_`; docs/load_balancer.md explains each, and a test compares the two. Invariant: labels are routes, workers of
the fleet and words of ours, never what a client made up. Called by the proxy and the application.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixpd.mini_lb.breaker import State
from radixpd.mini_lb.fleet import Fleet
from radixpd.mini_lb.gate import Gate
from radixpd.mini_lb.request_log import RequestLog

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "radixpd_lb_"
LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
WORKER = ("worker", "role")

disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _StateCollector(Collector):
    """What the fleet and the gate are now."""

    fleet: Fleet
    gate: Gate
    log: RequestLog

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(PREFIX + "num_running_reqs", "Requests at the workers", self.gate.open)
        yield GaugeMetricFamily(PREFIX + "num_queue_reqs", "Requests that wait for a place", self.gate.waiting)
        rejected = CounterMetricFamily(PREFIX + "rejected", "Requests that got no place", labels=("reason",))
        for reason, count in self.gate.rejected.items():
            rejected.add_metric((reason,), count)
        yield rejected
        yield CounterMetricFamily(PREFIX + "request_log_lost", "Lines that the request log has lost", self.log.lost)
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        now = time.monotonic()
        up = GaugeMetricFamily(PREFIX + "worker_up", "Whether a worker gets requests", labels=WORKER)
        running = GaugeMetricFamily(PREFIX + "worker_num_running_reqs", "Requests of ours at a worker", labels=WORKER)
        known = GaugeMetricFamily(PREFIX + "worker_cache_known", "Whether a worker's KV events are heard", labels=WORKER)
        circuit = GaugeMetricFamily(PREFIX + "worker_circuit", "A worker's circuit: 0 closed, 1 half-open, 2 open", labels=WORKER)
        changes = CounterMetricFamily(PREFIX + "worker_circuit_transitions", "Changes of a worker's circuit", labels=WORKER)
        restarts = CounterMetricFamily(PREFIX + "worker_restarts", "Times that a worker was seen as a new process", labels=WORKER)
        legs = CounterMetricFamily(
            PREFIX + "worker_requests", "Requests that a worker ended, by what it tells", labels=(*WORKER, "outcome")
        )
        for worker in self.fleet:
            labels = (worker.name, worker.spec.role)
            up.add_metric(labels, worker.usable(now))
            running.add_metric(labels, worker.open)
            known.add_metric(labels, worker.hears())
            circuit.add_metric(labels, (State.CLOSED, State.HALF_OPEN, State.OPEN).index(worker.breaker.state(now)))
            changes.add_metric(labels, worker.breaker.transitions)
            restarts.add_metric(labels, worker.incarnation - 1)
            for outcome, count in worker.outcomes.items():
                legs.add_metric((*labels, outcome), count)
        yield from (up, running, known, circuit, changes, restarts, legs)


class Metrics:
    """The registry of one load balancer."""

    def __init__(self, fleet: Fleet, gate: Gate, log: RequestLog) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StateCollector(fleet, gate, log))
        self._first = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "From arrival to the first generated text of a stream",
            buckets=LATENCIES,
            registry=self._registry,
        )
        self._whole = Histogram(
            PREFIX + "e2e_request_latency_seconds", "From arrival to the end of an answer", buckets=LATENCIES, registry=self._registry
        )
        self._retries = Counter(PREFIX + "retries", "Tries after the first", ("reason",), registry=self._registry)
        self._answers = Counter(
            PREFIX + "http_requests", "HTTP requests that were answered", ("route", "method", "status"), registry=self._registry
        )

    def first_token(self, seconds: float) -> None:
        """A stream has begun to tell generated text."""
        self._first.observe(seconds)

    def ended(self, seconds: float) -> None:
        """A generation has been answered well."""
        self._whole.observe(seconds)

    def retried(self, reason: str) -> None:
        """A request is tried again: `unreached`, `broken` or `status`."""
        self._retries.labels(reason).inc()

    def answered(self, route: str, method: str, status: int) -> None:
        """One HTTP request was answered; `route` is the route's pattern."""
        self._answers.labels(route, method, str(status)).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
