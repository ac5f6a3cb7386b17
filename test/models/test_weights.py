"""Weight files: single and sharded safetensors, refusals, the random fill, and the fingerprint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import Alone, Paged
from safetensors.torch import load_file, save_file
from tiny import save_tiny

from radixpd.errors import ConfigError
from radixpd.models.weights import dummy, fingerprint, load_decoder, read_config, resolve_dtype, stream

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    directory = tmp_path_factory.mktemp("sharded")
    oracle = save_tiny(directory, "llama", max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory, oracle.state_dict()


@pytest.fixture
def folder(sharded: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded[0], tmp_path / "model"))


def edit_json(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_sharded_files_hold_every_tensor_once(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    directory, state = sharded
    read = list(stream(directory))
    assert sorted(name for name, _ in read) == sorted(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in read)


def test_shards_may_be_links_as_in_a_hub_cache(folder: Path, tmp_path: Path) -> None:
    for number, shard in enumerate(folder.glob("*.safetensors")):
        blob = tmp_path / f"blob{number}"
        shard.rename(blob)
        shard.symlink_to(os.path.relpath(blob, folder))
    load_decoder(folder, parallel=Alone())


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/model.safetensors", "sub/a.safetensors", "..", "weights.bin", 7])
def test_se_07_a_shard_outside_the_folder_is_refused(folder: Path, shard: Any) -> None:
    save_file({"lm_head.weight": torch.zeros(256, 64)}, folder.parent / "outside.safetensors")
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": shard}))
    with pytest.raises(ConfigError, match=r"names the shard .* only \*.safetensors files of the model's folder"):
        load_decoder(folder, parallel=Alone())
    with pytest.raises(ConfigError, match="names the shard"):
        fingerprint(folder)


def test_an_index_that_misplaces_a_tensor(folder: Path) -> None:
    def swap(index: dict[str, Any]) -> None:
        index["weight_map"]["lm_head.weight"] = next(x for x in index["weight_map"].values() if x != index["weight_map"]["lm_head.weight"])

    edit_json(folder / INDEX, swap)
    with pytest.raises(ConfigError, match=r"places lm_head.weight in .*, which does not hold it"):
        load_decoder(folder, parallel=Alone())


def test_an_index_that_forgets_a_tensor(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"missing, among them model.norm.weight"):
        load_decoder(folder, parallel=Alone())


def test_a_missing_shard_and_a_broken_one(folder: Path) -> None:
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    second.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=second.name):
        load_decoder(folder, parallel=Alone())
    with pytest.raises(ConfigError, match=second.name):
        fingerprint(folder)
    first.unlink()
    with pytest.raises(ConfigError, match=first.name):
        load_decoder(folder, parallel=Alone())


def test_se_07_a_folder_with_pickled_weights_only_is_refused(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="only safetensors weights are read"):
        load_decoder(folder, parallel=Alone())


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_missing_or_broken_config(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_half_precision_files_load_into_any_precision(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama").to(torch.float16).save_pretrained(tmp_path)
    assert load_decoder(tmp_path, parallel=Alone()).dtype == torch.bfloat16
    assert load_decoder(tmp_path, dtype="float32", parallel=Alone()).dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "asked", "wanted"),
    [
        ({"torch_dtype": "bfloat16"}, "auto", torch.bfloat16),
        ({"dtype": "float32"}, "auto", torch.float32),
        ({"dtype": "float16"}, "auto", torch.bfloat16),
        ({}, "auto", torch.float32),
        ({"dtype": "float32"}, "bfloat16", torch.bfloat16),
    ],
)
def test_dtype_is_the_asked_one_or_the_checkpoints(config: dict[str, str], asked: str, wanted: torch.dtype) -> None:
    assert resolve_dtype(config, asked) == wanted


@pytest.mark.parametrize(("config", "asked"), [({}, "float16"), ({}, "int8"), ({"dtype": "float8_e4m3fn"}, "auto")])
def test_other_dtypes_are_refused(config: dict[str, str], asked: str) -> None:
    with pytest.raises(ConfigError, match="--dtype"):
        resolve_dtype(config, asked)


def test_random_weights_need_no_files_and_depend_on_seed_and_name_alone(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    tokens = torch.tensor([5, 9, 77, 4])

    def logits(seed: int) -> torch.Tensor:
        decoder = load_decoder(folder, load_format="dummy", seed=seed, parallel=Alone())
        return Paged(decoder, page_size=4).step([(0, 0, tokens)])[0]

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2), atol=0.1)
    assert torch.equal(dict(dummy({"b": (4, 3), "a": (2, 3)}, 1))["a"], dict(dummy({"a": (2, 3)}, 1))["a"])


def test_random_models_answer_differently_to_different_contexts(folder: Path) -> None:
    decoder = load_decoder(folder, load_format="dummy", parallel=Alone())
    paged = Paged(decoder, page_size=4, slots=40)
    prompts = torch.randint(0, 256, (40, 8), generator=torch.Generator().manual_seed(0))
    prompts[:, -1] = 7  # the same last token
    answers = {int(rows[-1].argmax()) for rows in paged.step([(slot, 0, prompt) for slot, prompt in enumerate(prompts)])}
    assert len(answers) > 15


def test_fingerprint_names_weights_and_precision_not_place_or_time(folder: Path, sharded: tuple[Path, Any]) -> None:
    name = fingerprint(folder)
    os.utime(folder / "config.json", (0, 0))
    assert fingerprint(folder) == fingerprint(sharded[0]) == name
    assert fingerprint(folder, dtype="bfloat16") != name
    dummies = {fingerprint(folder, load_format="dummy", seed=seed) for seed in (0, 1)}
    assert len(dummies | {name}) == 3


def test_is_01_fingerprint_sees_a_change_in_any_tensor_and_in_the_config(folder: Path) -> None:
    names = {fingerprint(folder)}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        changed = next(iter(tensors))
        save_file(tensors | {changed: tensors[changed] + 1}, shard, metadata={"format": "pt"})
        names.add(fingerprint(folder))
    edit_json(folder / "config.json", lambda config: config.update(rms_norm_eps=1e-4))
    names.add(fingerprint(folder))
    assert len(names) == 2 + len(list(folder.glob("*.safetensors")))
