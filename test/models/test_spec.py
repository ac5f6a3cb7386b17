"""Reading config.json: both transformers' forms, defaults, and everything that must be refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import ROPES, tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from radixpd.errors import ConfigError
from radixpd.models.families import FAMILIES
from radixpd.models.rope import inverse_frequencies
from radixpd.models.spec import ModelSpec, RopeSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config(LLAMA | changes)


def test_a_plain_llama() -> None:
    assert spec() == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden=128,
        layers=3,
        heads=8,
        kv_heads=2,
        head_dim=16,
        intermediate=256,
        context_length=4096,
        rms_eps=1e-5,
        rope=RopeSpec(theta=10000.0),
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "flags"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("MistralForCausalLM", {"sliding_window": None, "attention_bias": True}, (False, False, False, False)),
        ("Qwen2ForCausalLM", {"attention_bias": False}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_families_differ_by_table(architecture: str, changes: dict[str, Any], flags: tuple[bool, ...]) -> None:
    got = spec(architectures=[architecture], **changes)
    assert (got.qkv_bias, got.o_bias, got.mlp_bias, got.qk_norm) == flags
    assert architecture in FAMILIES


def test_head_dim_is_the_configs_or_the_familys_or_derived() -> None:
    assert spec(head_dim=64).head_dim == 64
    assert spec(head_dim=None).head_dim == 16
    assert spec(architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_absent_kv_heads_mean_one_per_query_head() -> None:
    assert spec(num_key_value_heads=None).kv_heads == 8


@pytest.mark.parametrize("name", ROPES)
def test_both_forms_of_rope_read_alike(name: str) -> None:
    new = dict(ROPES[name])
    old = {key: value for key, value in new.items() if key not in ("rope_theta", "rope_type")}
    by_type = {"type": new["rope_type"], **old} if old else None
    wanted = spec(rope_parameters=new).rope
    assert spec(rope_theta=new["rope_theta"], rope_scaling=by_type).rope == wanted
    assert spec(rope_parameters={"full_attention": new}).rope == wanted
    assert wanted.theta == new["rope_theta"]


@pytest.mark.parametrize("name", [name for name in ROPES if name != "none"])
def test_rope_frequencies_and_factor_equal_transformers(name: str) -> None:
    config = tiny_model("llama", rope_parameters=dict(ROPES[name])).config
    wanted, factor = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config)
    ours = ModelSpec.from_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    assert inverse_frequencies(ours.rope, ours.head_dim).tolist() == pytest.approx(wanted.tolist(), rel=1e-6)
    assert ours.rope.attention_factor == pytest.approx(factor)


def test_an_explicit_yarn_attention_factor_wins() -> None:
    assert spec(rope_parameters={**ROPES["yarn-mscale"], "attention_factor": 1.25}).rope.attention_factor == 1.25


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": 1024}),
        ("MistralForCausalLM", {"max_position_embeddings": 32768}),  # absent: 4096
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 2}),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 0}),
    ],
)
def test_an_active_sliding_window_is_refused(architecture: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sliding"):
        spec(architectures=[architecture], **changes)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": None}),
        ("MistralForCausalLM", {"sliding_window": 4096}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 1024, "max_window_layers": 0}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 3}),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 3}),
    ],
)
def test_an_idle_sliding_window_is_accepted(architecture: str, changes: dict[str, Any]) -> None:
    assert spec(architectures=[architecture], **changes).context_length == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number, not None"),
        ({"rope_parameters": {**ROPES["llama3"], "high_freq_factor": 1.0}}, "high_freq_factor must be greater"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "128"}, "hidden_size must be a positive integer, not '128'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"vocab_size": 10**400}, "vocab_size must be a positive integer"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture .* is not supported"),
        ({"rope_parameters": "x"}, "rope_parameters must be an object, not 'x'"),
        ({"rope_scaling": ["linear", 2.0]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention must be an object, not 3"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope type .* is not supported"),
        ({"rope_scaling": {**ROPES["yarn"], "mscale": "x", "mscale_all_dim": 1.0}}, "mscale must be a positive number, not 'x'"),
        ({"rope_scaling": {**ROPES["yarn"], "truncate": "no"}}, "truncate must be true or false, not 'no'"),
        ({"layer_types": 3}, "layer_types must be a list, not 3"),
        ({"layer_types": [["full_attention"]]}, "layer_types .* is not supported"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        ({"attention_bias": 1}, "attention_bias must be true or false, not 1"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "4k"}, "sliding_window must be a positive integer, not '4k'"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": "x"},
            "max_window_layers must be",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(**changes)
