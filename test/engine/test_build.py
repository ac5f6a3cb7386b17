"""A real (tiny, random) model through `build_runner`: the parts fit together, and chunks and batches do not change tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from radixpd.config.facts import MachineFacts, read_model_facts
from radixpd.config.resolve import Resolved, resolve
from radixpd.config.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings, Settings
from radixpd.core.request import SamplingParams
from radixpd.core.step import SlotBegin, StepPlan
from radixpd.engine.build import build_runner
from radixpd.engine.runner import Runner
from radixpd.errors import ConfigError

pytestmark = pytest.mark.usefixtures("restore_torch")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def resolved(directory: Path, *, dtype: str = "float32", tokens: int = 256) -> Resolved:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    settings = Settings(
        model=ModelSettings(model_path=str(directory), load_format="dummy", dtype=dtype),
        cache=CacheSettings(page_size=8, max_total_tokens=tokens),
        scheduler=SchedulerSettings(max_running_requests=4),
        engine=EngineSettings(threads=1),
    )
    machine = MachineFacts(available_memory=2**50, cores=1)
    facts = read_model_facts(directory)
    return resolve(settings, directory=str(directory), tokenizer_directory=str(directory), model=facts, machine=machine, seed=7)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def generate(runner: Runner, slot: int, prompt: list[int], *, chunk: int, count: int) -> list[int]:
    """Greedy tokens of one slot, which gets pages of its own."""
    begin = SlotBegin(slot, ids(*prompt), len(prompt), 0, SamplingParams(temperature=0.0))
    place = np.arange(8, dtype=np.int32)
    pages = {"page_slots": np.full(8, slot, dtype=np.int32), "page_positions": place, "page_ids": place[::-1] + 8 * slot}
    output: list[int] = []
    start = 0
    while len(output) < count:
        length = min(chunk, len(prompt) - start) if start < len(prompt) else 1
        sample = ids(0) if start + length >= len(prompt) else ids()
        more = {"begins": (begin,), **pages} if start == 0 else {}
        output += runner.step(StepPlan(start, ids(slot), ids(start), ids(length), sample, sample * 0 + slot, **more)).tokens.tolist()
        start += length
    return output


def test_chunks_do_not_change_tokens(tmp_path):
    runner = build_runner(resolved(tmp_path))
    prompt = np.random.default_rng(0).integers(3, 160, 21).tolist()
    whole = generate(runner, 0, prompt, chunk=64, count=8)
    assert [generate(runner, slot, prompt, chunk=chunk, count=8) for slot, chunk in ((1, 1), (2, 8), (3, 5))] == [whole] * 3
    assert len(set(whole)) > 1
    runner.close()


def test_bfloat16_runs_and_fills_a_pool_of_its_own_precision(tmp_path):
    runner = build_runner(resolved(tmp_path, dtype="bfloat16"))
    assert all(token < 160 for token in generate(runner, 0, [5, 6, 7], chunk=64, count=4))
    assert runner.pool.layers[0].dtype == torch.bfloat16
    assert (runner.pool.pages, runner.page_size) == (32, 8)
    runner.close()


def test_a_pool_that_does_not_fit_fails_before_weights_are_read(tmp_path):
    large = resolved(tmp_path, tokens=2**31 - 1)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="--max-total-tokens"):
        build_runner(large)
