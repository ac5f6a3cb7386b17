"""Prompts of exactly so many tokens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import mistral_common
import pytest
from bench_fakes import LetterTokenizer, WordTokenizer

from benchmark.prompts import LocalTokenizer, find_pieces, rng_for
from radixpd.errors import ConfigError


@pytest.mark.parametrize("tokenizer", [WordTokenizer(), LetterTokenizer()], ids=["words", "letters"])
@pytest.mark.parametrize("tokens", [2, 5, 513])
def test_a_prompt_has_so_many_tokens(tokenizer: WordTokenizer, tokens: int) -> None:
    pieces = find_pieces(tokenizer)
    assert len(tokenizer.encode([pieces.prompt(rng_for("x"), tokens)])[0]) == tokens


def test_a_prompt_is_never_empty() -> None:
    assert find_pieces(WordTokenizer()).prompt(rng_for("x"), 1)


def test_prompts_cost_no_calls_of_the_tokenizer() -> None:
    tokenizer = WordTokenizer()
    pieces = find_pieces(tokenizer)
    before = tokenizer.calls
    for index in range(100):
        pieces.prompt(rng_for(index), 50)
    assert tokenizer.calls == before


def test_words_of_more_tokens_are_left_out() -> None:
    class Longer(WordTokenizer):
        """A word with an e in it is two tokens."""

        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            return [[0] * (1 + len(text.split()) + sum("e" in word for word in text.split())) for text in texts]

    pieces = find_pieces(Longer())
    assert len(pieces.texts) > 100
    assert not [text for text in pieces.texts if "e" in text]


def test_words_that_grow_together_are_not_taken() -> None:
    class Merging(WordTokenizer):
        """Pairs of words that follow each other in the alphabet are one token."""

        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            return [[0] * (len(text.split()) - sum(a[0] == b[0] for a, b in zip(text.split(), text.split()[1:]))) for text in texts]

    with pytest.raises(ConfigError, match="random-ids"):
        find_pieces(Merging())


def test_a_sentencepiece_tokenizer_with_tokens_of_its_own_before_a_text(tmp_path: Path) -> None:
    shutil.copy(Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1", tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    tokenizer = LocalTokenizer(tmp_path)
    pieces = find_pieces(tokenizer)
    assert pieces.overhead > 0
    assert len(pieces.texts) > 200
    assert [len(ids) for ids in tokenizer.encode([pieces.prompt(rng_for(n), n) for n in (4, 40, 700)])] == [4, 40, 700]
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


def test_keys_name_generators() -> None:
    assert rng_for(1, "a").integers(10**9) == rng_for(1, "a").integers(10**9)
    assert len({int(rng_for(*key).integers(10**9)) for key in [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0)]}) == 4
