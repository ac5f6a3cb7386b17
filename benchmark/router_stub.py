"""A stub worker for `bench_router`: the routes that routers need, a simulated prefix cache, a simulated speed, and KV events.

    python -m benchmark.router_stub --port 0 [--cache-chars 100000] [--prefill-us-per-char 2] [--itl-ms 0.5] [--tokens 8] [--tokenizer DIR]

A prompt's full blocks of 64 characters are looked up and kept when it arrives; what was not found costs prefill time, an output token costs
`--itl-ms`; prompts are computed side by side. One character is one token (`write_tokenizer` makes the tokenizer of that). `GET /stats`
tells what was done, `POST /flush_cache` forgets it all. With `--events` and `--replay` ports the cache is published as radixpd's workers
do, and `/server_info` says so. Prints its URL when it is ready. Started by `router_fleet` and by tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq
from aiohttp import web

from benchmark.router_cache import BlockCache, Served
from benchmark.router_plans import ANSWER, BLOCK, rendered
from radixpd.core.effects import CacheCleared, CacheEvent, PagesRemoved, PagesStored
from radixpd.core.page_hash import page_hashes, root_hash, token_bytes
from radixpd.runtime.kv_events import Publisher
from radixpd.text.identity import text_identity
from radixpd.text.json_tokenizer import byte_alphabet

__all__ = ["main", "write_tokenizer"]

MODEL = "stub"
TOPIC = "kv-events"
REPLAY_LOOK_S = 0.02
CONTEXT = 2**20
TEMPLATE = "{% for message in messages %}{{ message.role }}:{{ message.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"
HEALTH = ("/health", "/health_generate", "/ping", "/liveness", "/readiness")
INFO = ("/server_info", "/get_server_info", "/get_model_info", "/model_info")


@dataclass(slots=True)
class Counts:
    """What a worker has done since it was last flushed. `work_s`: of simulated time."""

    requests: int = 0
    prompt_chars: int = 0
    cached_chars: int = 0
    work_s: float = 0.0
    running: int = 0
    max_running: int = 0


class Worker:
    """One stub worker."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._cache: BlockCache[bytes] = BlockCache(max(1, asked.cache_chars // BLOCK))
        self._root = root_hash(asked.fingerprint, b"")
        self._publisher: Publisher | None = None
        self.counts = Counts()
        self._served = 0  # since the start, whatever was flushed
        self._incarnation = secrets.token_hex(8)
        self._text = text_identity(asked.tokenizer) if asked.tokenizer else ""

    async def publish(self, _app: web.Application) -> Any:
        """Bind the sockets of the events while the application runs; replays are answered every few milliseconds."""
        if not self._asked.events:
            yield
            return
        context = zmq.Context[Any]()
        here = f"tcp://127.0.0.1:{self._asked.events}", f"tcp://127.0.0.1:{self._asked.replay}"
        self._publisher = Publisher(context, endpoint=here[0], replay_endpoint=here[1], topic=TOPIC, page_size=BLOCK)

        async def replays(publisher: Publisher) -> None:
            while True:
                publisher.answer_replays()
                await asyncio.sleep(REPLAY_LOOK_S)

        task = asyncio.create_task(replays(self._publisher))
        yield
        task.cancel()
        self._publisher.close()
        context.term()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Any of the three routes that generate."""
        body = await request.json()
        sampling = body.get("sampling_params") or {}
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or sampling.get("max_new_tokens") or self._asked.tokens
        tokens, counts = max(1, min(int(asked), self._asked.tokens)), self.counts
        counts.running += 1
        counts.max_running = max(counts.max_running, counts.running)
        try:
            prompt = prompt_of(body)
            cached = self._look_up(prompt)
            prefill_s = (len(prompt) - cached) * self._asked.prefill_us_per_char / 1e6
            counts.work_s += prefill_s + tokens * self._asked.itl_ms / 1e3
            if prefill_s:
                await asyncio.sleep(prefill_s)
            said = Answer(request.path, len(prompt), cached, tokens)
            if body.get("stream"):
                return await self._stream(request, said)
            if self._asked.itl_ms:
                await asyncio.sleep(tokens * self._asked.itl_ms / 1e3)
            return web.json_response(said.whole(), headers=self._headers())
        finally:
            counts.running -= 1

    def _look_up(self, prompt: str) -> int:
        """Characters found in the cache; the prompt is there from now on."""
        tokens = np.frombuffer(prompt.encode(), np.uint8).astype("<i4")
        chain = page_hashes(self._root, token_bytes(tokens), 4 * BLOCK)
        served = self._cache.serve(chain)
        self._served += 1
        self.counts.requests += 1
        self.counts.prompt_chars += len(prompt)
        self.counts.cached_chars += served.hits * BLOCK
        self._tell(changes(served, chain, tokens))
        return served.hits * BLOCK

    def _tell(self, events: Sequence[CacheEvent]) -> None:
        if self._publisher is not None:
            self._publisher.publish(events, unix_time=time.time())

    async def _stream(self, request: web.Request, said: Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self._headers()})
        await response.prepare(request)
        for at in range(said.tokens):
            if self._asked.itl_ms:
                await asyncio.sleep(self._asked.itl_ms / 1e3)
            await response.write(b"data: " + json.dumps(said.event(at)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _headers(self) -> dict[str, str]:
        return {"X-Worker": str(os.getpid())}

    # ---- what it says about itself ----------------------------------------------------------------------------------

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "stub", "max_model_len": CONTEXT}]}
        )

    async def info(self, _request: web.Request) -> web.Response:
        asked = self._asked
        here = "tcp://127.0.0.1:"
        events = {"endpoint": f"{here}{asked.events}", "replay_endpoint": f"{here}{asked.replay}", "topic": TOPIC}
        return web.json_response({
            "model_path": MODEL, "tokenizer_path": asked.tokenizer, "served_model_name": MODEL, "is_generation": True, "version": "0.0.0",
            "tp_size": 1, "dp_size": 1, "vocab_size": 257, "context_length": CONTEXT, "has_chat_template": True,
            "internal_states": [{"load": self.counts.running}],
            # What radixpd's load balancer goes by, see `mini_lb.card`.
            "role": "regular", "incarnation": self._incarnation, "model_fingerprint": asked.fingerprint, "text_identity": self._text,
            "page_size": BLOCK, "tokenizer_directory": asked.tokenizer, "max_request_tokens": CONTEXT,
            "kv_events": events if asked.events else None,
        })  # fmt: skip

    async def load(self, _request: web.Request) -> web.Response:
        """As radixpd's workers say it, so that a router knows the size of the cache."""
        blocks = self._asked.cache_chars // BLOCK
        cached = len(self._cache)
        return web.json_response({
            "running": self.counts.running, "waiting": 0, "max_running": 1024, "pages": blocks, "free_pages": blocks - cached,
            "tree_pages": cached, "locked_pages": 0, "page_size": BLOCK, "steps_total": self._served,
            "incarnation": self._incarnation, "role": "regular",
        })  # fmt: skip

    async def stats(self, _request: web.Request) -> web.Response:
        return web.json_response(asdict(self.counts))

    async def flush(self, _request: web.Request) -> web.Response:
        self._cache.clear()
        self.counts = Counts(running=self.counts.running)
        self._tell([CacheCleared()])
        return web.json_response({"success": True})

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=2**28)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self.generate)
        app.router.add_routes([web.get(path, self.health) for path in HEALTH])
        app.router.add_routes([web.get(path, self.info) for path in INFO])
        app.router.add_routes([web.get(path, self.load) for path in ("/get_load", "/v1/loads")])
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/stats", self.stats)
        app.router.add_post("/flush_cache", self.flush)
        app.cleanup_ctx.append(self.publish)
        return app


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker says to one prompt, in the words of the route that it came by."""

    path: str
    prompt: int
    cached: int
    tokens: int

    def whole(self) -> dict[str, Any]:
        text = ANSWER[: 4 * self.tokens]
        if self.path == "/generate":
            return {"text": text, "output_ids": [1] * self.tokens, "meta_info": self._meta()}
        chat = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        plain = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
        kind, choice = ("chat.completion", chat) if "chat" in self.path else ("text_completion", plain)
        return {**self._base(kind), "choices": [choice], "usage": self._usage()}

    def event(self, at: int) -> dict[str, Any]:
        """Of token `at`; the last one has the figures."""
        if self.path == "/generate":
            return {"text": ANSWER[: 4 * (at + 1)], "output_ids": [1] * (at + 1), "meta_info": self._meta()}
        finish = "length" if at == self.tokens - 1 else None
        chat = {"index": 0, "delta": {"role": "assistant", "content": " tok"}, "finish_reason": finish}
        plain = {"index": 0, "text": " tok", "finish_reason": finish, "logprobs": None}
        kind, choice = ("chat.completion.chunk", chat) if "chat" in self.path else ("text_completion", plain)
        return {**self._base(kind), "choices": [choice], **({"usage": self._usage()} if finish else {})}

    def _base(self, kind: str) -> dict[str, Any]:
        return {"id": "stub-1", "object": kind, "created": int(time.time()), "model": MODEL}

    def _meta(self) -> dict[str, Any]:
        reason = {"type": "length", "length": self.tokens}
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.tokens, "cached_tokens": self.cached}
        return {"id": "stub-1", **counts, "finish_reason": reason}

    def _usage(self) -> dict[str, Any]:
        details = {"cached_tokens": self.cached}
        total = self.prompt + self.tokens
        return {"prompt_tokens": self.prompt, "completion_tokens": self.tokens, "total_tokens": total, "prompt_tokens_details": details}


def prompt_of(body: dict[str, Any]) -> str:
    """The text of a prompt; of a list, the first one's."""
    found = body.get("text", body.get("prompt"))
    if isinstance(found, list):
        found = found[0] if found and isinstance(found[0], str) else json.dumps(found)
    if found is not None:
        return str(found)
    messages = body.get("messages", [])
    if len(messages) == 1 and messages[0].get("role") == "user":
        return rendered(messages[0]["content"])
    return "\n".join(f"{each.get('role')}:{each.get('content')}" for each in messages)


