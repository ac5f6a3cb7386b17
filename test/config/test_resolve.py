"""Deciding what was left open: from the model, the machine and the other settings."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from radixpd.config.resolve import (
    KVEvents,
    MachineFacts,
    ModelFacts,
    Resolved,
    from_json,
    public_view,
    resolve,
    to_json,
)
from radixpd.config.secret import Secret
from radixpd.config.settings import (
    CacheSettings,
    EngineSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
)
from radixpd.errors import ConfigError
from radixpd.kv.layout import KVLayout

GIB = 2**30
MODEL = ModelFacts(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=16,
    hidden=128,
    intermediate=256,
    context_length=2048,
    dtype="bfloat16",
    tied=True,
    eos_ids=(2, 7),
)
MACHINE = MachineFacts(available_memory=16 * GIB, cores=3)
SETTINGS = Settings(model=ModelSettings(model_path="some/model"))


def decide(settings: Settings = SETTINGS, *, model: ModelFacts = MODEL, machine: MachineFacts = MACHINE, seed: int = 5) -> Resolved:
    return resolve(settings, directory="/models/x", tokenizer_directory="/models/y", model=model, machine=machine, seed=seed)


def cached(**fields: object) -> Settings:
    return replace(SETTINGS, cache=replace(CacheSettings(), **fields))  # type: ignore[arg-type]


def scheduled(**fields: object) -> Settings:
    return replace(SETTINGS, scheduler=replace(SchedulerSettings(), **fields))  # type: ignore[arg-type]


def fault(settings: Settings, *, model: ModelFacts = MODEL, machine: MachineFacts = MACHINE) -> str:
    with pytest.raises(ConfigError) as caught:
        decide(settings, model=model, machine=machine)
    return str(caught.value)


def test_defaults() -> None:
    resolved = decide()
    assert resolved.context_length == 2048
    assert resolved.dtype == "bfloat16"
    assert resolved.max_running == 256
    assert resolved.settings.scheduler.chunked_prefill_size == 512
    assert (resolved.threads, resolved.seed, resolved.depth) == (3, 5, 1)
    assert resolved.served_name == "some/model"
    assert resolved.eos_ids == (2, 7)
    assert resolved.kv_events is None


def test_given_values_stay() -> None:
    settings = replace(
        scheduled(max_running_requests=3, chunked_prefill_size=-1, disable_overlap_schedule=True),
        engine=EngineSettings(threads=1, random_seed=0),
        model=ModelSettings(model_path="x", served_model_name="y", context_length=100, dtype="float32"),
    )
    resolved = decide(settings)
    assert (resolved.max_running, resolved.threads, resolved.seed, resolved.depth) == (3, 1, 0, 0)
    assert resolved.settings.scheduler.chunked_prefill_size == -1
    assert (resolved.served_name, resolved.context_length, resolved.dtype) == ("y", 100, "float32")


@pytest.mark.parametrize(
    ("checkpoint", "chosen"), [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32"), ("int8", "float32")]
)
def test_dtype_follows_the_checkpoint(checkpoint: str, chosen: str) -> None:
    assert decide(model=replace(MODEL, dtype=checkpoint)).dtype == chosen


def test_the_default_pool_is_a_quarter_of_free_memory_up_to_8_gib() -> None:
    page_bytes = 4 * KVLayout(**decide().layout).page_bytes
    assert decide().pages == 4 * GIB // page_bytes
    assert decide(machine=MachineFacts(available_memory=100 * GIB, cores=1)).pages == 8 * GIB // page_bytes
    assert "4.00 GiB" in decide().notes[0]


def test_a_share_of_memory_sizes_the_pool() -> None:
    page_bytes = 4 * KVLayout(**decide().layout).page_bytes
    assert decide(cached(mem_fraction_static=0.5)).pages == 8 * GIB // page_bytes


def test_max_total_tokens_wins_and_is_whole_pages() -> None:
    resolved = decide(cached(max_total_tokens=100, page_size=16, mem_fraction_static=0.5))
    assert (resolved.pages, resolved.pool_tokens, resolved.settings.cache.max_total_tokens) == (6, 96, 96)
    assert resolved.longest_request == 96
    assert resolved.max_running == 3


def test_too_much_for_the_machine_names_sizes_and_options() -> None:
    message = fault(cached(max_total_tokens=2**30))
    assert "--max-total-tokens 1073741824" in message
    assert "512.00 GiB" in message
    assert "16.00 GiB" in message


def test_too_little_memory() -> None:
    tiny = MachineFacts(available_memory=2 * 2**20, cores=1)
    assert "--page-size" in fault(cached(page_size=512, mem_fraction_static=0.01), machine=tiny)
    message = fault(SETTINGS, machine=MachineFacts(available_memory=2**20, cores=1))
    assert "--model-path" in message
    assert "--dtype" in message
    assert "1.00 MiB" in message


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        (scheduled(chunked_prefill_size=600, max_prefill_tokens=512), ("--chunked-prefill-size 600", "--max-prefill-tokens 512")),
        (scheduled(chunked_prefill_size=-1, enable_mixed_chunk=True), ("--chunked-prefill-size -1", "--enable-mixed-chunk")),
        (cached(kv_events_config="{}", disable_radix_cache=True), ("--kv-events-config", "--disable-radix-cache")),
        (cached(max_total_tokens=15, page_size=16), ("--max-total-tokens 15", "--page-size is 16")),
        (replace(SETTINGS, model=ModelSettings(model_path="x", context_length=4096)), ("--context-length 4096", "2048", "--model-path x")),
        (scheduled(chunked_prefill_size=0), ("--chunked-prefill-size 0", "-1")),
    ],
)
def test_settings_that_do_not_fit_together_are_both_named(settings: Settings, flags: tuple[str, ...]) -> None:
    message = fault(settings)
    assert all(flag in message for flag in flags), message


def test_a_chunk_never_exceeds_a_step() -> None:
    assert decide(scheduled(max_prefill_tokens=100)).settings.scheduler.chunked_prefill_size == 100


@pytest.mark.parametrize(("policy", "becomes"), [("lpm", "fcfs"), ("dfs-weight", "fcfs"), ("random", "random"), ("priority", "priority")])
def test_cache_aware_policies_need_the_cache(policy: str, becomes: str) -> None:
    with_cache = scheduled(schedule_policy=policy)
    assert decide(with_cache).settings.scheduler.schedule_policy == policy
    without = decide(replace(with_cache, cache=CacheSettings(disable_radix_cache=True)))
    assert without.settings.scheduler.schedule_policy == becomes
    assert any(policy in note for note in without.notes) == (policy != becomes)


def test_kv_events() -> None:
    text = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:1", "replay_endpoint": null, "topic": "kv"}'
    assert decide(cached(kv_events_config=text)).kv_events == KVEvents(endpoint="tcp://127.0.0.1:1", topic="kv")
    assert decide(cached(kv_events_config='{"publisher": "null"}')).kv_events is None
    assert decide(cached(kv_events_config='{"enable_kv_cache_events": false}')).kv_events is None


@pytest.mark.parametrize("text", ["{", "[]", '{"endpont": "x"}', '{"publisher": "kafka"}', '{"topic": 3}', '{"enable_kv_cache_events": 1}'])
def test_a_bad_kv_events_config_is_named(text: str) -> None:
    assert "--kv-events-config" in fault(cached(kv_events_config=text))


KEY_LETTERS = st.characters(min_codepoint=33, max_codepoint=126)
settings_strategy = st.builds(
    Settings,
    model=st.builds(
        ModelSettings,
        model_path=st.text(min_size=1, max_size=5),
        dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
        context_length=st.none() | st.integers(16, 4096),
    ),
    cache=st.builds(
        CacheSettings,
        page_size=st.integers(1, 512),
        max_total_tokens=st.none() | st.integers(1, 2**24),
        mem_fraction_static=st.none() | st.floats(0.01, 0.95),
        disable_radix_cache=st.booleans(),
    ),
    scheduler=st.builds(
        SchedulerSettings,
        max_running_requests=st.none() | st.integers(1, 65536),
        max_prefill_tokens=st.integers(1, 2**16),
        chunked_prefill_size=st.none() | st.integers(-1, 2**16),
        schedule_policy=st.sampled_from(["fcfs", "lpm"]),
        enable_mixed_chunk=st.booleans(),
    ),
    server=st.builds(ServerSettings, api_key=st.lists(st.text(KEY_LETTERS, min_size=1).map(Secret), max_size=3).map(tuple)),
)
machines = st.builds(MachineFacts, available_memory=st.integers(2**20, 2**40), cores=st.integers(1, 256))


@given(settings=settings_strategy, machine=machines, seed=st.integers(0, 2**62))
def test_whatever_resolves_fits(settings: Settings, machine: MachineFacts, seed: int) -> None:
    try:
        resolved = decide(settings, machine=machine, seed=seed)
    except ConfigError:
        reject()
    final = resolved.settings
    layout = KVLayout(**resolved.layout)
    weights = MODEL.parameters * (2 if resolved.dtype == "bfloat16" else 4)
    assert resolved.pages >= 1
    assert resolved.pages * layout.page_size * layout.token_bytes + weights <= machine.available_memory
    assert final.cache.max_total_tokens == resolved.pool_tokens
    assert 1 <= resolved.longest_request <= min(resolved.context_length, resolved.pool_tokens)
    assert resolved.context_length <= MODEL.context_length
    assert resolved.max_running >= 1
    assert final.scheduler.chunked_prefill_size is not None
    assert final.scheduler.chunked_prefill_size <= final.scheduler.max_prefill_tokens
    assert from_json(to_json(resolved)) == resolved
    again = decide(final, machine=machine, seed=seed + 1)
    assert again.settings == final


def every(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_the_public_view_is_json_and_complete() -> None:
    view = json.loads(json.dumps(public_view(decide())))
    groups = tuple(typing.get_type_hints(Settings).values())
    assert {name for group in groups for name in every(group)} - view.keys() == {"api_key", "admin_api_key"}
    assert view["page_size"] == 16
    assert view["max_total_num_tokens"] == decide().pool_tokens
    assert "/models" not in str(view)


def test_secrets_travel_in_the_json_only() -> None:
    resolved = decide(replace(SETTINGS, server=ServerSettings(api_key=(Secret("hush-1"), Secret("hush-2")))))
    for shown in (
        repr(resolved),
        str(resolved),
        f"{resolved}",
        repr(resolved.settings),
        json.dumps(public_view(resolved)),
        *resolved.notes,
    ):
        assert "hush" not in shown
    copy = from_json(to_json(resolved))
    assert copy == resolved
    assert [key.reveal() for key in copy.settings.server.api_key] == ["hush-1", "hush-2"]
    assert "hush" not in repr(copy)
