"""Text to ids and back, with the served model's tokenizer and chat template, so that a client needs no tokenizer files of its own.

Fields are named as in SGLang and in vLLM: either's clients find theirs. Called by the application's router.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest, Overloaded
from radixpd.runtime.admission import read
from radixpd.runtime.off_loop import Pace, in_thread
from radixpd.runtime.tokenizer_manager import TEXT_SECONDS, TokenizerManager
from radixpd.server.answers import Detokenized, Tokenized, TokenizerInfo
from radixpd.server.docs import TOKEN_IDS, Body, Doc, exactly_one, or_null
from radixpd.server.messages import MESSAGES, ROLES, rendered
from radixpd.server.replies import json_reply, read_object
from radixpd.server.service import service_of

__all__ = ["DOCS", "ROUTES"]

MAX_TEXTS = 4096
ANY_IDS = {**TOKEN_IDS, "minItems": 0}


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`: one of text, prompt, messages."""

    text: str | list[str] | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strings: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`."""

    tokens: list[Any]
    skip_special_tokens: bool = True


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize."""
    service = service_of(request)
    body = read(TokenizeBody, await read_object(request))
    given = [value for value in (body.text, body.prompt, body.messages) if value is not None]
    if len(given) != 1:
        raise BadRequest("give one of text, prompt, messages", param="text")
    if body.messages is not None:
        text: str | list[str] = await rendered(
            service,
            body.messages,
            generation=body.add_generation_prompt,
            continued=body.continue_final_message is True,
            continues=ROLES,  # a program may let the model speak for the user
            template_kwargs=body.chat_template_kwargs,
        )
        special = False
    else:
        text, special = (body.text if body.text is not None else body.prompt) or "", body.add_special_tokens
    texts = [text] if isinstance(text, str) else text
    if len(texts) > MAX_TEXTS:
        raise BadRequest(f"at most {MAX_TEXTS} texts, got {len(texts)}", param="text")
    tokens, pace = [], Pace()
    for item in texts:
        tokens.append((await service.manager.encode(item, special=special)).tolist())
        await pace.breathe()
    counts = [len(item) for item in tokens]
    single = isinstance(text, str)
    longest = service.resolved.longest_request
    answer: dict[str, Any] = {"tokens": tokens, "count": counts}
    if body.return_token_strings:
        answer["token_strings"] = [await service.manager.token_strings(item) for item in tokens]
    return json_reply({**{name: value[0] if single else value for name, value in answer.items()}, "max_model_len": longest})


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    manager = service_of(request).manager
    body = read(DetokenizeBody, await read_object(request))
    try:
        # A body holds millions of ids: whatever touches each of them would hold up every stream.
        return json_reply(await in_thread(partial(_texts, manager, body), seconds=TEXT_SECONDS))
    except TimeoutError:
        raise Overloaded(f"detokenizing took longer than {TEXT_SECONDS:g} s") from None


def _texts(manager: TokenizerManager, body: DetokenizeBody) -> dict[str, Any]:
    many = bool(body.tokens) and isinstance(body.tokens[0], list)
    try:
        lists: list[list[int]] = msgspec.convert(body.tokens if many else [body.tokens], list[list[int]])
    except msgspec.ValidationError as error:
        raise BadRequest(f"tokens: {error}", param="tokens") from None
    top = manager.limits.vocab_size
    for ids in lists:
        if ids and not 0 <= min(ids) <= max(ids) < top:
            raise BadRequest(f"tokens: ids must be between 0 and {top - 1}", param="tokens")
    decode = manager.tokenizer.decode
    found = {
        "text": [decode(ids, skip_special=body.skip_special_tokens) for ids in lists],
        "prompt": [decode(ids, skip_special=False) for ids in lists],
    }
    return found if many else {name: texts[0] for name, texts in found.items()}


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info."""
    service = service_of(request)
    tokenizer, template = service.manager.tokenizer, service.manager.template
    return json_reply(
        {
            "bos_token": None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
            "eos_token": tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else None,
            "chat_template": None if template is None else template.source,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": service.resolved.longest_request,
        }
    )


ROUTES = (
    web.post("/tokenize", tokenize),
    web.post("/v1/tokenize", tokenize),
    web.post("/detokenize", detokenize),
    web.post("/v1/detokenize", detokenize),
    web.get("/tokenizer_info", tokenizer_info),
)
DOCS = {
    tokenize: Doc(
        "Text, or a conversation through the chat template, to ids",
        answer=Tokenized,
        body=Body(
            TokenizeBody, fields={"messages": or_null(MESSAGES)}, rule=exactly_one("text", "prompt", "messages"), lists=(0, MAX_TEXTS)
        ),
        errors=(503,),
    ),
    detokenize: Doc(
        "Ids to text",
        answer=Detokenized,
        body=Body(DetokenizeBody, fields={"tokens": {"anyOf": [ANY_IDS, {"type": "array", "items": ANY_IDS}]}}),
        errors=(503,),
    ),
    tokenizer_info: Doc("Special tokens and chat template", answer=TokenizerInfo),
}
