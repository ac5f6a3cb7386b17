"""Reading the model's config files and the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixpd.config import facts
from radixpd.config.facts import read_machine_facts, read_model_facts
from radixpd.errors import ConfigError

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "eos_token_id": 5,
}


def directory(where: Path, config: object = CONFIG, generation: object = None) -> Path:
    (where / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (where / "generation_config.json").write_text(json.dumps(generation))
    return where


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIG.items() if key not in names}


def test_a_full_config(tmp_path: Path) -> None:
    model = read_model_facts(directory(tmp_path))
    assert (model.architecture, model.vocab_size, model.layers, model.heads, model.kv_heads) == ("Qwen3ForCausalLM", 100, 2, 4, 2)
    assert (model.head_dim, model.hidden, model.context_length, model.dtype, model.eos_ids) == (32, 64, 512, "bfloat16", (5,))


def test_what_may_be_left_out(tmp_path: Path) -> None:
    model = read_model_facts(directory(tmp_path, without("num_key_value_heads", "head_dim", "torch_dtype", "eos_token_id")))
    assert (model.kv_heads, model.head_dim, model.dtype, model.eos_ids) == (4, 128, "float32", ())  # Qwen3: 128, not hidden / heads


def test_the_newer_name_of_dtype(tmp_path: Path) -> None:
    assert read_model_facts(directory(tmp_path, CONFIG | {"dtype": "float16"})).dtype == "float16"


def test_generation_config_decides_the_end(tmp_path: Path) -> None:
    assert read_model_facts(directory(tmp_path, generation={"eos_token_id": [8, 9]})).eos_ids == (8, 9)


def test_a_generation_config_without_end_leaves_it_to_config(tmp_path: Path) -> None:
    assert read_model_facts(directory(tmp_path, generation={})).eos_ids == (5,)


def test_parameters_count_the_matrices(tmp_path: Path) -> None:
    attention = 64 * 4 * 32 * 2 + 64 * 2 * 32 * 2
    layers = 2 * (attention + 3 * 64 * 96)
    assert read_model_facts(directory(tmp_path)).parameters == layers + 100 * 64
    untied = directory(tmp_path, CONFIG | {"tie_word_embeddings": False})
    assert read_model_facts(untied).parameters == layers + 2 * 100 * 64


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (without("architectures"), "no architecture"),
        (without("vocab_size"), "no vocab_size"),
        (CONFIG | {"num_hidden_layers": 0}, "num_hidden_layers 0"),
        (CONFIG | {"hidden_size": "64"}, "hidden_size '64'"),
        (CONFIG | {"eos_token_id": "end"}, "eos_token_id 'end'"),
        ([], "not a JSON object"),
    ],
)
def test_faults_name_the_flag(tmp_path: Path, config: object, part: str) -> None:
    with pytest.raises(ConfigError, match=r"--model-path") as caught:
        read_model_facts(directory(tmp_path, config))
    assert part in str(caught.value)


def test_no_config_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model-path: no config.json"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"--model-path: cannot read config.json"):
        read_model_facts(tmp_path)


def test_the_machine_has_memory_and_cores() -> None:
    machine = read_machine_facts()
    assert machine.available_memory > 0
    assert machine.cores >= 1


def test_a_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4096 kB\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(facts, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(facts, "CGROUP", tmp_path)
    for limit, free in (("max", 4096 * 1024), ("5000", 4000), ("500", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert read_machine_facts().available_memory == free


def test_what_the_models_authors_recommend(tmp_path: Path) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "do_sample": True, "eos_token_id": 5, "max_length": 20}
    assert read_model_facts(directory(tmp_path, generation=recommended)).sampling == {"temperature": 0.6, "top_p": 0.9}
    assert read_model_facts(directory(tmp_path, generation={})).sampling == {}
