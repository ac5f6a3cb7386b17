"""From the records of a run to its figures: throughput, latencies, cache, goodput, the client's own state. Pure.

Only complete answers count in tokens, latencies and throughput; failed requests are counted by kind, and as missing every objective.
Percentiles interpolate linearly between the two nearest values. A figure that was not measured is None. Called by `bench_serving`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark.timeline import Record

__all__ = ["Slo", "summarize"]


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives of one request; None: no such objective."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met(self, record: Record) -> bool:
        """A complete answer within every objective; an answer of one token has no time per later token to miss."""
        if record.failure is not None:
            return False
        return _within(record.ttft, self.ttft_ms) and _within(record.tpot, self.tpot_ms)


def summarize(records: Sequence[Record], slo: Slo) -> dict[str, Any]:
    """All figures under SGLang's names where it has them."""
    good = [record for record in records if record.failure is None]
    duration = max(max(record.end for record in records) - min(record.due for record in records), 1e-9)
    prompt, completion = sum(record.prompt_tokens for record in good), sum(record.completion_tokens for record in good)
    figures: dict[str, Any] = {
        "requests": len(records),
        "completed": len(good),
        "failed": len(records) - len(good),
        "errors": dict(Counter(record.failure.kind for record in records if record.failure is not None).most_common()),
        "duration": duration,
        "total_input_tokens": prompt,
        "total_output_tokens": completion,
        "request_throughput": len(good) / duration,
        "input_throughput": prompt / duration,
        "output_throughput": completion / duration,
        "total_throughput": (prompt + completion) / duration,
        "concurrency": sum(record.e2e for record in good) / duration,
        **_cache(good),
        **_latencies("e2e_latency", (record.e2e for record in good)),
        **_latencies("ttft", (record.ttft for record in good)),
        **_latencies("tpot", (record.tpot for record in good)),
        **_latencies("itl", (gap for record in good for gap in record.itls)),
        **_latencies("send_lag", (record.lag for record in records)),
        **_latencies("held", (record.held for record in records)),
        "tokens_per_chunk": _ratio(sum(record.completion_tokens for record in good), sum(len(record.times) for record in good)),
        "short_answers": sum(record.completion_tokens < record.asked_output for record in good),
        "uncounted_answers": sum(not record.counted_by_server for record in good),
    }
    if slo:
        met = sum(slo.met(record) for record in records)
        figures |= {"goodput": met / duration, "slo_attainment": met / len(records), "slo_ttft_ms": slo.ttft_ms, "slo_tpot_ms": slo.tpot_ms}
    if any(record.session is not None for record in records):
        figures["rounds"] = [_round(records, turn) for turn in sorted({record.turn for record in records})]
    return figures


def _within(value: float | None, limit_ms: float | None) -> bool:
    return limit_ms is None or value is None or value * 1000 <= limit_ms


def _cache(good: Sequence[Record]) -> dict[str, Any]:
    """The server's own report; the rate is over the prompts of those answers that have one."""
    told = [(record.cached_tokens, record.prompt_tokens) for record in good if record.cached_tokens is not None]
    cached, prompt = sum(tokens for tokens, _ in told), sum(tokens for _, tokens in told)
    return {"total_cached_tokens": cached if told else None, "cache_hit_rate": _ratio(cached, prompt)}


def _latencies(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    """Milliseconds: mean, median, std, p90, p95, p99, max."""
    values = np.array([value for value in seconds if value is not None]) * 1000
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p90", "p95", "p99", "max")]
    if not values.size:
        return dict.fromkeys(keys)
    p50, p90, p95, p99 = np.percentile(values, [50, 90, 95, 99])
    return dict(zip(keys, map(float, (values.mean(), p50, values.std(), p90, p95, p99, values.max()))))


def _round(records: Sequence[Record], turn: int) -> dict[str, Any]:
    good = [record for record in records if record.turn == turn and record.failure is None]
    return {
        "round": turn + 1,
        "completed": len(good),
        "mean_input_tokens": _ratio(sum(record.prompt_tokens for record in good), len(good)),
        "cache_hit_rate": _cache(good)["cache_hit_rate"],
        **_latencies("ttft", (record.ttft for record in good)),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
