"""Prompts for a radixpd server: plain text as it is, conversations through the server's own chat template.

A conversation becomes token ids with `/tokenize`, exactly those of `/v1/chat/completions`. Where the open turn already has text, the
template's text around it is needed too: it comes back through `/detokenize`, which spells special tokens out. Nothing here knows a
template or a tokenizer. Called by `runtime_endpoint`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar

from radixpd_lang.backends.http import Http
from radixpd_lang.errors import BackendError
from radixpd_lang.transcript import Prompt

__all__ = ["Rendering"]

REMEMBERED = 256  # conversations whose ids are kept: the branches of a fork begin with the same one
OPEN = "(here the text of this turn goes on)"  # stands at the end of a turn whose closing is cut off

Found = TypeVar("Found")


class Rendering:
    """Prompts to what `/generate` takes."""

    def __init__(self, http: Http, template_kwargs: dict[str, Any] | None) -> None:
        self._http = http
        self._template = {"chat_template_kwargs": template_kwargs} if template_kwargs else {}
        self._chats: OrderedDict[tuple[Prompt, bool], list[int]] = OrderedDict()

    async def source(self, prompt: Prompt) -> dict[str, Any]:
        """`text` or `input_ids` for `/generate`."""
        if not prompt.is_chat:
            return {"text": prompt.text}
        if prompt.role is None:
            return {"input_ids": await self._chat(prompt, generation=False)}
        if prompt.role == "assistant" and not prompt.text:
            return {"input_ids": await self._chat(Prompt(prompt.messages), generation=True)}
        return {"input_ids": (await self._ids([await self._text(prompt)], special=False))[0]}

    async def with_endings(self, prompt: Prompt, endings: Sequence[str]) -> list[list[int]]:
        """Ids of the prompt followed by each of the endings, tokenized as a whole."""
        text = await self._text(prompt) if prompt.is_chat else prompt.text
        return await self._ids([text + ending for ending in endings], special=not prompt.is_chat)

    async def start(self) -> list[int]:
        """What the tokenizer puts before every text."""
        return (await self._ids([""], special=True))[0]

    async def _text(self, prompt: Prompt) -> str:
        """The text of a conversation, up to the end of the open turn's text."""
        if prompt.role == "assistant":
            return await self._spelt(await self._chat(Prompt(prompt.messages), generation=True)) + prompt.text
        if prompt.role is None:
            return await self._spelt(await self._chat(prompt, generation=False))
        marked = Prompt((*prompt.messages, *Prompt(role=prompt.role, text=prompt.text + OPEN).turns))
        before, found, _ = (await self._spelt(await self._chat(marked, generation=False))).rpartition(OPEN)
        if not found:
            raise BackendError(f"the server's chat template changes the text of the {prompt.role} turn: the model cannot go on with it")
        return before

    async def _chat(self, prompt: Prompt, *, generation: bool) -> list[int]:
        """Ids of finished turns; with `generation` up to where the assistant speaks."""
        key = (prompt, generation)
        if key in self._chats:
            self._chats.move_to_end(key)
            return self._chats[key]
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        body = {"messages": messages, "add_generation_prompt": generation, **self._template}
        ids: list[int] = (await self._http.post("/tokenize", body))["tokens"]
        self._chats[key] = ids
        while len(self._chats) > REMEMBERED:
            self._chats.popitem(last=False)
        return ids

    async def _ids(self, texts: list[str], *, special: bool) -> list[list[int]]:
        answer = await self._http.post("/tokenize", {"text": texts, "add_special_tokens": special})
        tokens: list[list[int]] = answer["tokens"]
        return tokens

    async def _spelt(self, ids: list[int]) -> str:
        answer = await self._http.post("/detokenize", {"tokens": ids, "skip_special_tokens": False})
        return str(answer["prompt"])
