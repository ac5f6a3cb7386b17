"""Prompts get the page names that the workers give them, or none: agreement, files, tenants, lists, and what cannot be read."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from mini_lb.lb_stubs import until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from radixpd.config.secret import Secret
from radixpd.core.page_hash import event_id, namespace, page_hashes, root_hash, token_bytes
from radixpd.mini_lb import prompts as module
from radixpd.mini_lb.ask import Ask, read_ask
from radixpd.mini_lb.card import Card, read_card
from radixpd.mini_lb.prompts import Prompts
from radixpd.runtime.caller import Caller
from radixpd.server.guards import TENANT
from radixpd.text.identity import text_identity
from radixpd.text.tokenizer import load_tokenizer

URL = "http://127.0.0.1:1"
SIZE = 4
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}"
TEMPLATE += "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer and a template."""
    directory = tmp_path_factory.mktemp("text")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def card(files: Path, **fields: Any) -> Card:
    info = {
        "incarnation": "i", "role": "regular", "model_fingerprint": "f", "text_identity": text_identity(files),
        "tokenizer_directory": str(files), "page_size": SIZE, "max_request_tokens": 5000, "kv_events": {"endpoint": "ipc:///x"}, **fields,
    }  # fmt: skip
    found = read_card(json.dumps(info).encode(), URL)
    assert found is not None
    return found


def named(ids: np.ndarray, space: bytes = b"") -> tuple[int, ...]:
    """As a worker names the pages that it can find of a prompt."""
    whole = (len(ids) - 1) // SIZE * SIZE
    return tuple(event_id(each) for each in page_hashes(root_hash("f", space), token_bytes(ids[:whole]), 4 * SIZE))


@pytest_asyncio.fixture
async def prompts(files: Path) -> Any:
    made = Prompts(None)
    made.told("a", card(files))
    await until(lambda: made._text, "the tokenizer is loaded")
    yield made
    await made.close()


async def read(prompts: Prompts, body: Any, path: str = "/generate", key: str = "") -> Ask:
    ask = read_ask(json.dumps(body).encode())
    found = await prompts.read(path, ask, authorization=key)
    assert found is ask or found.body is ask.body
    return found


async def test_the_longest_of_several_prompts_is_named(prompts: Prompts, files: Path) -> None:
    tokenizer = load_tokenizer(files)
    texts = ["short", "the longest of all three", "middling one"]
    ask = await read(prompts, {"text": texts, "cache_salt": ["x", "y", "z"], "extra_key": "k"})
    space = namespace({"cache_salt": "y", "extra_key": "k"})
    assert ask.route.pages == named(tokenizer.encode(texts[1]), space)
    assert (ask.route.tokens, ask.route.page_size) == (sum(map(len, texts)), SIZE)


