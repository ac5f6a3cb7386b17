"""The examples of the frontend language, three ways: `python -m benchmark.bench_programs --model-path demo`.

With the radix cache and the language's hints, with the cache and without hints, and without the cache. Starts its own servers, one after
the other; flags that are not the benchmark's go to them. Prints throughput, hit rate, and the share of the best hit rate that any cache
could have had (`optimum`); docs/frontend.md explains the figures. Exit code 2 when it could not start.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import radixpd_lang as rx
from radixpd_lang.backends.http import Http

from benchmark.flags import add_flags, flag, new_parser, read_flags
from benchmark.optimum import Exchange, optimal
from benchmark.report import append_line
from radixpd.errors import ConfigError

__all__ = ["EXAMPLES", "ProgramOptions", "Recording", "example", "figures", "main", "measure", "table"]

FOLDER = Path(__file__).resolve().parents[1] / "python_frontend" / "examples"
EXAMPLES = {  # and programs in one run
    "few_shot_batch": 24,
    "json_extraction": 12,
    "judge": 4,
    "multi_turn_chat": 6,
    "rag": 16,
    "self_consistency": 6,
    "tree_of_thought": 3,
}
WAYS = {"cache, hints": (True, True), "cache, no hints": (True, False), "no cache": (False, False)}
START_SECONDS, END_SECONDS = 300.0, 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramOptions:
    """Programs."""

    model_path: str = flag("demo", "the model to serve")
    examples: tuple[str, ...] = flag((), "only these examples", metavar="NAME", choices=tuple(EXAMPLES))
    repeats: int = flag(2, "runs of each, of which the fastest counts", low=1, high=100)
    scale: float = flag(1.0, "more or fewer programs of each", low=0.01, high=1000.0)
    timeout: float = flag(600.0, "seconds for one request", low=1.0, high=86400.0)
    output_file: str | None = flag(None, "append one line of JSON", metavar="FILE")


class Recording(Http):
    """Requests to one server, with the ids and the cached tokens of each generation kept."""

    def __init__(self, base_url: str, timeout: float) -> None:
        super().__init__(base_url, timeout=timeout)
        self.exchanges: list[Exchange] = []

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST; a generation also returns its prompt's ids."""
        if path != "/generate":
            return await super().post(path, body)
        began = time.perf_counter()
        answer = await super().post(path, {**body, "return_prompt_token_ids": True})
        ended = time.perf_counter()
        hint = body["sampling_params"].get("max_new_tokens") == 0 and not body.get("return_logprob")
        for each in answer if isinstance(answer, list) else [answer]:
            cached = each["meta_info"]["cached_tokens"]
            self.exchanges.append(Exchange(each["prompt_token_ids"], each["output_ids"], cached, began, ended, hint))
        return answer


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    about = "Measure the frontend's examples. Every other flag is the server's: python -m radixpd.launch_server --help."
    parser = new_parser("benchmark.bench_programs", about)
    add_flags(parser, ProgramOptions)
    namespace, flags = parser.parse_known_args(argv)
    options = read_flags(namespace, ProgramOptions)
    try:
        rows, notes = _run(options, flags)
    except (ConfigError, rx.LangError) as error:
        print(f"bench_programs: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(table(rows))
    for note in notes:
        print(f"note: {note}")
    if options.output_file:
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"date": date, "model": options.model_path, "scale": options.scale, "flags": flags, "rows": rows, "notes": notes}
        append_line(options.output_file, line)
    return 0


