"""Measure a running server: `python -m benchmark.bench_serving --backend radixpd --port 30000 --dataset-name random --num-prompts 100`.

Builds a workload, warms the server up, sends the requests on their schedule and prints throughput, latencies, cache and goodput, for one
request rate or several. docs/benchmarks.md defines every figure. Exit code 1 when nothing was answered, 2 when it could not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import uvloop
from tqdm import tqdm

from benchmark import report
from benchmark.backends import BACKENDS, CHAT, Ask, Backend
from benchmark.client import Client
from benchmark.driver import Driver, LoopWatch, WallClock
from benchmark.figures import Slo, summarize
from benchmark.flags import add_flags, flag, new_parser, read_flags
from benchmark.prompts import LocalTokenizer, Tokenizer, rng_for
from benchmark.target import ServerTokenizer, Target
from benchmark.timeline import Record
from benchmark.workloads import DatasetOptions, Request, Workload, build, poisson_arrivals
from radixpd.errors import ConfigError

__all__ = ["main"]

KEY_VARIABLES = ("RADIXPD_API_KEY", "OPENAI_API_KEY")
PORTS = {"vllm": 8000, "vllm-chat": 8000, "lmdeploy": 23333, "lmdeploy-chat": 23333}
OWN_FIELDS = ("stream", "n", "text", "input_ids", "prompt", "messages")
WARMUP_OUTPUT = 16
FROM_FILES = ("sharegpt", "custom")


@dataclasses.dataclass(frozen=True, slots=True)
class ServingOptions:
    """Serving."""

    backend: str = flag("radixpd", "the server and its route", choices=tuple(BACKENDS))
    base_url: str | None = flag(None, "address of the server, instead of --host and --port", metavar="URL")
    host: str = flag("127.0.0.1", "host of the server")
    port: int | None = flag(None, "port of the server; default: that of the backend, 30000 for radixpd", low=1, high=65535)
    model: str | None = flag(None, "model name to send; default: the first of /v1/models")
    tokenizer: str | None = flag(None, "directory of the tokenizer; default: the server's /tokenize", metavar="DIR")
    context_length: int | None = flag(None, "tokens that prompt and output may have; default: asked of the server", low=2, high=2**24)
    request_rate: float = flag(math.inf, "requests per second, Poisson; inf: all at once", low=1e-6, high=math.inf)
    request_rates: tuple[float, ...] = flag((), "several rates, one run and one line for each", low=1e-6, high=math.inf)
    max_concurrency: int | None = flag(None, "most requests at the server at a time; the schedule does not change", low=1, high=10**6)
    enable_round_barrier: bool = flag(False, "multi-turn: a round begins when every conversation is through with the one before")
    slo_ttft_ms: float | None = flag(None, "objective: time to the first token", low=0.001, high=1e9)
    slo_tpot_ms: float | None = flag(None, "objective: mean time of a later token", low=0.001, high=1e9)
    output_file: str | None = flag(None, "append one line of JSON for each run", metavar="FILE")
    output_details: bool = flag(False, "with every request in that line")
    tag: str | None = flag(None, "a word for that line, for plots")
    extra_request_body: str = flag("{}", "JSON object merged into every request", metavar="JSON")
    disable_ignore_eos: bool = flag(False, "let outputs end early")
    disable_stream: bool = flag(False, "ask for whole answers (no TTFT, TPOT, ITL)")
    flush_cache: bool = flag(False, "empty the server's prefix cache before each run")
    warmup_requests: int = flag(1, "requests before the first run; they are not counted", low=0, high=10**4)
    request_timeout: float = flag(3600.0, "longest life of a request in seconds", low=0.1, high=10**6)
    api_key: str | None = flag(None, f"bearer token; better in the environment: {' or '.join(KEY_VARIABLES)}", secret=True)
    disable_tqdm: bool = flag(False, "no progress bar")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What all runs have in common."""

    options: ServingOptions
    dataset: DatasetOptions
    backend: Backend
    ask: Ask
    target: Target
    tokenizer: Tokenizer
    key: str | None
    limit: int | None

    @property
    def slo(self) -> Slo:
        return Slo(self.options.slo_ttft_ms, self.options.slo_tpot_ms)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    parser = new_parser("benchmark.bench_serving", "Measure a running server.")
    add_flags(parser, ServingOptions)
    add_flags(parser, DatasetOptions)
    namespace = parser.parse_args(argv)
    try:
        plan = _plan(read_flags(namespace, ServingOptions), read_flags(namespace, DatasetOptions))
        answered = [_measure(plan, rate, index) for index, rate in enumerate(plan.options.request_rates or (plan.options.request_rate,))]
    except ConfigError as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0 if any(answered) else 1


