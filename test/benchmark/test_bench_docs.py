"""docs/benchmarks.md speaks of every flag, dataset, backend and figure that there is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmark.backends import BACKENDS
from benchmark.bench_serving import ServingOptions
from benchmark.report import COUNTS, LATENCIES
from benchmark.workloads import DATASETS, NAMES, DatasetOptions

DOCS = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
FLAGS = ["--" + field.name.replace("_", "-") for holder in (ServingOptions, DatasetOptions) for field in dataclasses.fields(holder)]


@pytest.mark.parametrize("word", [*FLAGS, *BACKENDS])
def test_every_flag_and_backend_is_described(word: str) -> None:
    assert f"`{word}`" in DOCS or f"`{word} " in DOCS


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_has_a_row(name: str) -> None:
    assert f"| `{name}` |" in DOCS
    assert name in NAMES


def test_every_figure_is_in_the_example() -> None:
    labels = [label for label, key in COUNTS if key != "total_output_tokens_retokenized"]
    labels += [f"{kind.capitalize()} {name} (ms):" for _, name, _, kinds in LATENCIES for kind in kinds]
    assert [label for label in labels if f"\n{label} " not in DOCS] == []
