"""What a grammar costs a decode step: `python -m benchmark.bench_masks --model-path demo --batch-size 16 --steps 40`.

One process, no scheduler: two batches of the same size, one free and one in which every row follows a schema, decode in turns on one
runner, so that whatever slows the machine down slows both. Seconds are those of the clock and those of the processor (all threads, so with
the filling of the masks, which runs beside the forward). Flags that are not the benchmark's go to the engine. docs/benchmarks.md explains
the figures. Exit code 2 when it could not start.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from benchmark.bench_one_batch import Combination, StepRunner, sized
from benchmark.flags import add_flags, flag, new_parser, read_flags
from benchmark.report import append_line
from radixpd.config import cli
from radixpd.config.resolve import Resolved
from radixpd.core.request import Grammar, SamplingParams
from radixpd.core.step import SlotBegin, StepPlan
from radixpd.engine.build import build_runner
from radixpd.engine.constraints import Constraints
from radixpd.engine.runner import Runner
from radixpd.errors import ConfigError, RadixpdError
from radixpd.grammar.base import open_backend
from radixpd.grammar.jump import Guide
from radixpd.grammar.requests import grammar_of
from radixpd.runtime.supervisor import decide
from radixpd.runtime.vocabulary import Spelling

__all__ = ["MaskOptions", "Seconds", "figures", "main", "turns"]

WARM_UP = 4  # steps of each batch that do not count
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "company", "place"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
    },
    "required": ["name", "age", "kind", "tags"],
}
ENDLESS = {"type": "array", "items": PERSON, "minItems": 500}  # so that no row ends


@dataclasses.dataclass(frozen=True, slots=True)
class MaskOptions:
    """Two batches."""

    batch_size: int = flag(16, "rows of each batch", low=1, high=4096)
    input_len: int = flag(64, "tokens of each prompt", low=1, high=2**20)
    steps: int = flag(40, "decode steps of each batch that count", low=1, high=100_000)
    seed: int = flag(1, "of the prompts", low=0, high=2**31 - 1)
    result_filename: str | None = flag(None, "append one line of JSON", metavar="FILE")


@dataclasses.dataclass(frozen=True, slots=True)
class Seconds:
    """Of one step."""

    clock: float
    processor: float


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    about = "Measure what a grammar costs a decode step. Every other flag is the engine's: python -m radixpd.launch_server --help."
    parser = new_parser("benchmark.bench_masks", about)
    add_flags(parser, MaskOptions)
    namespace, rest = parser.parse_known_args(argv)
    options = read_flags(namespace, MaskOptions)
    needed = Combination(2 * options.batch_size, options.input_len, WARM_UP + options.steps + 1)
    try:
        resolved = decide(sized(cli.parse(rest), [needed]))
        if resolved.settings.engine.grammar_backend == "none":
            raise ConfigError("--grammar-backend none has no masks to measure")
        with closing(build_runner(resolved)) as runner:
            runner.constraints = _constraints(resolved)
            free, bound = _measured(runner, resolved, needed, options)
    except RadixpdError as error:
        print(f"bench_masks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    engine = {"backend": resolved.settings.engine.grammar_backend, "dtype": resolved.dtype, "threads": resolved.threads}
    line = {**dataclasses.asdict(options), **engine, "model": resolved.settings.model.model_path, **figures(free, bound)}
    print(table(line))
    if options.result_filename:
        append_line(options.result_filename, line)
    return 0


def figures(free: Sequence[Seconds], bound: Sequence[Seconds]) -> dict[str, float]:
    """Medians in milliseconds, and the grammar's share of a free step in percent."""
    found: dict[str, float] = {}
    for kind in ("clock", "processor"):
        one, other = (float(np.median([getattr(each, kind) for each in steps])) * 1000 for steps in (free, bound))
        found |= {f"{kind}_free_ms": one, f"{kind}_masked_ms": other, f"{kind}_overhead_percent": 100 * (other - one) / one}
    return found


