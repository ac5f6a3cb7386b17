"""bench_serving against a real server: every kind of backend, conversations, traces, objectives, failures, and what it must not print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.servers import Server

from benchmark import plot
from benchmark.bench_serving import main

ROOT = Path(__file__).parents[2]
SMALL = ("--num-prompts", "6", "--random-input-len", "48", "--random-output-len", "8", "--random-range-ratio", "0.5")
MULTI = ("--dataset-name", "multi-turn", "--num-clients", "3", "--num-rounds", "3", "--request-length", "40", "--output-length", "8")
KINDS = ("radixpd", "radixpd-oai", "radixpd-oai-chat")

Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(server: Server, tmp_path: Path) -> Bench:
    """`bench(*flags)`: the line that a run of bench_serving has written."""

    def run(*flags: str, code: int = 0) -> dict[str, Any]:
        path = tmp_path / "runs.jsonl"
        path.unlink(missing_ok=True)
        server.settled()
        assert main(["--base-url", server.url, "--output-file", str(path), "--output-details", "--flush-cache", *flags]) == code
        (line,) = path.read_text().splitlines()
        decoded: dict[str, Any] = json.loads(line)
        return decoded

    return run


def clean(line: dict[str, Any]) -> list[str]:
    """Notes of a run, without those on a busy machine."""
    return [note for note in line["notes"] if "late" not in note]


@pytest.mark.parametrize("backend", KINDS)
def test_each_kind_of_backend(bench: Bench, tiny: Path, backend: str) -> None:
    line = bench("--backend", backend, "--tokenizer", str(tiny), *SMALL)
    assert (line["completed"], line["failed"], line["errors"], line["short_answers"]) == (6, 0, {}, 0)
    assert clean(line) == []  # the server counted every prompt as it was planned
    assert line["total_output_tokens"] == sum(line["output_lens"])
    assert all(24 <= length <= 48 for length in line["input_lens"]) or backend == "radixpd-oai-chat"
    assert line["total_output_tokens_retokenized"] > 0
    assert all(0 < first <= whole for first, whole in zip(line["ttfts"], line["e2e_latencies"]))
    assert 0 < line["median_ttft_ms"] <= line["median_e2e_latency_ms"]
    # Tokens may come together (then gaps are 0), and chat sends no chunk without a whole character.
    gaps = sum(map(len, line["itls"]))
    assert 0 < gaps <= line["total_output_tokens"] - 6
    assert line["mean_itl_ms"] == pytest.approx(1000 * sum(map(sum, line["itls"])) / gaps)
    assert line["mean_tpot_ms"] >= 0
    assert line["total_cached_tokens"] == 0
    assert line["request_throughput"] == pytest.approx(6 / line["duration"])


@pytest.mark.parametrize("backend", KINDS)
@pytest.mark.parametrize("barrier", [(), ("--enable-round-barrier",)], ids=["free", "barrier"])
def test_conversations_find_their_history_in_the_cache(bench: Bench, backend: str, barrier: tuple[str, ...]) -> None:
    line = bench("--backend", backend, *MULTI, *barrier)
    first, *later = line["rounds"]
    assert [each["completed"] for each in line["rounds"]] == [3, 3, 3]
    assert [each["mean_input_tokens"] for each in line["rounds"]] == sorted(each["mean_input_tokens"] for each in line["rounds"])
    # A chat template begins every conversation with the same few tokens.
    assert first["cache_hit_rate"] <= 0.4
    assert all(each["cache_hit_rate"] > 0.25 for each in later)
    assert line["cache_hit_rate"] > 0


def test_conversations_in_ids_lose_nothing_of_their_history(bench: Bench) -> None:
    """With exact ids the whole history but its last partial page is found again."""
    line = bench(*MULTI, "--tokenize-prompt", "--disable-stream")
    pairs = zip(line["input_lens"], line["cached_lens"], line["turns"])
    assert [(tokens, cached) for tokens, cached, turn in pairs if turn == 2] == [(136, 80)] * 3


def mooncake(path: Path) -> str:
    rows = [(0, 700, 4, [3, 5]), (100, 640, 4, [3, 8]), (200, 5000, 4, [3, *range(20, 29)])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, row))) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("backend", KINDS)
def test_a_mooncake_trace_shares_its_blocks(bench: Bench, tmp_path: Path, backend: str) -> None:
    flags = ("--dataset-name", "mooncake", "--dataset-path", mooncake(tmp_path / "trace.jsonl"), "--max-concurrency", "1")
    line = bench("--backend", backend, *flags, "--use-trace-timestamps", "--mooncake-slowdown-factor", "0.5", "--context-length", "1500")
    assert line["completed"] == 3
    assert clean(line)[0].startswith("1 of 3 requests did not fit into ")
    assert len(clean(line)) == 1
    assert line["due_times"] == pytest.approx([0.0, 0.05, 0.1], abs=1e-3 + line["due_times"][0])
    first, second, third = line["cached_lens"]
    assert first < 48  # a chat template's, at most
    assert min(second, third) >= 496  # the shared block of 512 tokens, up to its last page
    assert line["request_rate"] == "trace x 0.5"


def test_an_azure_trace(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-31 18:17:03.9799600,48,5\n2024-01-31 18:17:04.0319600,31,8\n")
    line = bench("--dataset-name", "azure", "--dataset-path", str(path))
    assert (line["input_lens"], line["output_lens"]) == ([48, 31], [5, 8])


def test_a_shared_prefix_is_found(bench: Bench) -> None:
    gsp = {"num-groups": 2, "prompts-per-group": 4, "system-prompt-len": 64, "question-len": 8, "output-len": 4}
    flags = [word for name, value in gsp.items() for word in (f"--gsp-{name}", str(value))]
    line = bench("--dataset-name", "generated-shared-prefix", *flags)
    assert line["total_input_tokens"] == 8 * 72
    assert line["total_cached_tokens"] == 6 * 64


@pytest.mark.parametrize("flags", ["--dataset-name random-ids", "--tokenize-prompt", "--apply-chat-template"])
@pytest.mark.parametrize("local", [False, True], ids=["server", "local"])
def test_prompts_in_ids(bench: Bench, tiny: Path, flags: str, local: bool) -> None:
    line = bench(*SMALL, *flags.split(), *(("--tokenizer", str(tiny)) if local else ()))
    assert (line["completed"], clean(line)) == (6, [])


def test_objectives_agree_with_what_was_measured(bench: Bench) -> None:
    line = bench(*SMALL, "--slo-ttft-ms", "1e6", "--slo-tpot-ms", "1e6")
    assert line["slo_attainment"] == 1
    assert line["goodput"] == pytest.approx(line["request_throughput"])
    assert bench(*SMALL, "--slo-ttft-ms", "0.001")["goodput"] == 0
    middle = line["median_ttft_ms"]
    line = bench(*SMALL, "--slo-ttft-ms", str(middle))
    assert line["slo_attainment"] == sum(first * 1000 <= middle for first in line["ttfts"]) / 6


def test_without_streams_only_whole_answers_are_measured(bench: Bench) -> None:
    line = bench(*SMALL, "--disable-stream")
    assert (line["completed"], line["mean_ttft_ms"], line["mean_itl_ms"], line["mean_tpot_ms"]) == (6, None, None, None)
    assert line["mean_e2e_latency_ms"] > 0


@pytest.mark.parametrize("backend", KINDS)
def test_refusals_are_counted_by_kind_and_all_of_them_fail_the_run(bench: Bench, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    extra = '{"top_p": 7, "sampling_params": {"top_p": 7}}' if backend == "radixpd" else '{"top_p": 7}'
    line = bench("--backend", backend, *SMALL, "--warmup-requests", "0", "--extra-request-body", extra, code=1)
    assert line["errors"] == {"HTTP 400 invalid_request_error": 6}
    assert "top_p must be between" in capsys.readouterr().out


def test_some_refusals_do_not_hide(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "hello", "output_len": 4}\n{"prompt": [99999999], "output_len": 4}\n')
    line = bench("--dataset-name", "custom", "--dataset-path", str(path))
    assert (line["completed"], line["failed"]) == (1, 1)
    assert line["failures"][0] is None


def test_a_warm_up_that_fails_ends_the_program(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-url", server.url, *SMALL, "--extra-request-body", '{"sampling_params": {"top_p": 7}}']) == 2
    assert "the warm-up request failed: HTTP 400" in capsys.readouterr().err


def test_a_sweep_as_users_run_it(server: Server, tmp_path: Path) -> None:
    """In a process of its own: one block and one line for each rate, prompts that differ between rates, pictures, and no key anywhere."""
    server.flush()
    path = tmp_path / "sweep.jsonl"
    flags = ["--base-url", server.url, *SMALL, "--request-rates", "40", "80", "160", "--output-file", str(path), "--tag", "tiny"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.bench_serving", *flags],
        cwd=ROOT, env={**os.environ, "RADIXPD_API_KEY": "sesame-open"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Serving Benchmark Result") == 3
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request_rate"] for line in lines] == [40.0, 80.0, 160.0]
    assert [line["total_cached_tokens"] for line in lines] == [0, 0, 0]
    assert len({line["total_input_tokens"] for line in lines}) == 1
    assert "sesame" not in done.stdout + done.stderr + path.read_text()
    assert len(plot.draw(plot.read_lines([str(path)]), tmp_path)) == 3
