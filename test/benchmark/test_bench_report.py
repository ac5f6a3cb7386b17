"""What a run prints and writes, and which flags are refused before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import answered, failed

from benchmark import report
from benchmark.bench_serving import main
from benchmark.figures import Slo, summarize
from benchmark.timeline import Record


def figures(records: Sequence[Record], slo: Slo | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "backend": "radixpd", "request_rate": 4.0, "max_concurrency": None, "paced": True, "ignore_eos": True, "notes": [],
        "p99_loop_lag_ms": 1.0, "client_cpu_share": 0.125, **summarize(records, slo or Slo()), **fields,
    }  # fmt: skip


def value(block: str, label: str) -> str:
    (line,) = [line for line in block.splitlines() if line.startswith(label)]
    return line[40:].strip()


def test_the_block() -> None:
    records = [answered(0.0, 0.5, 1.0, prompt=30, cached=12), answered(1.0, 2.0, 4.0, prompt=10, cached=0), failed(0.0, 4.0, "HTTP 503")]
    block = report.block(figures(records, Slo(ttft_ms=600, tpot_ms=900)), {"HTTP 503": "queue full"})
    expected = {
        "Traffic request rate:": "4.00",
        "Max request concurrency:": "not set",
        "Successful requests:": "2",
        "Failed requests:": "1",
        "Benchmark duration (s):": "4.00",
        "Total input tokens:": "40",
        "Total generated tokens:": "4",
        "Total token throughput (tok/s):": "11.00",
        "Cached tokens:": "12",
        "Cached share of input tokens (%):": "30.00",
        "Mean TTFT (ms):": "750.00",
        "Max ITL (ms):": "2000.00",
        "Goodput (req/s):": "0.25",
        "SLO attainment (%):": "33.33",
        "CPU share of one core (%):": "12.50",
    }
    assert {label: value(block, label) for label in expected} == expected
    assert "failed      1: HTTP 503 (queue full)" in block
    assert "retokenized" not in block  # it was not counted


def test_what_was_not_measured_is_not_printed() -> None:
    record = Record(sent=0.0, end=1.0, streamed=False, prompt_tokens=3, completion_tokens=2)
    block = report.block(figures([record]), {})
    assert "TTFT" not in block
    assert "Inter-Token" not in block
    assert "Cached" not in block
    assert value(block, "Mean E2E Latency (ms):") == "1000.00"


def test_rounds_are_a_table() -> None:
    records = [answered(0.0, 1.0, prompt=100, session=0, turn=0), answered(2.0, 2.5, prompt=200, cached=150, session=0, turn=1)]
    first, second = report.block(figures(records), {}).splitlines()[-2:]
    assert first.split() == ["1", "1", "100.0", "0.0", "1000.0", "1000.0", "1000.0"]
    assert second.split() == ["2", "1", "200.0", "75.0", "500.0", "500.0", "500.0"]


@pytest.mark.parametrize(
    ("records", "fields", "words"),
    [
        ([answered(0.02, 1.0, due=0.0)], {}, "the client was late: 99th percentile of its send lag 20.0 ms"),
        ([answered(0.0, 1.0)], {"p99_loop_lag_ms": 11.0}, "the client was late: 99th percentile of its loop lag"),
        ([answered(0.0, 1.0, counted_by_server=False)], {}, "1 answers came without usage"),
        ([answered(0.0, 1.0, asked_output=5)], {}, "1 answers have fewer tokens than asked for"),
        ([answered(0.0, 1.0, 2.0, counts=[2, 2])], {}, "2.00 tokens came with a chunk"),
        ([answered(0.0, 1.0)], {"notes": ["cut"]}, "cut"),
    ],
)
def test_what_makes_figures_doubtful_is_said(records: list[Record], fields: dict[str, Any], words: str) -> None:
    assert any(warning.startswith(words) for warning in report.warnings(figures(records, **fields)))


def test_a_clean_run_has_no_warnings() -> None:
    assert report.warnings(figures([answered(0.0, 1.0, 2.0)])) == []
    # A burst is all due at once; going out within a small part of the run is not being late.
    burst = [answered(0.02, 1.0, due=0.0)]
    assert report.warnings(figures(burst, paced=False)) == []
    # Outputs may end early where that was asked for.
    assert report.warnings(figures([answered(0.0, 1.0, asked_output=5)], ignore_eos=False)) == []


def test_details_are_one_entry_for_each_request() -> None:
    details = report.details([answered(1.0, 2.0, 2.5), failed(1.0, 3.0, "HTTP 503")])
    assert details["ttfts"] == [1.0, 2.0]
    assert details["itls"] == [[0.5], []]
    assert details["failures"] == [None, "HTTP 503: "]
    assert {len(each) for each in details.values()} == {2}


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    report.append_line(str(path), {"a": 1})
    report.append_line(str(path), {"a": None})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": None}]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--disable-stream", "--slo-ttft-ms", "5"], "need streams"),
        (["--request-rates", "1", "2", "--use-trace-timestamps"], "exclude each other"),
        (["--backend", "radixpd-oai-chat", "--tokenize-prompt"], "takes text only"),
        (["--backend", "vllm-chat", "--dataset-name", "random-ids"], "takes text only"),
        (["--backend", "vllm", "--dataset-name", "multi-turn", "--tokenize-prompt"], "does not return ids"),
        (["--extra-request-body", "[1]", "--model", "m", "--context-length", "99"], "no JSON object"),
        (["--extra-request-body", '{"stream": false}', "--model", "m", "--context-length", "99"], "may not set stream"),
        (["--extra-request-body", '{"sampling_params": 3}', "--model", "m", "--context-length", "99"], "must be an object"),
        (["--port", "1"], "no answer"),
        (["--base-url", "nonsense"], "see --base-url"),
        (["--tokenizer", "/nowhere/at/all", "--model", "m", "--context-length", "99"], "/nowhere/at/all"),
    ],
)
def test_what_cannot_start_ends_with_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--num-prompts", "0"],
        ["--random-range-ratio", "1.5"],
        ["--backend", "trt"],
        ["--dataset-name", "image"],
        ["--no-such-flag"],
    ],
)
def test_flags_out_of_range_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert argv[0] in capsys.readouterr().err
