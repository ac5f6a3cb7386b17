"""Settings from a program's keywords: the same values, checks and words as the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixpd.config.cli import from_keywords, parse
from radixpd.errors import ConfigError


def fault(**keywords: Any) -> str:
    with pytest.raises(ConfigError) as error:
        from_keywords(keywords)
    return str(error.value)


@pytest.mark.parametrize(
    ("keywords", "argv"),
    [
        ({"model_path": "demo"}, ["--model-path", "demo"]),
        ({"model": "demo", "tp": 1}, ["--model", "demo", "--tp", "1"]),
        ({"model_path": Path("/m"), "tokenizer_path": None}, ["--model-path", "/m"]),
        ({"model_path": "demo", "page_size": 4, "log_requests": True}, ["--model-path", "demo", "--page-size=4", "--log-requests"]),
        ({"model_path": "demo", "api_key": ("a", "b")}, ["--model-path", "demo", "--api-key", "a", "b"]),
        ({"model_path": "demo", "kv_events_config": {"topic": "t"}}, ["--model-path", "demo", "--kv-events-config", '{"topic": "t"}']),
    ],
)
def test_keywords_mean_what_flags_mean(keywords: dict[str, Any], argv: list[str]) -> None:
    assert from_keywords(keywords) == parse(argv)


def test_every_fault_names_what_is_wrong() -> None:
    assert fault(model_path="demo", page_sice=4) == "page_sice: there is no such setting; the nearest is page_size"
    assert fault(model_path="demo", page_size=0) == "--page-size 0: it must be an integer from 1 to 512"
    assert fault(model_path="demo", page_size=float("nan")).startswith("--page-size nan: ")
    assert fault(model_path="demo", disable_radix_cache=1) == "--disable-radix-cache 1: give true or false"
    assert fault(model_path="demo", speculative_algorithm="EAGLE").startswith("speculative_algorithm: radixpd ")
    assert fault(model_path="a", model="b") == "model is given twice, under another name too"
    assert fault(page_size=4).startswith("--model-path is missing")


def test_keywords_win_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("page-size: 4\nmodel-path: demo\nport: 1\n")
    settings = from_keywords({"config": file, "page_size": 8})
    assert (settings.cache.page_size, settings.model.model_path, settings.server.port) == (8, "demo", 1)
    assert fault(config=tmp_path / "none.yaml").startswith("--config ")
