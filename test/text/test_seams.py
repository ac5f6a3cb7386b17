"""Texts cut at seams have the ids of the whole, for every kind of tokenizer that claims so; memory keeps its cap."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from radixpd.text import seams
from radixpd.text.seams import PATTERNS, PieceMemory, has_seams, pieces
from radixpd.text.tokenizer import load_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, it's 12345 o'clock; we're here\n\n  indented\r\n",
    "def f(x):\n    return x + 1\n\n# a comment\t with tabs  and   spaces \n",
    "na\u00efve caf\u00e9 \u4f60\u597d\uff0c\u4e16\u754c 100\u00a0000 e\u0301 \u0301 <|im_start|>user\nhi<|im_end|>",
] * 4
LETTERS = "ab1 9\n\t\r'sS<|im_start|>.,!?\u4f60\u00e9\u0301\u00a0\u2003\U0001f600e\ufeff"
# Merges over whatever a pattern does not keep apart.
CORPUS += ["".join(one + other + " "[:gap] for gap in (0, 1)) * 6 for one in LETTERS for other in LETTERS]
ENDS = " \n\t\r\u00a0\u3000\u0301"
ODD = st.text(st.sampled_from(LETTERS + ENDS), max_size=120)
PARTS = [*CORPUS[:3], " ", "\n", "a ", "1 ", "word ", "'s ", "<|im_start|>", "<|im_end|>"]
TEXT = st.lists(ODD | st.sampled_from(PARTS), max_size=8).map("".join)


def trained(pre_tokenizer, *, normalizer=None, post=None, added=()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    if post is not None:
        tokenizer.post_processor = post
    tokenizer.add_tokens(list(added))
    return tokenizer


def words(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
BOS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
KINDS = {
    "gpt2": lambda: trained(BYTE_LEVEL),
    "smollm": lambda: trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL])),
    **{f"words-{i}": lambda p=p: trained(words(p), normalizer=normalizers.NFC(), post=BOS) for i, p in enumerate(sorted(PATTERNS))},
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    KINDS[request.param]().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return load_tokenizer(directory)


def joined(tokenizer, text: str, *, special: bool = False) -> list[int]:
    """Ids of a text that was cut wherever it may be, from memory."""
    memory = PieceMemory(tokenizer, 1 << 20)
    with mock.patch.object(seams, "STRIDE", 3):
        for _ in range(2):
            cut = memory.cut(text)
            found = memory.join(cut, memory.work(cut), special=special)
        assert memory.cut(text).unknown == 0
    return found.tolist()


@settings(max_examples=100, deadline=None)
@given(text=TEXT, special=st.booleans())
def test_joined_ids_are_those_of_the_whole(tokenizer, text: str, special: bool) -> None:
    assert tokenizer.has_seams
    assert joined(tokenizer, text, special=special) == tokenizer.encode(text, special=special).tolist()


def test_whatever_meets_at_a_seam(tokenizer) -> None:
    """Every two characters side by side, where both may have been merged."""
    for one in LETTERS:
        for other in LETTERS:
            text = "".join((one + other, " ", one + other) * 3)
            assert joined(tokenizer, text) == tokenizer.encode(text, special=False).tolist(), (one, other)


@given(TEXT)
def test_pieces_are_the_text(text: str) -> None:
    assert "".join(pieces(text * 5)) == text * 5


def test_a_common_beginning_is_tokenized_once(tokenizer) -> None:
    memory = PieceMemory(tokenizer, 1 << 20)
    shared = "the quick brown fox jumps over the lazy dog " * 100
    first = memory.cut(shared + "one")
    memory.join(first, memory.work(first), special=True)
    assert memory.cut(shared + "another end").unknown < 2 * seams.STRIDE
    assert first.unknown == len(shared) + 3


def test_memory_is_bounded(tokenizer) -> None:
    memory = PieceMemory(tokenizer, 100_000)
    for number in range(2000):
        cut = memory.cut(f"prompt number {number} " * 40)
        memory.join(cut, memory.work(cut), special=False)
        assert memory.size <= 100_000
    assert memory.size == sum(seams._size(*item) for item in memory._known.items()) > 50_000


@pytest.mark.parametrize(
    "unsafe",
    [
        lambda: trained(pre_tokenizers.Metaspace()),
        lambda: trained(words(r"\p{L}+ ?|[^\p{L}]+")),  # a word swallows the space behind it
        lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),  # merges over the whole text
        lambda: trained(BYTE_LEVEL, normalizer=normalizers.Prepend("_")),
        lambda: trained(BYTE_LEVEL, normalizer=normalizers.Strip()),
        lambda: trained(BYTE_LEVEL, added=[AddedToken("two words")]),
        lambda: trained(BYTE_LEVEL, added=[AddedToken("mask", rstrip=True)]),
        lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        lambda: Tokenizer(models.BPE()),
    ],
)
def test_other_tokenizers_get_whole_texts(unsafe) -> None:
    assert not has_seams(unsafe())


def test_whole_texts_are_remembered_too(tmp_path: Path) -> None:
    trained(pre_tokenizers.Metaspace()).save(str(tmp_path / "tokenizer.json"))
    memory = PieceMemory(load_tokenizer(tmp_path), 1 << 20)
    text = "some words and a space " * 50
    cut = memory.cut(text)
    assert cut.pieces == [text]
    assert np.array_equal(memory.join(cut, memory.work(cut), special=True), memory._tokenizer.encode(text))
    assert memory.cut(text).unknown == 0