def _plan(options: ServingOptions, dataset: DatasetOptions) -> Plan:
    if options.disable_stream and (options.slo_ttft_ms or options.slo_tpot_ms):
        raise ConfigError("--slo-ttft-ms and --slo-tpot-ms need streams: leave --disable-stream out")
    if options.request_rates and dataset.use_trace_timestamps:
        raise ConfigError("--request-rates and --use-trace-timestamps exclude each other")
    backend = BACKENDS[options.backend]
    _check_prompts(backend, options.backend, dataset)
    key = options.api_key or next((value for name in KEY_VARIABLES if (value := os.environ.get(name))), None)
    address = options.base_url or f"http://{options.host}:{options.port or PORTS.get(options.backend, 30000)}"
    target = Target(address, key)
    model = options.model or target.model
    tokenizer = LocalTokenizer(options.tokenizer) if options.tokenizer else ServerTokenizer(target, model)
    limit = options.context_length or target.limit
    if backend is CHAT and limit is not None:
        limit -= _around(tokenizer)
    ask = Ask(model, not options.disable_stream, not options.disable_ignore_eos, _extra(options.extra_request_body))
    return Plan(options, dataset, backend, ask, target, tokenizer, key, limit)


def _check_prompts(backend: Backend, name: str, dataset: DatasetOptions) -> None:
    """What is sent as ids needs a route that takes ids; in conversations also one that gives them."""
    sends_ids = dataset.tokenize_prompt or dataset.apply_chat_template or dataset.dataset_name == "random-ids"
    if sends_ids and not backend.takes_ids:
        raise ConfigError(f"--backend {name} takes text only: no --tokenize-prompt, --apply-chat-template or random-ids")
    if sends_ids and dataset.dataset_name == "multi-turn" and not backend.gives_ids:
        raise ConfigError(f"--backend {name} does not return ids, which multi-turn with --tokenize-prompt needs")


def _extra(text: str) -> dict[str, Any]:
    try:
        extra: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--extra-request-body is no JSON object ({error})") from None
    if taken := [name for name in OWN_FIELDS if name in extra]:
        raise ConfigError(f"--extra-request-body may not set {', '.join(taken)}")
    if not isinstance(extra.get("sampling_params", {}), dict):
        raise ConfigError("--extra-request-body: sampling_params must be an object")
    return extra


def _around(tokenizer: Tokenizer) -> int:
    """Tokens that the chat template puts around one message."""
    word = "word"
    return len(tokenizer.chat([{"role": "user", "content": word}])) - len(tokenizer.encode([word])[0])


def _measure(plan: Plan, rate: float, index: int) -> bool:
    """One run: figures to the screen and the file. Whether anything was answered."""
    options = plan.options
    # Without an emptied cache a later run must not find the prompts of the one before.
    salt = 0 if options.flush_cache else index
    workload = build(plan.dataset, plan.tokenizer, limit=plan.limit, salt=salt)
    if salt and plan.dataset.dataset_name in FROM_FILES:
        workload = dataclasses.replace(workload, notes=(*workload.notes, "the run before had the same prompts: see --flush-cache"))
    if index == 0:
        uvloop.run(_warm_up(plan))
    if options.flush_cache:
        plan.target.flush_cache()
    records, client = uvloop.run(_run(plan, workload, rate))
    figures = _figures(plan, workload, rate, records) | client
    examples = {record.failure.kind: record.failure.detail for record in reversed(records) if record.failure is not None}
    print(report.block(figures, examples))
    for warning in report.warnings(figures):
        print(f"note: {warning}")
    if options.output_file:
        line = {**figures, **(report.details(records) if options.output_details else {})}
        report.append_line(options.output_file, line)
    return bool(figures["completed"])


