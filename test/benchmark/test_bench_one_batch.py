"""The benchmark of the runner alone: its plans are right plans, its figures what the clock says, and it runs on a real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from e2e.servers import tiny_chat_model
from fakes import VOCAB, FakeRunner, continuation

from benchmark.bench_one_batch import GREEDY, Combination, main, measure, plans, sized, table
from radixpd.config.cli import parse
from radixpd.core.step import StepPlan, StepResult

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("combination", [Combination(1, 1, 1), Combination(3, 7, 5), Combination(2, 8, 8), Combination(4, 9, 2)])
def test_plans_make_the_tokens_that_each_prompt_gets_alone(combination: Combination) -> None:
    """The fake runner finds a wrong page, slot or position."""
    batch, pages = combination.batch_size, combination.pages(4)
    prompts = np.random.default_rng(0).integers(VOCAB, size=(batch, combination.input_len), dtype=np.int32)
    runner = FakeRunner(pages=batch * pages, page_size=4, slots=batch, context_length=32)
    results = [runner.step(plan) for plan in plans(combination, prompts, page_size=4)]
    assert len(results) == combination.output_len
    for slot in range(batch):
        assert [int(result.tokens[slot]) for result in results] == continuation(prompts[slot], GREEDY, count=combination.output_len)


def test_figures_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    seconds = iter([2.0, 0.1, 0.5, 0.2])

    class Runner:
        def step(self, plan: StepPlan) -> StepResult:
            nonlocal now
            now += next(seconds)
            return StepResult(plan.step, plan.sample_slots)

    monkeypatch.setattr("benchmark.bench_one_batch.time.perf_counter", lambda: now)
    figures = measure(Runner(), Combination(4, 10, 4), np.zeros((4, 10), dtype=np.int32), page_size=4)
    assert figures == pytest.approx(
        {
            "batch_size": 4,
            "input_len": 10,
            "output_len": 4,
            "prefill_latency": 2.0,
            "prefill_throughput": 20.0,
            "median_decode_latency_ms": 200.0,
            "median_decode_throughput": 20.0,
            "total_latency": 2.8,
            "overall_throughput": 20.0,
        }
    )
    seconds = iter([1.0])
    one = measure(Runner(), Combination(1, 10, 1), np.zeros((1, 10), dtype=np.int32), page_size=4)
    assert one["median_decode_latency_ms"] is None
    head, first, second = table([figures, one]).splitlines()
    assert head.split() == ["batch", "input", "output", "prefill", "s", "tok/s", "decode", "ms", "tok/s", "total", "s", "tok/s"]
    assert first.split() == ["4", "10", "4", "2.0000", "20.0", "200.00", "20.0", "2.800", "20.0"]
    assert second.split() == ["1", "10", "1", "1.0000", "10.0", "-", "-", "1.000", "11.0"]


def test_the_pool_fits_the_largest_batch_unless_flags_say_otherwise() -> None:
    combinations = [Combination(1, 100, 3), Combination(8, 20, 12)]
    found = sized(parse(["--model-path", "m", "--page-size", "16"]), combinations)
    assert (found.cache.max_total_tokens, found.scheduler.max_running_requests) == (8 * 32, 8)
    told = parse(["--model-path", "m", "--max-total-tokens", "64", "--max-running-requests", "2"])
    assert sized(told, combinations) == told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--input-len", "4090"], "--input-len and --output-len make 4106 tokens; the model's context has 4096"),
        (["--batch-size", "1", "8", "--max-total-tokens", "2048"], "--batch-size 8 needs 520 pages; --max-total-tokens makes 128"),
        (["--batch-size", "8", "--max-running-requests", "2"], "--batch-size 8 is more than --max-running-requests 2"),
        (["--profile"], "--profile needs --profile-folder"),
        (["--bananas"], "unknown flag --bananas"),
    ],
)
def test_what_does_not_fit_is_one_line(flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", str(tiny_chat_model(tmp_path)), *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"bench_one_batch: {words}")


def test_a_run_on_a_real_model(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    model, file, folder = tiny_chat_model(tmp_path / "m"), tmp_path / "runs.jsonl", tmp_path / "traces"
    command = [sys.executable, "-m", "benchmark.bench_one_batch", "--model-path", str(model), "--threads", "1"]
    command += ["--batch-size", "1", "3", "--input-len", "8", "17", "--output-len", "4", "--result-filename", str(file)]
    # A process of its own: torch's settings are for good.
    done = subprocess.run(
        [*command, "--profile", "--profile-folder", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["batch_size"], line["input_len"]) for line in lines] == [(1, 8), (1, 17), (3, 8), (3, 17)]
    assert all(line["prefill_latency"] > 0 < line["median_decode_latency_ms"] for line in lines)
    assert sorted(line["profile"] for line in lines) == sorted(str(trace) for trace in folder.iterdir())
    assert len(done.stdout.splitlines()) == 4 + 5