async def test_tools_are_part_of_the_prompt_unless_none_may_be_called(prompts: Prompts, files: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = {"messages": [{"role": "user", "content": "a prompt of many pages"}], "tools": tools}
    for choice, shown in ((None, json.dumps(tools)), ("required", json.dumps(tools)), ("none", "")):
        ask = await read(prompts, {**body, "tool_choice": choice}, "/v1/chat/completions")
        assert ask.route.pages == named(load_tokenizer(files).encode(shown + "[user]a prompt of many pages[a]"))


@pytest.mark.parametrize("length", [1, 4, 5, 255, 256, 257, 258, 1000, 1025])
async def test_pages_of_long_prompts_are_those_of_the_whole_chain(prompts: Prompts, length: int) -> None:
    ids = [number * 7 % 250 for number in range(length)]
    for _ in range(2):  # hashed, then remembered
        assert (await read(prompts, {"input_ids": ids})).route.pages == named(np.asarray(ids, np.int32))
    changed = [*ids[: length // 2], 251, *ids[length // 2 + 1 :]]
    assert (await read(prompts, {"input_ids": changed})).route.pages == named(np.asarray(changed, np.int32))


async def test_each_key_has_a_cache_of_its_own_where_the_workers_say_so(prompts: Prompts, files: Path) -> None:
    ids = load_tokenizer(files).encode("a prompt of many pages")
    plain = await read(prompts, {"text": "a prompt of many pages"}, key="Bearer one")
    assert plain.route.pages == named(ids)
    prompts.told("a", card(files, salt_from_key=True))
    for key in ("one", "two"):
        ask = await read(prompts, {"text": "a prompt of many pages"}, key=f"Bearer {key}")
        assert ask.route.pages == named(ids, Caller(tenant=Secret(key).digest(TENANT)).salted(b""))


async def test_workers_that_disagree_are_not_guessed_at(prompts: Prompts, files: Path) -> None:
    body = {"text": "a prompt of many pages"}
    assert (await read(prompts, body)).route.pages
    prompts.told("b", card(files))
    assert (await read(prompts, body)).route.pages
    for other in ({"model_fingerprint": "g"}, {"page_size": 8}, {"text_identity": "t"}, {"salt_from_key": True}):
        prompts.told("b", card(files, **other))
        assert not (await read(prompts, body)).route.pages, other
    prompts.told("b", card(files, model_fingerprint="g", kv_events=None))  # who tells nothing need not agree
    assert (await read(prompts, body)).route.pages
    prompts.told("a", None)
    assert not (await read(prompts, body)).route.pages


@pytest.mark.parametrize("wrong", [{"tokenizer_directory": "/nowhere"}, {"text_identity": "another"}])
async def test_other_files_than_the_workers_are_of_no_use(files: Path, caplog: pytest.LogCaptureFixture, wrong: dict[str, str]) -> None:
    made = Prompts(None)
    made.told("a", card(files, **wrong))
    await until(lambda: "prompts cannot be tokenized as the workers do" in caplog.text, "it has been tried")
    assert not (await read(made, {"text": "a prompt of many pages"})).route.pages
    await made.close()


async def test_files_may_come_later(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    made = Prompts(None)
    made.told("a", card(files, tokenizer_directory=str(tmp_path / "later")))
    assert not (await read(made, {"text": "a prompt of many pages"})).route.pages
    shutil.copytree(files, tmp_path / "later")
    await until(lambda: made._text, "the tokenizer is loaded")
    assert (await read(made, {"text": "a prompt of many pages"})).route.pages
    await made.close()


async def test_files_may_lie_elsewhere(files: Path) -> None:
    made = Prompts(str(files))
    made.told("a", card(files, tokenizer_directory="/nowhere"))
    await until(lambda: made._text, "the tokenizer is loaded")
    assert (await read(made, {"text": "a prompt of many pages"})).route.pages
    await made.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {}),
        ("/generate", {"text": 5}),
        ("/generate", {"text": []}),
        ("/generate", {"text": ""}),
        ("/generate", {"text": "many pages of text", "truncate_prompt_tokens": 3}),
        ("/generate", {"text": "x" * 9000}),
        ("/generate", {"input_ids": [1, 2, "x"]}),
        ("/generate", {"input_ids": [2**40] * 20}),
        ("/generate", {"input_ids": [7] * 5001}),
        ("/generate", {"input_ids": [[1, 2], 3]}),
        ("/generate", {"text": ["many pages of text"], "extra_key": []}),
        ("/v1/completions", {"prompt": {"a": 1}}),
        ("/v1/completions", {"prompt": None}),
        ("/v1/completions", {"prompt": ["", ""], "add_special_tokens": False}),
        ("/v1/chat/completions", {"messages": "hello"}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}}),
    ],
)
async def test_what_cannot_be_read_is_left_to_the_worker(prompts: Prompts, path: str, body: Any) -> None:
    assert not (await read(prompts, body, path)).route.pages


async def test_what_the_workers_cut_is_not_named(prompts: Prompts, files: Path) -> None:
    prompts.told("a", card(files, allow_auto_truncate=True, max_request_tokens=30))
    assert (await read(prompts, {"text": "x" * 29})).route.pages
    assert not (await read(prompts, {"text": "x" * 30})).route.pages


async def test_long_prompts_do_not_hold_up_the_loop(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in a thread, and one that takes too long goes to the workers as it came."""
    go = threading.Event()
    monkeypatch.setattr(module, "SECONDS", 0.2)
    text = prompts._text
    assert text is not None
    work = text.memory.work

    def slow(cut: Any) -> list[np.ndarray]:
        go.wait(10)
        return work(cut)

    monkeypatch.setattr(text.memory, "work", slow)
    body = {"text": "words and more words " * 220}
    assert not (await asyncio.wait_for(read(prompts, body), 5)).route.pages
    go.set()
    assert (await read(prompts, body)).route.pages
