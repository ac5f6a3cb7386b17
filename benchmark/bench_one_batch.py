"""The model runner alone: `python -m benchmark.bench_one_batch --model-path demo --batch-size 1 8 --input-len 256 --output-len 32`.

One process, no scheduler and no tokenizer: for each combination of the flags a batch of random prompts is computed in one step and decoded
step by step, by plans made here. So the difference to a server is what everything else costs. Flags that are not the benchmark's go to the
engine. docs/offline.md explains the figures. Exit code 2 when it could not start.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import product
from typing import Any, Protocol

import numpy as np

from benchmark.flags import add_flags, flag, new_parser, read_flags
from benchmark.report import append_line
from radixpd.config import cli
from radixpd.config.resolve import Resolved
from radixpd.config.settings import Settings
from radixpd.core.request import SamplingParams
from radixpd.core.step import SlotBegin, StepPlan, StepResult
from radixpd.engine.build import build_runner
from radixpd.engine.profile import Profiler
from radixpd.errors import ConfigError, RadixpdError
from radixpd.runtime.supervisor import decide

__all__ = ["Combination", "OneBatchOptions", "main", "measure", "plans", "sized", "table"]

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=2**31 - 1, ignore_eos=True)
WARM_UP_OUTPUT = 4
PROFILED_STEPS = 8
COLUMNS = (
    ("batch", "batch_size", "d"),
    ("input", "input_len", "d"),
    ("output", "output_len", "d"),
    ("prefill s", "prefill_latency", ".4f"),
    ("tok/s", "prefill_throughput", ".1f"),
    ("decode ms", "median_decode_latency_ms", ".2f"),
    ("tok/s", "median_decode_throughput", ".1f"),
    ("total s", "total_latency", ".3f"),
    ("tok/s", "overall_throughput", ".1f"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class OneBatchOptions:
    """One batch."""

    batch_size: tuple[int, ...] = flag((1,), "requests of a batch", low=1, high=65536)
    input_len: tuple[int, ...] = flag((1024,), "tokens of each prompt", low=1, high=2**24)
    output_len: tuple[int, ...] = flag((16,), "tokens of each output; the first comes from the prompt's step", low=1, high=2**24)
    seed: int = flag(1, "of the prompts", low=0, high=2**31 - 1)
    result_filename: str | None = flag(None, "append one line of JSON for each combination", metavar="FILE")
    profile: bool = flag(False, f"also record the prompt's step and {PROFILED_STEPS - 1} more of each into --profile-folder")
    tag: str | None = flag(None, "a word for the lines of JSON, for plots")


@dataclasses.dataclass(frozen=True, slots=True)
class Combination:
    """One batch to measure."""

    batch_size: int
    input_len: int
    output_len: int

    def pages(self, page_size: int) -> int:
        """Of one request."""
        return -(-(self.input_len + self.output_len) // page_size)


class StepRunner(Protocol):
    """What is measured."""

    def step(self, plan: StepPlan) -> StepResult: ...


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    about = "Measure the model runner alone. Every other flag is the engine's: python -m radixpd.launch_server --help."
    parser = new_parser("benchmark.bench_one_batch", about)
    add_flags(parser, OneBatchOptions)
    namespace, rest = parser.parse_known_args(argv)
    options = read_flags(namespace, OneBatchOptions)
    combinations = [Combination(*each) for each in product(options.batch_size, options.input_len, options.output_len)]
    try:
        settings = cli.parse(rest)
        if options.profile:
            _prepare(settings.observe.profile_folder)
        resolved = decide(sized(settings, combinations))
        _check(resolved, combinations)
        with closing(build_runner(resolved)) as runner:
            figures = list(_all(runner, resolved, options, combinations))
    except RadixpdError as error:
        print(f"bench_one_batch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(table(figures))
    if options.result_filename:
        for line in figures:
            append_line(options.result_filename, line)
    return 0


def sized(settings: Settings, combinations: Sequence[Combination]) -> Settings:
    """A pool and slots for the largest batch, where the flags leave that open."""
    size = settings.cache.page_size
    pool = settings.cache.max_total_tokens or max(each.batch_size * each.pages(size) * size for each in combinations)
    slots = settings.scheduler.max_running_requests or max(each.batch_size for each in combinations)
    return dataclasses.replace(
        settings,
        cache=dataclasses.replace(settings.cache, max_total_tokens=pool),
        scheduler=dataclasses.replace(settings.scheduler, max_running_requests=slots),
    )


def plans(combination: Combination, prompts: np.ndarray, *, page_size: int, first_step: int = 1) -> Iterator[StepPlan]:
    """The prompts (int32 `[batch, input]`) in one step, then one for each further token; each request in a slot and pages of its own."""
    batch, pages = combination.batch_size, combination.pages(page_size)
    slots = np.arange(batch, dtype=np.int32)
    yield StepPlan(
        step=first_step,
        slots=slots,
        starts=np.zeros(batch, dtype=np.int32),
        lengths=np.full(batch, combination.input_len, dtype=np.int32),
        sample_rows=slots,
        sample_slots=slots,
        page_slots=np.repeat(slots, pages),
        page_positions=np.tile(np.arange(pages, dtype=np.int32), batch),
        page_ids=np.arange(batch * pages, dtype=np.int32),
        begins=tuple(SlotBegin(slot, prompts[slot], combination.input_len, 0, GREEDY) for slot in range(batch)),
    )
    for step in range(1, combination.output_len):
        starts = np.full(batch, combination.input_len + step - 1, dtype=np.int32)
        ones = np.ones(batch, dtype=np.int32)
        yield StepPlan(first_step + step, slots, starts, ones, sample_rows=slots, sample_slots=slots)


def measure(runner: StepRunner, combination: Combination, prompts: np.ndarray, *, page_size: int) -> dict[str, Any]:
    """Seconds of each step, as figures."""
    seconds = []
    for plan in plans(combination, prompts, page_size=page_size):
        began = time.perf_counter()
        runner.step(plan)
        seconds.append(time.perf_counter() - began)
    prefill, decode, total = seconds[0], seconds[1:], sum(seconds)
    batch = combination.batch_size
    median = float(np.median(decode)) if decode else None
    return {
        **dataclasses.asdict(combination),
        "prefill_latency": prefill,
        "prefill_throughput": batch * combination.input_len / prefill,
        "median_decode_latency_ms": None if median is None else median * 1000,
        "median_decode_throughput": None if median is None else batch / median,
        "total_latency": total,
        "overall_throughput": batch * (combination.input_len + combination.output_len) / total,
    }


def table(figures: Sequence[dict[str, Any]]) -> str:
    """One line for each combination."""
    rows = [[title for title, _, _ in COLUMNS]]
    rows += [["-" if line[key] is None else format(line[key], form) for _, key, form in COLUMNS] for line in figures]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def _all(runner: StepRunner, resolved: Resolved, options: OneBatchOptions, combinations: Sequence[Combination]) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(options.seed)
    model = {"tag": options.tag, "model": resolved.settings.model.model_path, "dtype": resolved.dtype, "threads": resolved.threads}
    profiler = Profiler(resolved.settings.observe.profile_folder, rank=0)
    for index, combination in enumerate(combinations):
        prompts = rng.integers(resolved.model.vocab_size, size=(combination.batch_size, combination.input_len), dtype=np.int32)
        if index == 0:
            short = dataclasses.replace(combination, output_len=min(WARM_UP_OUTPUT, combination.output_len))
            measure(runner, short, prompts, page_size=resolved.page_size)
        figures = {**model, **measure(runner, combination, prompts, page_size=resolved.page_size)}
        if options.profile:
            figures["profile"] = _profiled(runner, profiler, combination, prompts, page_size=resolved.page_size)
        yield figures


def _profiled(runner: StepRunner, profiler: Profiler, combination: Combination, prompts: np.ndarray, *, page_size: int) -> str:
    """The path of a trace of the first steps. They are slower than without the profiler."""
    short = dataclasses.replace(combination, output_len=min(PROFILED_STEPS, combination.output_len))
    profiler.start(steps=short.output_len, record_shapes=False, with_stack=False)
    for plan in plans(short, prompts, page_size=page_size):
        runner.step(plan)
        profiler.stepped()
    path = profiler.stop()
    print(f"profile: {path}")
    return path


def _prepare(folder: str | None) -> None:
    if folder is None:
        raise ConfigError("--profile needs --profile-folder")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile-folder {folder}: {error.strerror}") from None


def _check(resolved: Resolved, combinations: Sequence[Combination]) -> None:
    for each in combinations:
        tokens, pages = each.input_len + each.output_len, each.batch_size * each.pages(resolved.page_size)
        if tokens > resolved.context_length:
            raise ConfigError(f"--input-len and --output-len make {tokens} tokens; the model's context has {resolved.context_length}")
        if pages > resolved.pages:
            raise ConfigError(f"--batch-size {each.batch_size} needs {pages} pages; --max-total-tokens makes {resolved.pages}")
        if each.batch_size > resolved.max_running:
            raise ConfigError(f"--batch-size {each.batch_size} is more than --max-running-requests {resolved.max_running}")


if __name__ == "__main__":
    sys.exit(main())
