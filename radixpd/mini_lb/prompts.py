"""A request's prompt as the workers see it: its token ids, and from them the names of its pages.

The workers say how they name pages and where their tokenizer's files are; the same code tokenizes and renders here. Invariant: a prompt is
given the very names that the workers give it, or none: where workers disagree, files are missing or differ, or a prompt cannot be read, it
is left as it came, and the worker that gets it says what is wrong. What is long runs in a thread, a few at a time, with a deadline. Called
by the proxy and by `fleet`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from radixpd.config.secret import Secret
from radixpd.core.page_hash import event_id, namespace, page_hashes, root_hash, token_bytes
from radixpd.errors import RadixpdError
from radixpd.mini_lb.ask import Ask
from radixpd.mini_lb.card import Card
from radixpd.mini_lb.snapshot import RouteAsk
from radixpd.runtime.caller import Caller
from radixpd.runtime.off_loop import Pace, in_thread
from radixpd.server.guards import TENANT
from radixpd.text.chat import ChatTemplate, load_chat_template, render_arguments
from radixpd.text.identity import text_identity
from radixpd.text.seams import PieceMemory
from radixpd.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Prompts"]

MEMORY_BYTES = 1 << 26  # for pieces of prompts and their ids
AT_ONCE = 4096  # characters that are tokenized without a thread
RENDERED_AT_ONCE = 1 << 16  # bytes of a chat whose template is filled without one: that is quick, and most chats are longer than `AT_ONCE`
LONGEST_BODY = 1 << 23  # bytes; a longer one is not read
STRETCH = 1024  # bytes of token ids whose page ids are remembered together
STRETCHES = 8192  # that are remembered: some 30 MB
SECONDS = 5.0  # for one prompt
THREADS = 2
LOAD_SECONDS = 60.0  # for the tokenizer's files
AGAIN_SECONDS = 30.0  # between two looks for them

ABSENT = msgspec.Raw()

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class _Common(msgspec.Struct):
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None


class _Native(_Common):
    text: str | list[str] | None = None
    input_ids: msgspec.Raw = ABSENT


class _Completion(_Common):
    prompt: msgspec.Raw = ABSENT


class _Chat(_Common):
    messages: list[dict[str, Any]] = []
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None


_NATIVE, _COMPLETION, _CHAT = msgspec.json.Decoder(_Native), msgspec.json.Decoder(_Completion), msgspec.json.Decoder(_Chat)
_PROMPTS = msgspec.json.Decoder(str | list[str | int | list[int]])


@dataclass(frozen=True, slots=True)
class _Text:
    """Tokenizer and template, loaded."""

    identity: str
    memory: PieceMemory
    template: ChatTemplate | None
    longest_token: int


class Prompts:
    """See the module. `directory`: of the tokenizer's files, if not where the workers say."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._cards: dict[str, Card] = {}
        self._card: Card | None = None  # for all that tell of their pages, where they agree
        self._text: _Text | None = None
        self._loading: asyncio.Task[None] | None = None
        self._wanted = ""  # the identity that is being loaded
        self._threads = asyncio.Semaphore(THREADS)

    def told(self, worker: str, card: Card | None) -> None:
        """What a worker says of itself; None: nothing any more."""
        self._cards.pop(worker, None)
        if card is not None and card.events is not None:
            self._cards[worker] = card
        cards = list(self._cards.values())
        agreed = len({(card.hashing, card.apart) for card in cards}) == 1
        if cards and not agreed and self._card is not None:
            logger.warning("workers with KV events disagree on model, page size or tokenizer: what they have is guessed")
        self._card = replace(cards[0], truncates=any(card.truncates for card in cards)) if agreed else None
        if self._card is not None and (self._text is None or self._text.identity != self._card.hashing.text):
            self._load(self._card)

    async def close(self) -> None:
        """Load no more."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)

    async def read(self, path: str, ask: Ask, *, authorization: str) -> Ask:
        """The ask with the pages of its prompt, of several the longest; as it was where they cannot be known. `authorization`: the header
        that goes to the workers."""
        card, text = self._card, self._text
        if card is None or text is None or text.identity != card.hashing.text or len(ask.body) > LONGEST_BODY:
            return ask
        try:
            async with asyncio.timeout(SECONDS):
                prompts, fields = await self._prompts(path, ask.body, text, card)
            cut = fields.truncate_prompt_tokens is not None or (card.truncates and any(len(ids) >= card.longest for ids in prompts))
            return ask if cut else replace(ask, route=_named(ask.route, prompts, fields, card, authorization))
        except (RadixpdError, msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, LookupError, RecursionError, TimeoutError):
            return ask  # the worker says what is wrong with it

    # ---- prompts --------------------------------------------------------------------------------------------------------------

    async def _prompts(self, path: str, body: bytes, text: _Text, card: Card) -> tuple[list[np.ndarray], _Common]:
        """Ids of each prompt of a body."""
        found: Any
        fields: _Common
        if path == "/v1/chat/completions":
            chat = _CHAT.decode(body)
            special = chat.add_special_tokens is True
            found = await self._rendered(chat, len(body), text)
            return [await self._ids(found, text, card, special=special)], chat
        if path == "/v1/completions":
            completion = _COMPLETION.decode(body)
            special, fields = completion.add_special_tokens is not False, completion
            found = _PROMPTS.decode(completion.prompt)
        else:
            fields = native = _NATIVE.decode(body)
            special = True
            found = native.text if native.text is not None else _PROMPTS.decode(native.input_ids)
        if isinstance(found, str) or (found and isinstance(found[0], int)):
            found = [found]
        prompts, pace = [], Pace()
        for prompt in found:
            prompts.append(await self._ids(prompt, text, card, special=special))
            await pace.breathe()
        return prompts, fields

    async def _rendered(self, chat: _Chat, size: int, text: _Text) -> str:
        template = text.template
        if template is None:
            raise ValueError("no chat template")
        arguments = render_arguments(
            chat.messages,
            generation=chat.add_generation_prompt,
            continued=chat.continue_final_message is True,
            template_kwargs=chat.chat_template_kwargs,
            tools=chat.tools,
            tool_choice=chat.tool_choice,
        )
        return await self._aside(lambda: template.render(**arguments), size, RENDERED_AT_ONCE)

    async def _ids(self, prompt: str | list[int], text: _Text, card: Card, *, special: bool) -> np.ndarray:
        if not isinstance(prompt, str):
            if len(prompt) > card.longest:
                raise ValueError("longer than any prompt that fits")
            return np.asarray(prompt, dtype=np.int32)
        if len(prompt) > card.longest * text.longest_token:
            raise ValueError("longer than any prompt that fits")
        cut = text.memory.cut(prompt)
        computed = await self._aside(lambda: text.memory.work(cut), cut.unknown)
        return text.memory.join(cut, computed, special=special)

    async def _aside(self, work: Callable[[], Result], size: int, at_once: int = AT_ONCE) -> Result:
        """The result of `work`, which does not hold up the loop where there is much of it."""
        if size <= at_once:
            return work()
        async with self._threads:
            return await in_thread(work, seconds=SECONDS)

    # ---- tokenizer ------------------------------------------------------------------------------------------------------------

    def _load(self, card: Card) -> None:
        if self._loading is not None and not self._loading.done():
            if self._wanted == card.hashing.text:
                return
            self._loading.cancel()
        self._wanted = card.hashing.text
        self._loading = asyncio.create_task(self._loaded(card))

    async def _loaded(self, card: Card) -> None:
        """Read the files, if they are the workers'; if not, look again later."""
        directory, said = self._directory or card.tokenizer_directory, ""
        while True:
            try:
                self._text = await in_thread(lambda: _read_text(directory, card), seconds=LOAD_SECONDS)
                break
            except (RadixpdError, OSError, ValueError, TimeoutError) as error:
                if str(error) != said:
                    logger.warning("prompts cannot be tokenized as the workers do (%s): what workers have is guessed", error)
                said = str(error)
            await asyncio.sleep(AGAIN_SECONDS)
        logger.info("prompts are tokenized as the workers do, with the files in %s", directory)