def changes(served: Served[bytes], chain: Sequence[bytes], tokens: np.ndarray) -> list[CacheEvent]:
    """The events of one prompt."""
    found: list[CacheEvent] = [
        PagesStored(tuple(chain[start:end]), chain[start - 1] if start else None, tokens[start * BLOCK : end * BLOCK])
        for start, end in served.stored
    ]
    return [*found, PagesRemoved(tuple(served.removed))] if served.removed else found


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer whose tokens are bytes, and the chat template that `prompt_of` follows."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"id": 256, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": byte_alphabet(), "merges": []}
    whole = {
        "version": "1.0", "added_tokens": [special], "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
    return folder


async def _serve(asked: argparse.Namespace) -> None:
    runner = web.AppRunner(Worker(asked).app(), access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", asked.port, reuse_address=True, backlog=1024).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(prog="router_stub", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--events", type=int, default=0, help="port of the KV events; 0 for none")
    parser.add_argument("--replay", type=int, default=0, help="port where they are asked for again")
    parser.add_argument("--tokenizer", default="", help="folder that /server_info names")
    parser.add_argument("--fingerprint", default="stub", help="of the model, for the ids of pages")
    parser.add_argument("--cache-chars", type=int, default=100_000)
    parser.add_argument("--prefill-us-per-char", type=float, default=2.0)
    parser.add_argument("--itl-ms", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=8, help="most output tokens of an answer")
    uvloop.run(_serve(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
