"""Both tokenizers against their own libraries, and the promise that streamed text equals the whole text."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import mistral_common
import numpy as np
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from radixpd.errors import BadRequest, ConfigError
from radixpd.text.stream import LOOK_BACK
from radixpd.text.tokenizer import load_tokenizer

SP_MODEL = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
CORPUS = [
    "the quick brown fox 123 jumps over  the lazy dog\n\n",
    "größe 日本語のテキスト 🇩🇪👩‍👩‍👧 नमस्ते",
    "def f(x):\n\treturn x + 1  # note",
] * 4
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def byte_level_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("byte_level")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<a b é>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    return directory


@pytest.fixture(scope="module")
def byte_level(byte_level_dir):
    return load_tokenizer(byte_level_dir)


@pytest.fixture(scope="module")
def spm_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("spm")
    shutil.copy(SP_MODEL, directory / "tokenizer.model")
    return directory


@pytest.fixture(scope="module")
def spm(spm_dir):
    return load_tokenizer(spm_dir)


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    """A decoder that is not of the byte kind: goes through the window."""
    directory = tmp_path_factory.mktemp("wordpiece")
    words = ["[UNK]", "play", "##ing", "##ed", "dog", "!", "\ufffd", "##\ufffd"]
    tokenizer = Tokenizer(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


@pytest.fixture(params=["byte_level", "spm"])
def any_tokenizer(request):
    return request.getfixturevalue(request.param)


def streamed(tokenizer, ids, *, context=(), skip_special=True):
    stream = tokenizer.stream(context, skip_special=skip_special)
    return "".join([stream.push(int(id)) for id in ids]) + stream.flush()


@quick
@given(text=st.text(max_size=60))
def test_text_survives_a_round_trip_and_streaming(any_tokenizer, text):
    ids = any_tokenizer.encode(text, special=False)
    assert ids.dtype == np.int32
    whole = any_tokenizer.decode(ids, skip_special=False)
    assert streamed(any_tokenizer, ids, skip_special=False) == whole
    # SentencePiece normalises (NFKC, spaces), so only byte-level text must come back as it went in.
    if any_tokenizer.bos_id == 0:
        assert whole == text


@quick
@given(data=st.data(), skip=st.booleans())
def test_random_ids_stream_to_the_same_text_as_decode(any_tokenizer, data, skip):
    ids = data.draw(st.lists(st.integers(0, min(any_tokenizer.vocab_size - 1, 600)), max_size=40))
    assert streamed(any_tokenizer, ids, skip_special=skip) == any_tokenizer.decode(ids, skip_special=skip)


@quick
@given(data=st.data(), skip=st.booleans())
def test_byte_level_decoding_is_the_librarys(byte_level, byte_level_dir, data, skip):
    reference = Tokenizer.from_file(str(byte_level_dir / "tokenizer.json"))
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=40))
    assert byte_level.decode(ids, skip_special=skip) == reference.decode(ids, skip_special_tokens=skip)


@quick
@given(text=st.text(max_size=60))
def test_sentencepiece_agrees_with_its_library(spm, text):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(SP_MODEL))
    text = text.replace("<", "")
    assert spm.encode(text).tolist() == [1, *reference.encode(text)]
    assert spm.decode(reference.encode(text)) == reference.decode(reference.encode(text))


@quick
@given(before=st.text(max_size=20), after=st.text(max_size=20))
def test_an_output_continues_its_context(any_tokenizer, before, after):
    context, ids = any_tokenizer.encode(before, special=False), any_tokenizer.encode(after, special=False)
    whole = any_tokenizer.decode([*context, *ids], skip_special=False)
    head = any_tokenizer.decode(context, skip_special=False)
    assert head + streamed(any_tokenizer, ids, context=context, skip_special=False) == whole


def test_a_character_cut_by_the_end_of_the_prompt_is_completed(byte_level):
    ids = byte_level.encode("€", special=False).tolist()
    assert len(ids) > 1
    assert streamed(byte_level, ids[1:], context=ids[:1]) == "€"


def test_sentencepiece_words_keep_their_spaces(spm):
    ids = spm.encode("Hello world, again", special=False)
    assert streamed(spm, ids) == "Hello world, again"
    assert streamed(spm, ids, context=spm.encode("Well")) == " Hello world, again"
    assert streamed(spm, ids, context=[1]) == "Hello world, again"  # a hidden bos is no text


def test_sentencepiece_special_tokens_in_text(spm):
    ids = spm.encode("a<s>b</s>", special=False).tolist()
    assert ids.count(1) == 1
    assert ids[-1] == 2
    assert spm.decode(ids, skip_special=False) == "a<s> b</s>"
    assert spm.decode(ids) == "a b"


def test_sentencepiece_switches(spm_dir, tmp_path):
    shutil.copy(spm_dir / "tokenizer.model", tmp_path / "tokenizer.model")
    added = {"32000": {"content": "<tool>", "special": True}}
    config = {"add_bos_token": False, "add_eos_token": True, "eos_token": "<tool>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 32001
    assert tokenizer.eos_ids == (32000,)
    assert tokenizer.encode("<tool>x").tolist()[0] == 32000
    assert tokenizer.encode("x").tolist()[-1] == 32000
    assert 1 not in tokenizer.encode("x")
    assert tokenizer.token_text(32000) == "<tool>"


def test_special_ids_ends_and_recognition(byte_level, byte_level_dir):
    assert byte_level.bos_id == 0
    assert byte_level.eos_ids == (7, 9, 1)
    assert byte_level.special_ids == {0, 1}
    assert byte_level.encode("the").tolist()[0] == 0
    assert byte_level.encode("the", special=False).tolist()[0] != 0
    assert byte_level.encode("the</s>", special=False).tolist()[-1] == 1


def test_eos_ids_come_from_the_models_own_directory(byte_level_dir, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_tokenizer(byte_level_dir, model_directory=tmp_path).eos_ids == (5, 6, 1)


def test_add_bos_token_without_a_post_processor(byte_level_dir, tmp_path):
    document = json.loads((byte_level_dir / "tokenizer.json").read_text())
    document["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    assert load_tokenizer(tmp_path).encode("the").tolist()[0] == 0


def test_one_token_alone(byte_level, spm):
    assert byte_level.token_text(1) == "</s>"
    first = byte_level.encode("é", special=False).tolist()[0]
    assert byte_level.token_bytes(first) in (b"\xc3", "é".encode())
    hello = spm.encode("Hello", special=False).tolist()[0]
    assert spm.token_text(hello) == " Hello"
    assert spm.token_bytes(3 + 0xF0) == b"\xf0"


@pytest.mark.parametrize("unknown", [-1, 10**6])
def test_an_id_that_the_tokenizer_lacks_has_no_text(any_tokenizer, unknown):
    """A model may have more rows than its tokenizer has tokens: neither its output nor an echoed prompt may break on them."""
    assert any_tokenizer.decode([300, unknown, 301]) == any_tokenizer.decode([300, 301])
    assert any_tokenizer.stream().push(unknown) == ""
    assert any_tokenizer.token_text(unknown) == ""


def test_half_a_surrogate_pair_is_a_bad_request(any_tokenizer):
    with pytest.raises(BadRequest, match="surrogate"):
        any_tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("byte", [0x80, 0xF0])
def test_an_invalid_byte_repeated_keeps_streaming_at_constant_cost(byte_level, byte):
    id = next(id for id in range(byte_level.vocab_size) if byte_level.token_bytes(id) == bytes([byte]))
    stream, pieces, seconds = byte_level.stream(), [], []
    for _ in range(2):
        begun = time.perf_counter()
        pieces += [stream.push(id) for _ in range(20_000)]
        seconds.append(time.perf_counter() - begun)
    assert all(pieces[LOOK_BACK:])  # every further token shows the character before it, or itself
    assert "".join(pieces) + stream.flush() == byte_level.decode([id] * 40_000) == "\ufffd" * 40_000
    assert seconds[1] < 3 * seconds[0] + 0.01


def test_other_decoders_stream_through_a_bounded_window(wordpiece):
    ids = [1, 2, 4, 5, 1, 3]
    assert streamed(wordpiece, ids) == wordpiece.decode(ids) == "playing dog ! played"
    stream = wordpiece.stream(context=[4])
    pieces = [stream.push(7) for _ in range(40)]
    assert "".join(pieces) + stream.flush() == "\ufffd" * 40
    assert all("".join(pieces[start : start + LOOK_BACK]) for start in range(0, 40, LOOK_BACK))
    assert streamed(wordpiece, [5], context=[1]) == " !"


def test_what_is_no_tokenizer_says_so(tmp_path):
    with pytest.raises(ConfigError, match="--tokenizer-path"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="SentencePiece"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)
