"""Throughput of the engine without HTTP: `python -m benchmark.bench_offline --model-path demo --dataset-name random --num-prompts 64`.

Hands a whole dataset to `radixpd.llm.LLM` at once and prints what it did in the time; flags that are not the benchmark's go to the engine.
docs/offline.md explains the figures. Exit code 2 when it could not start.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.flags import add_flags, flag, new_parser, read_flags
from benchmark.prompts import LocalTokenizer
from benchmark.report import append_line
from benchmark.workloads import DatasetOptions, Workload, build
from radixpd.config import cli
from radixpd.config.settings import Settings
from radixpd.errors import ConfigError, RadixpdError
from radixpd.llm import LLM

__all__ = ["COUNTS", "OfflineOptions", "block", "engine_keywords", "main", "measure"]

WIDTH = 50
WARM_UP = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0}
COUNTS = (
    ("Successful requests:", "completed"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Input token throughput (tok/s):", "input_throughput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Total token throughput (tok/s):", "total_throughput"),
    ("Cached tokens:", "total_cached_tokens"),
    ("Cached share of input tokens (%):", "cache_hit_rate"),
    ("Retractions:", "retractions"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class OfflineOptions:
    """Offline."""

    result_filename: str | None = flag(None, "append one line of JSON", metavar="FILE")
    disable_ignore_eos: bool = flag(False, "let outputs end early")
    temperature: float = flag(0.0, "sampling temperature", low=0.0, high=100.0)
    skip_warmup: bool = flag(False, "count the first steps too, which are slower")
    disable_tqdm: bool = flag(False, "no progress bar")
    tag: str | None = flag(None, "a word for the line of JSON, for plots")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    about = "Measure the engine without HTTP. Every other flag is the engine's: python -m radixpd.launch_server --help."
    parser = new_parser("benchmark.bench_offline", about)
    add_flags(parser, OfflineOptions)
    add_flags(parser, DatasetOptions)
    namespace, rest = parser.parse_known_args(argv)
    options, dataset = read_flags(namespace, OfflineOptions), read_flags(namespace, DatasetOptions)
    try:
        _check(dataset)
        with LLM(**engine_keywords(cli.parse(rest))) as llm:
            figures = _run(llm, options, dataset)
    except RadixpdError as error:
        print(f"bench_offline: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(block(figures))
    for note in figures["notes"]:
        print(f"note: {note}")
    if options.result_filename:
        append_line(options.result_filename, figures)
    return 0


def engine_keywords(settings: Settings) -> dict[str, Any]:
    """Keywords for `LLM`: what differs from the defaults."""
    keywords: dict[str, Any] = {}
    for group in dataclasses.fields(settings):
        given, default = getattr(settings, group.name), getattr(Settings(), group.name)
        for field in dataclasses.fields(given):
            if getattr(given, field.name) != getattr(default, field.name):
                keywords[field.name] = getattr(given, field.name)
    return keywords


def measure(llm: Any, workload: Workload, options: OfflineOptions) -> dict[str, Any]:
    """Generate everything; figures of the time between the call and its return."""
    ignore = not options.disable_ignore_eos
    sampling = [
        {"max_new_tokens": request.output_len, "ignore_eos": ignore, "temperature": options.temperature} for request in workload.requests
    ]
    before = llm.get_server_info()["load"]
    began = time.perf_counter()
    answers = llm.generate([request.prompt for request in workload.requests], sampling, use_tqdm=not options.disable_tqdm)
    duration = time.perf_counter() - began
    after = llm.get_server_info()["load"]
    figures = _figures([answer["meta_info"] for answer in answers], duration)
    wrong = sum(
        answer["meta_info"]["prompt_tokens"] != request.input_len for answer, request in zip(answers, workload.requests, strict=True)
    )
    notes = [*workload.notes, *([f"{wrong} of {len(answers)} prompts have other lengths than planned"] if wrong else [])]
    return figures | {"retractions": after["retractions_total"] - before["retractions_total"], "notes": notes}


def block(figures: Mapping[str, Any]) -> str:
    """The figures for people."""
    lines = ["", " Offline Throughput Benchmark Result ".center(WIDTH, "=")]
    for label, key in COUNTS:
        value = figures[key] * 100 if key == "cache_hit_rate" else figures[key]
        lines.append(f"{label:<40} {f'{value:.2f}' if isinstance(value, float) else value}")
    return "\n".join([*lines, "=" * WIDTH])


def _figures(answers: Sequence[Mapping[str, Any]], duration: float) -> dict[str, Any]:
    prompt, completion, cached = (sum(meta[name] for meta in answers) for name in ("prompt_tokens", "completion_tokens", "cached_tokens"))
    return {
        "completed": len(answers),
        "duration": duration,
        "total_input_tokens": prompt,
        "total_output_tokens": completion,
        "request_throughput": len(answers) / duration,
        "input_throughput": prompt / duration,
        "output_throughput": completion / duration,
        "total_throughput": (prompt + completion) / duration,
        "total_cached_tokens": cached,
        "cache_hit_rate": cached / prompt,
    }


def _check(dataset: DatasetOptions) -> None:
    if dataset.dataset_name == "multi-turn":
        raise ConfigError("--dataset-name multi-turn needs the answers of earlier rounds: measure it with benchmark.bench_serving")
    if dataset.use_trace_timestamps:
        raise ConfigError("--use-trace-timestamps: everything is handed over at once here")


def _run(llm: LLM, options: OfflineOptions, dataset: DatasetOptions) -> dict[str, Any]:
    info = llm.get_server_info()
    workload = build(dataset, LocalTokenizer(llm.tokenizer_directory), limit=info["max_request_tokens"])
    if not options.skip_warmup:
        llm.generate([f"Warm-up {index}." for index in range(4)], WARM_UP, use_tqdm=False)
        llm.flush_cache()
    return {
        "tag": options.tag,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "backend": "engine",
        "model": info["model_path"],
        "dataset_name": dataset.dataset_name,
        **measure(llm, workload, options),
        "dataset": dataclasses.asdict(dataset),
        "engine": {name: value for name, value in info.items() if name not in ("load", "internal_states")},
    }


if __name__ == "__main__":
    sys.exit(main())