def table(line: dict[str, Any]) -> str:
    """The figures as people read them."""
    rows = [("a step of", "free ms", "masked ms", "overhead")]
    for kind in ("clock", "processor"):
        free, masked, share = (line[f"{kind}_{figure}"] for figure in ("free_ms", "masked_ms", "overhead_percent"))
        rows.append((kind, f"{free:.2f}", f"{masked:.2f}", f"{share:.1f} %"))
    head = f"{line['batch_size']} rows, {line['steps']} steps, {line['backend']}, {line['dtype']}, {line['threads']} threads"
    return "\n".join([head, *(f"{name:<12}{free:>10}{masked:>12}{share:>10}" for name, free, masked, share in rows)])


def turns(runner: StepRunner, plans: Sequence[Iterator[StepPlan]], *, now: Callable[[], Seconds]) -> list[list[Seconds]]:
    """Seconds of every step of each sequence of plans, one step of each in turn."""
    found: list[list[Seconds]] = [[] for _ in plans]
    for each in zip(*plans, strict=True):
        for seconds, plan in zip(found, each):
            before = now()
            runner.step(plan)
            after = now()
            seconds.append(Seconds(after.clock - before.clock, after.processor - before.processor))
    return found


def _constraints(resolved: Resolved) -> Constraints:
    """Grammars compiled here: the compiler of a server has a process of its own."""
    spelling = Spelling(resolved)
    backend = open_backend(resolved.settings.engine.grammar_backend, spelling.vocabulary())
    compiled = backend.compile(grammar_of("json_schema", ENDLESS))
    return Constraints(vocab_size=resolved.model.vocab_size, open_guide=lambda _: Guide(compiled.matcher(), spelling.canonical))


def _measured(runner: Runner, resolved: Resolved, needed: Combination, options: MaskOptions) -> tuple[list[Seconds], list[Seconds]]:
    rng = np.random.default_rng(options.seed)
    prompts = rng.integers(resolved.model.vocab_size, size=(options.batch_size, options.input_len), dtype=np.int32)
    pages = needed.pages(resolved.page_size)
    grammars = (None, grammar_of("json_schema", ENDLESS))
    both = [_plans(group, grammar, prompts, options, pages=pages) for group, grammar in enumerate(grammars)]
    free, bound = turns(runner, both, now=lambda: Seconds(time.perf_counter(), time.process_time()))
    return free[1 + WARM_UP :], bound[1 + WARM_UP :]


def _plans(group: int, grammar: Grammar | None, prompts: np.ndarray, options: MaskOptions, *, pages: int) -> Iterator[StepPlan]:
    """The prompts (int32 `[batch, input]`) of a group in one step, then one step for each token; slots and pages of the group's own."""
    batch, length = prompts.shape
    slots = np.arange(group * batch, (group + 1) * batch, dtype=np.int32)
    yield StepPlan(
        step=1,
        slots=slots,
        starts=np.zeros(batch, dtype=np.int32),
        lengths=np.full(batch, length, dtype=np.int32),
        sample_rows=np.arange(batch, dtype=np.int32),
        sample_slots=slots,
        page_slots=np.repeat(slots, pages),
        page_positions=np.tile(np.arange(pages, dtype=np.int32), batch),
        page_ids=np.arange(group * batch * pages, (group + 1) * batch * pages, dtype=np.int32),
        begins=tuple(SlotBegin(int(slot), prompts[row], length, 0, _params(row, grammar)) for row, slot in enumerate(slots)),
    )
    for step in range(WARM_UP + options.steps):
        starts, ones = np.full(batch, length + step, dtype=np.int32), np.ones(batch, dtype=np.int32)
        yield StepPlan(2 + step, slots, starts, ones, sample_rows=np.arange(batch, dtype=np.int32), sample_slots=slots)


def _params(row: int, grammar: Grammar | None) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=row, max_new_tokens=2**31 - 1, ignore_eos=True, grammar=grammar)


if __name__ == "__main__":
    sys.exit(main())
