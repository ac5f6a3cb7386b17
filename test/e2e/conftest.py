"""Servers shared by end-to-end tests: started on first use, one per set of flags, drained at the end of the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.pd import Pair
from e2e.servers import Server, tiny_chat_model

STRICT = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system messages, please') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAIRS = 3  # prefill and decode servers that run at a time


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama that chats."""
    return tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def serve(tiny: Path) -> Iterator[Callable[..., Server]]:
    """`serve(*flags)`: the running server with these flags (on the tiny model, a pool of 4096 tokens unless the flags say otherwise)."""
    servers: dict[tuple[str, ...], Server] = {}

    def get(*flags: str) -> Server:
        if flags not in servers:
            pool = () if "--max-total-tokens" in flags else ("--max-total-tokens", "4096")
            servers[flags] = Server(tiny, *pool, *flags)
        return servers[flags]

    yield get
    assert {flags: server.close() for flags, server in servers.items()} == dict.fromkeys(servers, 0)


@pytest.fixture(scope="session")
def pair(tiny: Path) -> Iterator[Callable[..., Pair]]:
    """`pair(*flags, prefill=(), decode=())`: the running prefill and decode servers with these flags, on the tiny model as `serve`'s. Only
    the last few pairs run on: keep none over a call for others."""
    pairs: dict[tuple[tuple[str, ...], ...], Pair] = {}

    def get(*flags: str, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()) -> Pair:
        key = (flags, prefill, decode)
        if key not in pairs:
            while len(pairs) >= PAIRS:
                assert pairs.pop(next(iter(pairs))).close() == 0
            pool = [() if "--max-total-tokens" in (*flags, *own) else ("--max-total-tokens", "4096") for own in (prefill, decode)]
            pairs[key] = Pair.start(tiny, *flags, prefill=(*pool[0], *prefill), decode=(*pool[1], *decode))
        return pairs[key]

    yield get
    assert {key: each.close() for key, each in pairs.items()} == dict.fromkeys(pairs, 0)


@pytest.fixture(scope="session")
def server(serve: Callable[..., Server]) -> Server:
    """A server with default flags."""
    return serve()


@pytest.fixture
def alive(server: Server) -> Iterator[None]:
    """Whatever a test did to the default server: it still answers, and nothing is left running."""
    yield
    assert server.generate(text="alive?", sampling_params={"max_new_tokens": 1})["meta_info"]["completion_tokens"] <= 1
    server.settled()


@pytest.fixture(scope="session")
def odd(serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server that streams seven tokens a chunk and whose chat template refuses system messages."""
    path = tmp_path_factory.mktemp("template") / "strict.jinja"
    path.write_text(STRICT)
    return serve("--chat-template", str(path), "--stream-interval", "7", "--threads", "1")
