"""The tokenizer that comes out of a GGUF file cuts text as the model was trained to."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import mistral_common
import pytest
import sentencepiece
from gguf_files import BYTE, CONTROL, NORMAL, TOKENS, finish, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.errors import ConfigError
from radixpd.text.chat import load_chat_template
from radixpd.text.gguf_tokenizer import write_gguf_tokenizer
from radixpd.text.tokenizer import load_tokenizer

HARD = [
    "  12", "a   1\t\t2", "x\n\n3", "\r\n\r\n4\r\n", "def f(x):\n\treturn x  + 10", "größe 日本 👩‍👩‍👧 ½ ² 12345", "3.14e-10  00",
    "<|start|>user\n 1<|end|>\n", "it's  I'LL 5's", "", " ", "\t1", "<user> 12 <user>", "a\u00a01\u20032",
]  # fmt: skip


def convert(file, directory):
    write_gguf_tokenizer(gguf.GGUFReader(file), Path(file).name, directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    convert(write_gguf(directory / "m.gguf"), directory)
    return directory


@pytest.fixture(scope="module")
def tiny(tiny_dir):
    return load_tokenizer(tiny_dir)


def pieces(tokenizer, text):
    return [TOKENS[id] for id in tokenizer.encode(text)]


@pytest.mark.parametrize("text", HARD)
def test_text_survives(tiny, text):
    assert tiny.decode(tiny.encode(text), skip_special=False) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(" \t\r\n1a2b", max_size=12))
def test_digits_stand_alone_whatever_is_before_them(text, tiny):
    for piece in pieces(tiny, text):
        assert piece in ("1", "2") or not set(piece) & {"1", "2"}


def test_runs_of_blanks_before_a_digit_stay_together(tiny):
    assert pieces(tiny, "  1") == ["ĠĠ", "1"]
    assert pieces(tiny, "   12") == ["ĠĠĠ", "1", "2"]
    assert pieces(tiny, "\t\t1") == ["ĉĉ", "1"]
    assert pieces(tiny, "\n\n1") == ["ĊĊ", "1"]
    assert pieces(tiny, "\r\n1") == ["čĊ", "1"]
    assert pieces(tiny, "  a") == ["Ġ", "Ġa"]  # a word takes one blank along


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "  1", ["Ġ", "Ġ1"]),
        ("gpt-2", "12", ["12"]),
        ("llama-bpe", "12", ["12"]),
        ("qwen2", "12", ["1", "2"]),
        ("llama-bpe", " 1", ["Ġ", "1"]),
    ],
)
def test_other_pre_tokenizers(tmp_path, pre, text, expected):
    tokenizer = convert(write_gguf(tmp_path / "m.gguf", pre=pre), tmp_path)
    ids = tokenizer.encode(text, special=False)
    assert [TOKENS[id] for id in ids] == expected
    # Llama 3 puts bos before every text unless the file says otherwise.
    assert (len(tokenizer.encode(text)) > len(ids)) == (pre == "llama-bpe")


def test_specials_and_files_beside(tiny, tiny_dir):
    assert (tiny.bos_id, tiny.eos_ids, tiny.special_ids) == (1, (0,), {0, 1})
    assert pieces(tiny, "<|start|>a<user>") == ["<|start|>", "a", "<user>"]
    assert tiny.decode(tiny.encode("<|start|>a<user>")) == "a<user>"
    assert json.loads((tiny_dir / "generation_config.json").read_text())["eos_token_id"] == [0]
    assert load_chat_template(tiny_dir).render([{"role": "user", "content": "hi"}]) == "hi"


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"m\.gguf: pre-tokenizer 'tekken' is not known.*--tokenizer-path"):
        convert(write_gguf(tmp_path / "m.gguf", pre="tekken"), tmp_path)


@pytest.fixture(scope="module")
def spm_pair(tmp_path_factory):
    """A real SentencePiece model, and the same one after a detour through GGUF."""
    directory = tmp_path_factory.mktemp("spm")
    model = sentencepiece.SentencePieceProcessor(model_file=str(Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"))
    size = model.vocab_size()
    kinds = [
        2 if model.is_unknown(id) else CONTROL if model.is_control(id) else BYTE if model.is_byte(id) else NORMAL for id in range(size)
    ]
    writer = gguf.GGUFWriter(directory / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(id) for id in range(size)])
    writer.add_token_scores([model.get_score(id) for id in range(size)])
    writer.add_token_types(kinds)
    for add, id in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_unk_token_id, 0)):
        add(id)
    finish(writer)
    return model, convert(directory / "m.gguf", directory)


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<▁"), max_size=40))
def test_sentencepiece_in_gguf_gives_the_same_ids(text, spm_pair):
    model, tokenizer = spm_pair
    normalized = model.normalize(text) if text else ""
    if not text or normalized.replace("▁", " ") != " " + text:
        return  # SentencePiece also normalises characters; GGUF does not keep that table
    ids = tokenizer.encode(text)
    assert ids.tolist() == [1, *model.encode(text)]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", [*HARD[:7], "The quick brown fox jumps over 13 lazy dogs."])
def test_sentencepiece_in_gguf_on_hard_texts(text, spm_pair):
    model, tokenizer = spm_pair
    assert tokenizer.encode(text).tolist() == [1, *model.encode(text)]
    stream = tokenizer.stream()
    ids = tokenizer.encode(text, special=False)
    assert "".join(stream.push(int(id)) for id in ids) + stream.flush() == tokenizer.decode(ids) == text


@pytest.mark.full
@pytest.mark.parametrize("text", HARD)
def test_the_demo_tokenizer(text):
    from radixpd.config.settings import ModelSettings
    from radixpd.runtime.model_files import prepare

    tokenizer = load_tokenizer(prepare(ModelSettings(model_path="demo")).tokenizer_directory)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    spelt = [tokenizer.token_text(int(id)) for id in ids]
    assert all(len(piece) == 1 for piece in spelt if any(char in "0123456789" for char in piece))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, len(tokenizer.special_ids)) == (49152, 1, (2,), 17)
