"""Figures for people: the result block, its warnings, the table of rounds; and for programs: one JSON line for each run.

Names in the block and in the line follow SGLang's, so that tables and scripts made for it go on working. A figure that was not measured is
left out of the block and null in the line. Called by `bench_serving`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmark.timeline import Record

__all__ = ["append_line", "block", "details", "warnings"]

WIDTH = 50
LATE_MS = 10.0  # a client later than this, at its 99th percentile, is worth a warning
LATE_SHARE = 0.05  # of the run, for a burst that is all due at once
COUNTS = (
    ("Backend:", "backend"),
    ("Traffic request rate:", "request_rate"),
    ("Max request concurrency:", "max_concurrency"),
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Total generated tokens (retokenized):", "total_output_tokens_retokenized"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Input token throughput (tok/s):", "input_throughput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Total token throughput (tok/s):", "total_throughput"),
    ("Concurrency:", "concurrency"),
    ("Cached tokens:", "total_cached_tokens"),
    ("Cached share of input tokens (%):", "cache_hit_rate"),
)
LATENCIES = (
    ("End-to-End Latency", "E2E Latency", "e2e_latency", ("mean", "median", "std", "p90", "p99")),
    ("Time to First Token", "TTFT", "ttft", ("mean", "median", "std", "p99")),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot", ("mean", "median", "std", "p99")),
    ("Inter-Token Latency", "ITL", "itl", ("mean", "median", "std", "p95", "p99", "max")),
)
CLIENT = (
    ("P99 send lag (ms):", "p99_send_lag_ms"),
    ("Max send lag (ms):", "max_send_lag_ms"),
    ("P99 event loop lag (ms):", "p99_loop_lag_ms"),
    ("CPU share of one core (%):", "client_cpu_share"),
)
SHARES = ("cache_hit_rate", "client_cpu_share", "slo_attainment")


def block(figures: Mapping[str, Any], examples: Mapping[str, str]) -> str:
    """The "Serving Benchmark Result". `examples`: a detail for kinds of failure."""
    lines = ["", " Serving Benchmark Result ".center(WIDTH, "=")]
    lines += _rows(figures, COUNTS)
    for title, name, key, kinds in LATENCIES:
        if figures[f"mean_{key}_ms"] is not None:
            lines.append(title.center(WIDTH, "-"))
            lines += _rows(figures, [(f"{kind.capitalize()} {name} (ms):", f"{kind}_{key}_ms") for kind in kinds])
    if "goodput" in figures:
        lines.append("Goodput".center(WIDTH, "-"))
        objectives = (("SLO TTFT (ms):", "slo_ttft_ms"), ("SLO TPOT (ms):", "slo_tpot_ms"))
        lines += _rows(figures, [*objectives, ("Goodput (req/s):", "goodput"), ("SLO attainment (%):", "slo_attainment")])
    lines.append("The client itself".center(WIDTH, "-"))
    if figures["max_concurrency"] is not None:
        lines += _rows(figures, [("P99 held by max concurrency (ms):", "p99_held_ms")])
    lines += [*_rows(figures, CLIENT), "=" * WIDTH, *_rounds(figures.get("rounds", ())), *_failures(figures["errors"], examples)]
    return "\n".join(lines)


def warnings(figures: Mapping[str, Any]) -> list[str]:
    """What makes figures doubtful."""
    found = list(figures["notes"])
    if (lag := _late(figures)) is not None:
        found.append(f"the client was late: {lag}; use a faster or less busy machine, or a lower rate")
    if figures["uncounted_answers"]:
        found.append(f"{figures['uncounted_answers']} answers came without usage: their tokens are counted in chunks")
    if figures["short_answers"] and figures["ignore_eos"]:
        found.append(f"{figures['short_answers']} answers have fewer tokens than asked for")
    per_chunk = figures["tokens_per_chunk"]
    if per_chunk is not None and not 0.9 <= per_chunk <= 1.1:
        found.append(f"{per_chunk:.2f} tokens came with a chunk on average: inter-token latencies are those of chunks")
    return found


def _late(figures: Mapping[str, Any]) -> str | None:
    allowed = LATE_MS if figures["paced"] else max(LATE_MS, figures["duration"] * 1000 * LATE_SHARE)
    for name, limit in (("send_lag", allowed), ("loop_lag", LATE_MS)):
        late = figures[f"p99_{name}_ms"]
        if late is not None and late > limit:
            return f"99th percentile of its {name.replace('_', ' ')} {late:.1f} ms"
    return None


def _rows(figures: Mapping[str, Any], rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    for label, key in rows:
        value = figures.get(key)
        if key == "max_concurrency" and value is None:
            value = "not set"
        if value is None:
            continue
        value = value * 100 if key in SHARES else value
        yield f"{label:<40} {f'{value:.2f}' if isinstance(value, float) else value}"


def _rounds(rounds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if rounds:
        yield f"{'round':>5} {'completed':>10} {'input tokens':>13} {'cached %':>9} {'TTFT mean':>10} {'p50':>8} {'p99 (ms)':>9}"
    for each in rounds:
        share = None if each["cache_hit_rate"] is None else each["cache_hit_rate"] * 100
        values = (each["mean_input_tokens"], share, *(each[f"{kind}_ttft_ms"] for kind in ("mean", "median", "p99")))
        shown = " ".join(f"{'-' if value is None else f'{value:.1f}':>{width}}" for value, width in zip(values, (13, 9, 10, 8, 9)))
        yield f"{each['round']:>5} {each['completed']:>10} {shown}"


def _failures(errors: Mapping[str, int], examples: Mapping[str, str]) -> Iterator[str]:
    for kind, count in errors.items():
        detail = f" ({examples[kind]})" if examples.get(kind) else ""
        yield f"failed {count:>6}: {kind}{detail}"


def details(records: Sequence[Record]) -> dict[str, Any]:
    """For --output-details: one entry for each request, in the order of the workload; times in seconds."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.completion_tokens for record in records],
        "cached_lens": [record.cached_tokens for record in records],
        "due_times": [record.due for record in records],
        "send_times": [record.sent for record in records],
        "e2e_latencies": [record.e2e for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itls for record in records],
        "sessions": [record.session for record in records],
        "turns": [record.turn for record in records],
        "generated_texts": [record.text for record in records],
        "failures": [None if record.failure is None else f"{record.failure.kind}: {record.failure.detail}" for record in records],
    }


def append_line(path: str, line: Mapping[str, Any]) -> None:
    """One more line of JSON."""
    with Path(path).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
