"""Pictures of runs: which files, which axis, which points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark import plot
from radixpd.errors import ConfigError

PNG = b"\x89PNG\r\n"


def line(rate: Any, **fields: Any) -> dict[str, Any]:
    return {
        "backend": "radixpd", "dataset_name": "random", "tag": None, "request_rate": rate, "max_concurrency": None, "completed": 10,
        "total_output_tokens": 200, "output_throughput": 20.0, "median_ttft_ms": 5.0, "p99_ttft_ms": 50.0, "median_itl_ms": 2.0,
        "p99_itl_ms": 9.0, **fields,
    }  # fmt: skip


def write(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(path)


def test_one_picture_for_each_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write(tmp_path / "runs.jsonl", line(1.0), line(2.0), line(2.0, output_throughput=30.0), line(16.0))
    assert plot.main([runs, "--out", str(tmp_path / "new" / "plots")]) == 0
    files = sorted((tmp_path / "new" / "plots").iterdir())
    assert [file.name for file in files] == ["itl.png", "throughput.png", "ttft.png"]
    assert all(file.read_bytes().startswith(PNG) for file in files)
    assert sorted(capsys.readouterr().out.splitlines()) == [str(file) for file in files]


def test_goodput_has_a_picture_when_it_was_asked_for(tmp_path: Path) -> None:
    names = [path.name for path in plot.draw([line(1.0, slo_attainment=1.0), line(2.0, slo_attainment=0.5)], tmp_path)]
    assert "goodput.png" in names


def test_runs_without_streams_and_runs_without_answers_are_drawn_as_gaps(tmp_path: Path) -> None:
    silent = {"median_ttft_ms": None, "p99_ttft_ms": None, "median_itl_ms": None, "p99_itl_ms": None, "completed": 0}
    assert plot.draw([line(1.0, **silent), line(2.0, **silent)], tmp_path)


def test_the_axis_is_the_rate_or_else_the_concurrency() -> None:
    assert plot.axis_of([line(1.0), line(2)])[0] == "request_rate"
    assert plot.axis_of([line("inf", max_concurrency=1), line("inf", max_concurrency=2)])[0] == "max_concurrency"
    with pytest.raises(ConfigError, match="--request-rate"):
        plot.axis_of([line("inf"), line(1.0)])


def test_series_are_tags_or_else_what_was_measured() -> None:
    found = plot.series_of([line(1.0, tag="a"), line(1.0, tag="b"), line(2.0, tag="a"), line(1.0)])
    assert {name: len(lines) for name, lines in found.items()} == {"a": 2, "b": 1, "radixpd, random": 1}


@pytest.mark.parametrize("text", ["", "not json\n", "[1]\n"])
def test_files_that_hold_no_runs_are_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(text)
    assert plot.main([str(path), "--out", str(tmp_path)]) == 2
    assert plot.main([str(tmp_path / "none.jsonl"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("plot: ") == 2