def _run(options: ProgramOptions, flags: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    results: dict[str, list[tuple[str, Any]]] = {}
    for cached in (True, False):
        with serving(options.model_path, [*flags, *([] if cached else ["--disable-radix-cache"])]) as url:
            names = list(options.examples or EXAMPLES)
            if "json_extraction" in names and (refusal := _refuses_grammars(url)):
                names.remove("json_extraction")
                notes += [f"json_extraction is left out: {refusal}"] if cached else []
            ways = {way: hints for way, (needs_cache, hints) in WAYS.items() if needs_cache == cached}
            for name in names:
                size = max(1, round(EXAMPLES[name] * options.scale))
                # In turns, so that what the machine does besides hits all alike.
                runs = [(way, *measure(url, name, size, hints, options)) for _ in range(options.repeats) for way, hints in ways.items()]
                for way in ways:
                    row, result = min(
                        ((row, result) for made, row, result in runs if made == way), key=lambda run: float(run[0]["seconds"])
                    )
                    rows.append({"example": name, "way": way, **row})
                    results.setdefault(name, []).append((way, result))
    for name, found in results.items():
        notes += [f"{name}: other answers with {way} than with {found[0][0]}" for way, result in found[1:] if result != found[0][1]]
    return rows, notes


def measure(url: str, name: str, size: int, hints: bool, options: ProgramOptions) -> tuple[dict[str, Any], Any]:
    """Run one example on an empty cache: its figures, and what it returned."""
    http = Recording(url, options.timeout)
    backend = rx.RuntimeEndpoint(url, http=http)
    page = int(backend.get_server_info()["page_size"])
    example(name).run(backend, size=1, hints=hints)  # the first steps of a new server are slower
    backend.flush_cache()
    http.exchanges.clear()
    began = time.perf_counter()
    result = example(name).run(backend, size=size, hints=hints)
    seconds = time.perf_counter() - began
    backend.close()
    return {"programs": size, "seconds": seconds, **figures(http.exchanges, page, seconds)}, result


def figures(exchanges: Sequence[Exchange], page: int, seconds: float) -> dict[str, Any]:
    """What was sent, what of it was cached, and what could have been."""
    prompt, output, cached = (sum(counts) for counts in zip(*((len(e.prompt), len(e.output), e.cached) for e in exchanges), strict=True))
    best = sum(optimal(exchanges, page))
    return {
        "requests": sum(not each.hint for each in exchanges),
        "hints": sum(each.hint for each in exchanges),
        "output_tokens": output,
        "output_throughput": output / seconds,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "computed_tokens": prompt - cached,
        "optimal_cached_tokens": best,
        "hit_rate": cached / prompt,
        "share_of_optimum": cached / best if best else None,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The figures for people, examples one after the other, then the sums of each way."""
    heads = ("example", "way", "s", "programs/s", "requests", "hints", "out tok/s", "computed", "hit rate", "of optimum")
    lines: list[tuple[str, ...]] = [heads]
    for name in dict.fromkeys(row["example"] for row in rows):
        lines += [_cells(row) for row in rows if row["example"] == name]
    for way in dict.fromkeys(row["way"] for row in rows):
        lines.append(_cells(_sum(way, [row for row in rows if row["way"] == way])))
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    shown = [
        "  ".join(cell.ljust(w) if column < 2 else cell.rjust(w) for column, (cell, w) in enumerate(zip(line, widths))) for line in lines
    ]
    return "\n".join(line.rstrip() for line in shown)


def _sum(way: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = ("programs", "seconds", "requests", "hints", "output_tokens", "prompt_tokens", "cached_tokens", "computed_tokens")
    total = {name: sum(row[name] for row in rows) for name in (*names, "optimal_cached_tokens")}
    best = total["optimal_cached_tokens"]
    rates = {"output_throughput": total["output_tokens"] / total["seconds"], "hit_rate": total["cached_tokens"] / total["prompt_tokens"]}
    return {"example": "all", "way": way, **total, **rates, "share_of_optimum": total["cached_tokens"] / best if best else None}


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    share = row["share_of_optimum"]
    return (
        row["example"],
        row["way"],
        f"{row['seconds']:.1f}",
        f"{row['programs'] / row['seconds']:.2f}",
        str(row["requests"]),
        str(row["hints"]),
        f"{row['output_throughput']:.1f}",
        str(row["computed_tokens"]),
        f"{100 * row['hit_rate']:.1f} %",
        "-" if share is None else f"{100 * share:.1f} %",
    )


def example(name: str) -> ModuleType:
    """An example's module, from its file."""
    spec = importlib.util.spec_from_file_location(f"bench_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _refuses_grammars(url: str) -> str | None:
    """The words with which a server refuses a grammar, if it does."""
    backend = rx.RuntimeEndpoint(url)
    try:
        rx.function(lambda s: s.__iadd__("x" + rx.gen("x", max_tokens=1, regex="[0-9]"))).run(backend=backend)
    except rx.ProgramError as error:
        if isinstance(error.__cause__, rx.BackendError) and error.__cause__.status == 400:
            return str(error.__cause__)
        raise
    finally:
        backend.close()
    return None


@contextmanager
def serving(model: str, flags: Sequence[str]) -> Iterator[str]:
    """The URL of a server of our own while it runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "radixpd.launch_server", "--model-path", model, "--port", str(port), "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True, env=os.environ)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    backend = rx.RuntimeEndpoint(url, timeout=5.0)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"the server ended with exit code {process.returncode}")
        try:
            backend.get_server_info()
            return backend.close()
        except rx.BackendError:
            time.sleep(0.2)  # bounded by the deadline above
    raise ConfigError(f"the server was not ready within {START_SECONDS:g} s")


if __name__ == "__main__":
    sys.exit(main())
