"""The offline benchmark: figures of a made-up engine, flags that go on to the engine, and a whole run on a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e.servers import tiny_chat_model

from benchmark.bench_offline import OfflineOptions, block, engine_keywords, main, measure
from benchmark.workloads import Request, Workload
from radixpd.config.cli import parse
from radixpd.config.settings import Settings


class Engine:
    """Answers every prompt as asked; half of each prompt is cached, and time is made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.asked: list[Any] = []
        self.retractions = 7
        monkeypatch.setattr("benchmark.bench_offline.time.perf_counter", lambda: self.now)

    def get_server_info(self) -> dict[str, Any]:
        return {"load": {"retractions_total": self.retractions}}

    def generate(self, prompts: list[str], sampling: list[dict[str, Any]], *, use_tqdm: bool) -> list[dict[str, Any]]:
        self.asked = [prompts, sampling, use_tqdm]
        self.now += 4.0
        self.retractions += 2
        lengths = [(len(prompt), params["max_new_tokens"]) for prompt, params in zip(prompts, sampling, strict=True)]
        return [{"meta_info": {"prompt_tokens": p, "completion_tokens": c, "cached_tokens": p // 2}} for p, c in lengths]


def test_figures_are_tokens_over_the_time_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    workload = Workload((Request("x" * 10, 3, 10), Request("y" * 30, 5, 31)), ("a note",))
    figures = measure(engine, workload, OfflineOptions(disable_tqdm=True))
    assert engine.asked[0] == ["x" * 10, "y" * 30]
    assert engine.asked[1] == [{"max_new_tokens": count, "ignore_eos": True, "temperature": 0.0} for count in (3, 5)]
    assert engine.asked[2] is False
    assert figures == {
        "completed": 2,
        "duration": 4.0,
        "total_input_tokens": 40,
        "total_output_tokens": 8,
        "request_throughput": 0.5,
        "input_throughput": 10.0,
        "output_throughput": 2.0,
        "total_throughput": 12.0,
        "total_cached_tokens": 20,
        "cache_hit_rate": 0.5,
        "retractions": 2,
        "notes": ["a note", "1 of 2 prompts have other lengths than planned"],
    }
    shown = block(figures)
    assert "Output token throughput (tok/s):         2.00\n" in shown
    assert "Cached share of input tokens (%):        50.00\n" in shown


def test_flags_of_the_engine_are_its_keywords() -> None:
    assert engine_keywords(Settings()) == {}
    argv = ["--model-path", "demo", "--page-size", "4", "--disable-radix-cache", "--schedule-policy", "lpm"]
    assert engine_keywords(parse(argv)) == {"model_path": "demo", "page_size": 4, "disable_radix_cache": True, "schedule_policy": "lpm"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model-path", "demo", "--page-sice", "4"], "unknown flag --page-sice; the nearest is --page-size"),
        (["--model-path", "demo", "--port", "4"], "port: this is for a server"),
        (["--model-path", "demo", "--dataset-name", "multi-turn"], "--dataset-name multi-turn needs the answers of earlier rounds"),
        (["--model-path", "demo", "--use-trace-timestamps"], "--use-trace-timestamps: everything is handed over at once"),
        ([], "--model-path is missing"),
    ],
)
def test_what_cannot_run_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench_offline: {words}")


def test_a_run_on_a_real_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = tiny_chat_model(tmp_path), tmp_path / "runs.jsonl"
    dataset = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "2", "--gsp-prompts-per-group", "6"]
    lengths = ["--gsp-system-prompt-len", "64", "--gsp-question-len", "8", "--gsp-output-len", "3"]
    engine = ["--model-path", str(model), "--max-total-tokens", "2048", "--max-running-requests", "2", "--threads", "1"]
    assert main([*dataset, *lengths, *engine, "--result-filename", str(file), "--tag", "t", "--disable-tqdm"]) == 0
    (line,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (line["completed"], line["total_input_tokens"], line["total_output_tokens"]) == (12, 12 * 72, 36)
    # The first of each group computes the system prompt, and the second slot may as well.
    assert line["total_cached_tokens"] >= 8 * 64
    assert (line["tag"], line["notes"], line["engine"]["max_total_tokens"], line["dataset"]["gsp_num_groups"]) == ("t", [], 2048, 2)
    assert "Offline Throughput Benchmark Result" in capsys.readouterr().out
