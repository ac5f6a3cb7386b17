"""The generic decoder against transformers, through the real paged attention; and tensor parallelism against the whole model."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import Alone, Paged
from tiny import FAMILIES, ROPES, save_tiny, tiny_model

from radixpd.errors import ConfigError
from radixpd.models.decoder import Decoder
from radixpd.models.spec import ModelSpec
from radixpd.models.weights import dummy, load_decoder

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{f"{family}-tied": (family, {"tie_word_embeddings": True}) for family in FAMILIES},
    **{f"llama-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "qwen2-yarn": ("qwen2", {"rope_parameters": ROPES["yarn"]}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": ROPES["yarn-mscale"]}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "mistral-all-kv-heads": ("mistral", {"num_key_value_heads": 4, "head_dim": 24}),
}
LENGTH = 37


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Decoder, torch.Tensor, torch.Tensor]]:
    """Case -> (our decoder, tokens, transformers' logits)."""
    made = {}
    for name, (family, overrides) in CASES.items():
        directory = tmp_path_factory.mktemp(name)
        oracle = save_tiny(directory, family, **overrides)
        tokens = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            wanted = oracle(tokens[None]).logits[0]
        made[name] = load_decoder(directory, dtype="float32", parallel=Alone()), tokens, wanted
    return made


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_prefill_equals_transformers(case: str, page_size: int, models: dict[str, Any]) -> None:
    decoder, tokens, wanted = models[case]
    (ours,) = Paged(decoder, page_size=page_size).step([(0, 0, tokens)])
    assert wanted.std() > 0.1, "logits so flat that any model would pass"
    close(ours, wanted)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", ["llama-llama3", "mistral", "qwen2", "qwen3-tied"])
def test_chunked_prefill_at_every_split_equals_transformers(case: str, page_size: int, models: dict[str, Any]) -> None:
    decoder, tokens, wanted = models[case]
    paged = Paged(decoder, page_size=page_size)
    for split in range(1, LENGTH):
        (first,) = paged.step([(0, 0, tokens[:split])])
        (second,) = paged.step([(0, split, tokens[split:])])
        close(torch.cat((first, second)), wanted)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_decode_token_by_token_equals_transformers(case: str, page_size: int, models: dict[str, Any]) -> None:
    decoder, tokens, wanted = models[case]
    paged = Paged(decoder, page_size=page_size)
    rows = [paged.step([(1, at, tokens[at : at + 1])])[0] for at in range(LENGTH)]
    close(torch.cat(rows), wanted)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_batch_mixes_prefill_chunks_and_decode(page_size: int, models: dict[str, Any]) -> None:
    decoder, tokens, wanted = models["qwen3"]
    paged = Paged(decoder, page_size=page_size)
    paged.step([(0, 0, tokens[:30]), (2, 0, tokens[:9]), (3, 0, tokens[:1])])
    got = paged.step([(0, 30, tokens[30:31]), (1, 0, tokens[:20]), (2, 9, tokens[9:25]), (3, 1, tokens[1:2])])
    for ours, (start, end) in zip(got, [(30, 31), (0, 20), (9, 25), (1, 2)], strict=True):
        close(ours, wanted[start:end])


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, "qwen2")
    tokens = torch.arange(3, 60)
    decoder = load_decoder(tmp_path, dtype="bfloat16", parallel=Alone())
    with torch.no_grad():
        wanted = oracle(tokens[None]).logits[0]
        theirs = oracle.to(torch.bfloat16)(tokens[None]).logits[0].float()
    (ours,) = Paged(decoder, page_size=16).step([(0, 0, tokens)])
    assert ours.dtype == torch.float32
    assert (ours - wanted).pow(2).mean() <= 1.5 * (theirs - wanted).pow(2).mean()


class Rank:
    """One of several ranks that run as threads; `all_reduce` meets the others at a barrier."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._board[self.rank] = tensor
        self._barrier.wait(timeout=30)
        total = torch.stack(self._board).sum(0)
        self._barrier.wait(timeout=30)
        return total


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_one(family: str) -> None:
    # Biases everywhere, also where the family has none: a row-sharded bias must be added once.
    spec = replace(ModelSpec.from_config(tiny_model(family).config.to_dict() | arch(family)), qkv_bias=True, o_bias=True, mlp_bias=True)
    tokens = torch.arange(20)
    whole = Decoder(spec, Alone(), torch.float32)
    whole.load(dummy(whole.shapes(), 3))
    (wanted,) = Paged(whole, page_size=4).step([(0, 0, tokens)])
    board, barrier, got = [None] * 2, threading.Barrier(2), [None] * 2

    def run(rank: int) -> None:
        decoder = Decoder(spec, Rank(rank, 2, board, barrier), torch.float32)
        decoder.load(dummy(decoder.shapes(), 3))
        (got[rank],) = Paged(decoder, page_size=4).step([(0, 0, tokens)])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for ours in got:
        close(ours, wanted)


def arch(family: str) -> dict[str, list[str]]:
    return {"architectures": [f"{family.capitalize()}ForCausalLM"]}


def test_a_group_that_does_not_divide_the_heads_is_refused() -> None:
    spec = ModelSpec.from_config(tiny_model("llama").config.to_dict() | arch("llama"))
    with pytest.raises(ConfigError, match="--tp-size 4 does not divide the model's 2 KV heads"):
        Decoder(spec, Alone(size=4), torch.float32)


def loaded(decoder: Decoder, changes: dict[str, Any]) -> None:
    tensors = dict(dummy(decoder.shapes(), 0)) | changes
    decoder.load((name, tensor) for name, tensor in tensors.items() if tensor is not None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "1 tensors are missing, among them model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}, "unexpected tensor model.layers.2.mlp.up_proj.weight"),
        ({"model.norm.weight": torch.zeros(63)}, r"model.norm.weight has shape \[63\], config.json needs \[64\]"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "model.norm.weight has dtype torch.int8"),
        ({"lm_head.weight": None}, "lm_head.weight"),
    ],
)
def test_load_names_the_tensor_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    spec = ModelSpec.from_config(tiny_model("llama").config.to_dict() | arch("llama"))
    with pytest.raises(ConfigError, match=message):
        loaded(Decoder(spec, Alone(), torch.float32), changes)


def test_load_ignores_rotary_tables_and_the_second_copy_of_a_tied_head() -> None:
    spec = ModelSpec.from_config(tiny_model("llama", tie_word_embeddings=True).config.to_dict() | arch("llama"))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "lm_head.weight": torch.zeros(256, 64)}
    loaded(Decoder(spec, Alone(), torch.float32), extra)


def test_logits_of_no_rows() -> None:
    spec = ModelSpec.from_config(tiny_model("llama").config.to_dict() | arch("llama"))
    decoder = Decoder(spec, Alone(), torch.float32)
    loaded(decoder, {})
    assert decoder.logits(torch.empty(0, 64)).shape == (0, 256)
