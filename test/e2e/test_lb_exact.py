"""The balancer knows a real server's cache exactly: it gives a prompt the names that the server gives it, on every route, and predicts how
much of it the server finds."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from e2e.servers import Server, free_port
from mini_lb.lb_stubs import Lb, until

from radixpd.mini_lb.ask import read_ask
from radixpd.mini_lb.feed import decode

WORDS = "the quick brown fox jumps over the lazy dog, again and again. " * 6
ONE = {"temperature": 0, "max_tokens": 1}
NATIVE = {"sampling_params": {"temperature": 0, "max_new_tokens": 1}}
GENERATE, COMPLETE, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


def body_of(name: str) -> tuple[str, dict[str, Any]]:
    """Route and body of a case; no two have the same beginning."""
    text = f"{name}: {WORDS}"
    ids = [3 + random.Random(name).randrange(250) for _ in range(2)] + [3 + (number * 7) % 250 for number in range(98)]
    user = {"role": "user", "content": text}
    parts = [{"type": "text", "text": text}]
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "text": (GENERATE, {"text": text, **NATIVE}),
        "one text in a list": (GENERATE, {"text": [text], **NATIVE}),
        "pieces": (GENERATE, {"text": text * 6, **NATIVE}),
        "special tokens": (GENERATE, {"text": f"<|im_start|>{text}<|im_end|>", **NATIVE}),
        "ids": (GENERATE, {"input_ids": ids, **NATIVE}),
        "ids in a list": (GENERATE, {"input_ids": [ids], **NATIVE}),
        "exactly full pages": (GENERATE, {"input_ids": ids[:64], **NATIVE}),
        "salt": (GENERATE, {"text": text, "cache_salt": "one", **NATIVE}),
        "keys in a list": (GENERATE, {"text": [text], "extra_key": ["k"], "cache_salt": ["two"], **NATIVE}),
        "completion": (COMPLETE, {"prompt": text, **ONE}),
        "completion, bare": (COMPLETE, {"prompt": text, "add_special_tokens": False, **ONE}),
        "completion of ids": (COMPLETE, {"prompt": ids, "extra_key": "k", **ONE}),
        "completion in a list": (COMPLETE, {"prompt": [text], **ONE}),
        "chat": (CHAT, {"messages": [user], **ONE}),
        "chat, parts": (CHAT, {"messages": [{"role": "user", "content": parts}], **ONE}),
        "chat, developer": (CHAT, {"messages": [{"role": "developer", "content": text}, user], **ONE}),
        "chat, continued": (
            CHAT,
            {"messages": [user, {"role": "assistant", "content": "Well, "}], "continue_final_message": True, **ONE},
        ),
        "chat, variables": (
            CHAT,
            {"messages": [user], "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False, "cache_salt": "s", **ONE},
        ),
    }
    return found[name]


CASES = [
    "text", "one text in a list", "pieces", "special tokens", "ids", "ids in a list", "exactly full pages", "salt", "keys in a list",
    "completion", "completion, bare", "completion of ids", "completion in a list", "chat", "chat, parts", "chat, developer",
    "chat, continued", "chat, variables",
]  # fmt: skip


class Worker:
    """A real server that tells of its pages. `replay`: where to ask for what it has told."""

    def __init__(self, serve: Callable[..., Server]) -> None:
        live, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        config = {"endpoint": live.replace("127.0.0.1", "*"), "replay_endpoint": self.replay, "topic": "kv"}
        self.flags = ("--threads", "1", "--enable-cache-report", "--kv-events-config", json.dumps(config))
        self.server = serve(*self.flags)

    def stored(self) -> list[int]:
        """Pages stored in the server's life, in order."""
        context: zmq.Context[Any] = zmq.Context()
        try:
            asker = context.socket(zmq.DEALER)
            asker.connect(self.replay)
            asker.send_multipart([b"", bytes(8)])
            found: list[int] = []
            while True:
                assert asker.poll(5000), "no answer to the replay"
                _, sequence, payload = asker.recv_multipart()
                if sequence == b"\xff" * 8:
                    return found
                for change in decode(payload):
                    found += change.pages if change.stored else ()
        finally:
            context.destroy(linger=0)


@pytest.fixture(scope="module")
def worker(serve: Callable[..., Server]) -> Worker:
    return Worker(serve)


async def exact(worker: Worker) -> Lb:
    """A balancer before it that knows its cache."""
    lb = await Lb.start("--policy", "kv_cost", "--worker-urls", worker.server.url)
    await until(lambda: all(each.hears() for each in lb.parts.fleet), "the events are heard")
    await until(lambda: lb.parts.proxy._prompts._text, "the tokenizer is loaded")
    return lb


def cached(answer: Any) -> int:
    """What the server says it had."""
    answer = answer[0] if isinstance(answer, list) else answer
    if "meta_info" in answer:
        return int(answer["meta_info"]["cached_tokens"])
    return int((answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"])


async def test_prompts_are_named_and_found_as_the_server_does(worker: Worker) -> None:
    lb = await exact(worker)
    try:
        for name in CASES:
            path, body = body_of(name)
            ask = await lb.parts.proxy._prompts.read(path, read_ask(json.dumps(body).encode()), authorization="")
            pages = list(ask.route.pages)
            assert pages, name
            for turn in range(2):
                rid = f"{name.replace(' ', '-')}-{turn}"
                answer = await lb.post(path, body, headers={"X-Request-Id": rid})
                await until(lambda: lb.parts.proxy._dispatcher.known.match(pages), "its pages are told")  # noqa: B023
                async with lb.http.get("/explain", params={"rid": rid}) as response:
                    hits = (await response.json())["tries"][0]["candidates"][0]["hits"]
                assert (hits["device"], hits["exact"]) == (cached(answer), turn == 1), (name, turn)
            assert cached(answer) == len(pages) * 16, name
            stored = await asyncio.to_thread(worker.stored)
            at = stored.index(pages[0])
            assert stored[at : at + len(pages)] == pages, name
    finally:
        await lb.close()


@pytest.mark.full
async def test_a_server_that_was_killed_comes_back_with_nothing(tiny: Path) -> None:
    worker = Worker(lambda *flags: Server(tiny, "--max-total-tokens", "4096", *flags))
    lb = await exact(worker)
    known = lb.parts.proxy._dispatcher.known
    try:
        path, body = body_of("text")
        await lb.post(path, body)
        pages = (await lb.parts.proxy._prompts.read(path, read_ask(json.dumps(body).encode()), authorization="")).route.pages
        await until(lambda: known.match(pages), "its pages are told")
        worker.server.process.kill()
        await asyncio.to_thread(worker.server.process.wait, 30)
        await until(lambda: not known.match(pages), "they are not believed in any more")
        worker.server = await asyncio.to_thread(lambda: Server(tiny, "--max-total-tokens", "4096", *worker.flags, port=worker.server.port))
        await until(lambda: all(each.up and each.hears() for each in lb.parts.fleet), "the new one is heard")
        assert not known.match(pages)
        assert cached(await lb.post(path, body)) == 0
        await until(lambda: known.match(pages), "its pages are told again")
        assert cached(await lb.post(path, body)) == len(pages) * 16
    finally:
        await lb.close()
        worker.server.close()