def _arrivals(plan: Plan, requests: Sequence[Request], rate: float) -> list[float]:
    """When requests (of conversations: the first round) are due."""
    if plan.dataset.use_trace_timestamps:
        return [request.arrival or 0.0 for request in requests]
    sessions = {request.session for request in requests if request.session is not None}
    return poisson_arrivals(len(sessions) or len(requests), rate, rng_for("arrivals", plan.dataset.seed))


async def _warm_up(plan: Plan) -> None:
    """A few short requests whose prompts no dataset has; the first that fails ends the program."""
    requests = [Request(f"Warm-up {index}.", WARMUP_OUTPUT, 0) for index in range(plan.options.warmup_requests)]
    clock = WallClock()
    async with _client(plan, clock) as client:
        for request in requests:
            (record,) = await Driver(plan.backend, plan.ask, client.post, clock).run([request], [0.0])
            if record.failure is not None:
                raise ConfigError(f"the warm-up request failed: {record.failure.kind} {record.failure.detail}".rstrip())


async def _run(plan: Plan, workload: Workload, rate: float) -> tuple[list[Record], dict[str, Any]]:
    """Records, and what the client can say of itself."""
    options, clock = plan.options, WallClock()
    requests, arrivals = workload.requests, _arrivals(plan, workload.requests, rate)
    watch, cpu = LoopWatch(clock), time.process_time()
    with tqdm(total=len(requests), disable=True if options.disable_tqdm else None, mininterval=0.5) as bar:
        async with _client(plan, clock) as client:
            driver = Driver(plan.backend, plan.ask, client.post, clock, options.max_concurrency, lambda _: bar.update() and None)
            beat = asyncio.create_task(watch.run())
            records = await driver.run(requests, arrivals, barrier=options.enable_round_barrier)
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beat
    used = (time.process_time() - cpu) / max(clock.now(), 1e-9)
    late = float(np.percentile(watch.late, 99)) * 1000 if watch.late else None
    return records, {"client_cpu_share": used, "p99_loop_lag_ms": late}


def _client(plan: Plan, clock: WallClock) -> Client:
    return Client(plan.target.base_url, plan.backend, clock, timeout=plan.options.request_timeout, api_key=plan.key)


def _figures(plan: Plan, workload: Workload, rate: float, records: Sequence[Record]) -> dict[str, Any]:
    """The figures of a run, with what tells runs apart."""
    options, dataset = plan.options, plan.dataset
    shown = f"trace x {dataset.mooncake_slowdown_factor:g}" if dataset.use_trace_timestamps else rate if math.isfinite(rate) else "inf"
    return {
        "tag": options.tag,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "backend": options.backend,
        "model": plan.ask.model,
        "dataset_name": dataset.dataset_name,
        "request_rate": shown,
        "max_concurrency": options.max_concurrency,
        "paced": dataset.use_trace_timestamps or math.isfinite(rate),
        "ignore_eos": plan.ask.ignore_eos,
        "total_output_tokens_retokenized": _retokenized(plan.tokenizer, records) if options.tokenizer else None,
        "notes": [*workload.notes, *_miscounted(plan.backend, records)],
        **summarize(records, plan.slo),
        "dataset": dataclasses.asdict(dataset),
    }


def _retokenized(tokenizer: Tokenizer, records: Sequence[Record]) -> int:
    """Tokens of the answers' texts, without what the tokenizer puts around a text."""
    texts = [record.text for record in records if record.failure is None]
    around, *lists = tokenizer.encode(["", *texts])
    return sum(len(ids) - len(around) for ids in lists)


def _miscounted(backend: Backend, records: Sequence[Record]) -> list[str]:
    """Whether the server counted prompts of single requests as they were planned. Chat templates and histories add to them."""
    if backend is CHAT:
        return []
    told = [record for record in records if record.failure is None and record.session is None and record.counted_by_server]
    wrong = [record for record in told if record.prompt_tokens != record.planned_input]
    return [f"{len(wrong)} of {len(told)} prompts have other lengths at the server than planned"] if wrong else []


if __name__ == "__main__":
    sys.exit(main())
