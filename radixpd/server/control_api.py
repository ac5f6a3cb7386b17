"""Everything beside generating: health, information, tokenizing, cache, aborts, metrics.

`/health` only reads state; `/health_generate` runs one token through the engine and cancels it when that takes too long. Called by the
application's router.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
from aiohttp import web

from radixpd import __version__
from radixpd.config.resolve import public_view
from radixpd.errors import BadRequest, Overloaded
from radixpd.runtime.admission import Ask, admit, read
from radixpd.runtime.metrics import CONTENT_TYPE
from radixpd.runtime.tokenizer_manager import State, TokenizerManager
from radixpd.server.chat import rendered
from radixpd.server.replies import json_reply, read_object, status_reply
from radixpd.server.service import service_of

__all__ = [
    "abort_request", "detokenize", "flush_cache", "get_load", "health", "health_generate", "metrics", "model_info", "probe",
    "server_info", "tokenize",
]  # fmt: skip

PROBE_SECONDS = 20.0
STATE_SECONDS = 2.0
MAX_TEXTS = 4096


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`: one of text, prompt, messages."""

    text: str | list[str] | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`."""

    tokens: list[Any]
    skip_special_tokens: bool = True


class AbortBody(msgspec.Struct, kw_only=True):
    """Body of `/abort_request`."""

    rid: str | None = None
    abort_all: bool = False


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 while requests are taken and the scheduler shows signs of life."""
    service = service_of(request)
    state = service.manager.state
    if state is State.READY and service.client.unresponsive:
        return json_reply({"status": "unresponsive"}, status=503)
    return json_reply({"status": state.value}, status=200 if state is State.READY else 503)


def probe(manager: TokenizerManager, *, tokens: int = 1) -> Ask:
    """A tiny request of the server's own. Its salt keeps it out of every client's cache."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    # Any id will do; not 0, which often is a padding token.
    return admit([min(1, manager.limits.vocab_size - 1)], sampling, {"cache_salt": "\0probe"}, limits=manager.limits, names={})


async def health_generate(request: web.Request) -> web.Response:
    """GET /health_generate: 200 when one token came back in time."""
    manager = service_of(request).manager
    async with await manager.submit([probe(manager)]) as generation:
        try:
            await asyncio.wait_for(generation.finished(aborts=True), PROBE_SECONDS)
        except TimeoutError:
            raise Overloaded(f"no token within {PROBE_SECONDS:g} s") from None
    return json_reply({"status": "ok"})


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info: settings, sizes, the scheduler's load and inner state. Secrets are not in it."""
    service = service_of(request)
    state = await service.client.control("state", seconds=STATE_SECONDS) if service.client.ready.is_set() else {}
    info = {
        **public_view(service.resolved),
        "version": __version__,
        "status": service.manager.state.value,
        "load": dataclasses.asdict(service.client.load),
        "internal_states": [state],
    }
    return json_reply(info)


async def model_info(request: web.Request) -> web.Response:
    """GET /get_model_info."""
    service = service_of(request)
    resolved = service.resolved
    model = resolved.settings.model
    return json_reply(
        {
            "model_path": model.model_path,
            "tokenizer_path": model.tokenizer_path or model.model_path,
            "served_model_name": resolved.served_name,
            "is_generation": True,
            "has_chat_template": service.manager.template is not None,
            "context_length": resolved.context_length,
            "vocab_size": resolved.model.vocab_size,
        }
    )


async def get_load(request: web.Request) -> web.Response:
    """GET /get_load: the scheduler's latest load."""
    return json_reply(dataclasses.asdict(service_of(request).client.load))


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    service = service_of(request)
    if not service.resolved.settings.server.enable_metrics:
        return status_reply(404, "metrics are off")
    return web.Response(body=service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def flush_cache(request: web.Request) -> web.Response:
    """GET or POST /flush_cache: 400 while requests run."""
    await service_of(request).client.control("flush_cache")
    return json_reply({"success": True})


async def abort_request(request: web.Request) -> web.Response:
    """POST /abort_request: by rid, or all. An unknown rid is no error: the answer and the abort may have crossed."""
    manager = service_of(request).manager
    body = read(AbortBody, await read_object(request))
    if not body.rid and not body.abort_all:
        raise BadRequest("give rid, or abort_all: true", param="rid")
    return json_reply({"aborted": manager.abort_all() if body.abort_all else manager.abort(body.rid or "")})


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize."""
    service = service_of(request)
    body = read(TokenizeBody, await read_object(request))
    given = [value for value in (body.text, body.prompt, body.messages) if value is not None]
    if len(given) != 1:
        raise BadRequest("give one of text, prompt, messages", param="text")
    if body.messages is not None:
        kwargs = body.chat_template_kwargs
        text: str | list[str] = await rendered(service, body.messages, generation=body.add_generation_prompt, template_kwargs=kwargs)
        special = False
    else:
        text, special = (body.text if body.text is not None else body.prompt) or "", body.add_special_tokens
    texts = [text] if isinstance(text, str) else text
    if len(texts) > MAX_TEXTS:
        raise BadRequest(f"at most {MAX_TEXTS} texts, got {len(texts)}", param="text")
    tokens = [(await service.manager.encode(item, special=special)).tolist() for item in texts]
    counts = [len(item) for item in tokens]
    single = isinstance(text, str)
    longest = service.resolved.longest_request
    return json_reply({"tokens": tokens[0] if single else tokens, "count": counts[0] if single else counts, "max_model_len": longest})


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    manager = service_of(request).manager
    body = read(DetokenizeBody, await read_object(request))
    many = bool(body.tokens) and isinstance(body.tokens[0], list)
    try:
        lists: list[list[int]] = msgspec.convert(body.tokens if many else [body.tokens], list[list[int]])
    except msgspec.ValidationError as error:
        raise BadRequest(f"tokens: {error}", param="tokens") from None
    top = manager.limits.vocab_size
    for ids in lists:
        if ids and not 0 <= min(ids) <= max(ids) < top:
            raise BadRequest(f"tokens: ids must be between 0 and {top - 1}", param="tokens")
    texts = [manager.tokenizer.decode(ids, skip_special=body.skip_special_tokens) for ids in lists]
    return json_reply({"text": texts if many else texts[0]})