def _read_text(directory: str, card: Card) -> _Text:
    folder = Path(directory)
    if not folder.is_dir():
        raise ValueError(f"{directory} is not on this machine; see --tokenizer-path")
    identity = text_identity(folder, chat_template=card.chat_template)
    if identity != card.hashing.text:
        raise ValueError(f"tokenizer or chat template in {directory} are not the workers'")
    tokenizer: Tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, override=card.chat_template)
    return _Text(identity, PieceMemory(tokenizer, MEMORY_BYTES), template, tokenizer.longest_token)


def _named(route: RouteAsk, prompts: Sequence[np.ndarray], fields: _Common, card: Card, authorization: str) -> RouteAsk:
    """The route ask with the pages of the longest prompt: those that a worker can find, as it always computes the last token."""
    which = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    ids, size = prompts[which], card.hashing.page_size
    parts = {tag: value for tag in ("extra_key", "cache_salt") if (value := _of(getattr(fields, tag), which))}
    space = namespace(parts)
    if card.apart:
        scheme, _, key = authorization.partition(" ")
        tenant = Secret(key).digest(TENANT) if scheme.lower() == "bearer" else ""
        space = Caller(tenant=tenant).salted(space)
    findable = (len(ids) - 1) // size * size
    pages = _page_ids(root_hash(card.hashing.fingerprint, space), token_bytes(ids[:findable]), 4 * size)
    return replace(route, tokens=sum(map(len, prompts)), pages=pages, page_size=size)


def _page_ids(root: bytes, data: bytes, page_bytes: int) -> tuple[int, ...]:
    """Event ids of the pages of a prompt whose hash chain starts at `root`. A beginning that was seen before is not hashed again."""
    found: list[int] = []
    step = max(1, STRETCH // page_bytes) * page_bytes
    for at in range(0, len(data), step):
        ids, root = _stretch(root, data[at : at + step], page_bytes)
        found += ids
    return tuple(found)


@lru_cache(STRETCHES)
def _stretch(parent: bytes, data: bytes, page_bytes: int) -> tuple[tuple[int, ...], bytes]:
    hashes = page_hashes(parent, data, page_bytes)
    return tuple(map(event_id, hashes)), hashes[-1]


def _of(value: str | Sequence[str] | None, which: int) -> str | None:
    return value if value is None or isinstance(value, str) else value[which]
