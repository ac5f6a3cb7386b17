"""The benchmark of masks: batches take turns, figures are those of the clock, and it runs on a real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from e2e.servers import tiny_chat_model

from benchmark.bench_masks import Seconds, figures, main, turns
from radixpd.core.step import StepPlan, StepResult

ROOT = Path(__file__).parents[2]


def test_batches_take_turns() -> None:
    times = iter([0.0, 1.0, 5.0, 7.0, 7.0, 8.0, 10.0, 13.0])
    seen = []

    class Runner:
        def step(self, plan: StepPlan) -> StepResult:
            seen.append(plan.step)
            return StepResult(plan.step, plan.sample_slots)

    none = np.empty(0, dtype=np.int32)
    plans = [
        iter([StepPlan(step, none, none, none, sample_rows=none, sample_slots=none) for step in steps]) for steps in ((1, 2), (11, 12))
    ]
    one, other = turns(Runner(), plans, now=lambda: Seconds(next(times), 0.0))
    assert seen == [1, 11, 2, 12]
    assert ([each.clock for each in one], [each.clock for each in other]) == ([1.0, 1.0], [2.0, 3.0])


def test_the_overhead_is_a_share_of_a_free_step() -> None:
    found = figures([Seconds(0.1, 0.2)] * 3, [Seconds(0.11, 0.3), Seconds(0.105, 0.2), Seconds(9.0, 0.2)])
    assert found == pytest.approx(
        {
            "clock_free_ms": 100, "clock_masked_ms": 110, "clock_overhead_percent": 10,
            "processor_free_ms": 200, "processor_masked_ms": 200, "processor_overhead_percent": 0,
        }
    )  # fmt: skip


def test_without_grammars_there_is_nothing_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", str(tiny_chat_model(tmp_path)), "--grammar-backend", "none"]) == 2
    assert "--grammar-backend none" in capsys.readouterr().err


@pytest.mark.full
def test_a_run_on_a_real_model(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    model, file = tiny_chat_model(tmp_path / "m"), tmp_path / "runs.jsonl"
    command = [sys.executable, "-m", "benchmark.bench_masks", "--model-path", str(model), "--threads", "1"]
    command += ["--batch-size", "3", "--steps", "5", "--input-len", "9", "--result-filename", str(file)]
    # A process of its own: torch's settings are for good.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [json.loads(text) for text in file.read_text().splitlines()]
    assert (line["batch_size"], line["backend"]) == (3, "xgrammar")
    assert line["processor_masked_ms"] > 0 < line["clock_free_ms"]
    assert "overhead" in done.stdout
