"""Prompts for a radixpd server: plain text as it is, conversations as the ids that the server's own chat template makes of them.

`/tokenize` takes the messages, also with the last turn still open, and gives exactly the ids of `/v1/chat/completions`. So nothing here
knows a template or a tokenizer, and no text is taken apart or put together. Called by `runtime_endpoint`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from radixpd_lang.backends.http import Http
from radixpd_lang.transcript import Prompt

__all__ = ["Rendering"]

REMEMBERED = 256  # conversations whose ids are kept: the branches of a fork begin with the same one


class Rendering:
    """Prompts to what `/generate` takes. `template_kwargs`: variables for the server's chat template."""

    def __init__(self, http: Http, template_kwargs: dict[str, Any] | None) -> None:
        self._http = http
        self._template = {"chat_template_kwargs": template_kwargs} if template_kwargs else {}
        self._known: OrderedDict[Prompt, list[int]] = OrderedDict()

    async def source(self, prompt: Prompt) -> dict[str, Any]:
        """`text` or `input_ids` for `/generate`."""
        return {"input_ids": await self._chat(prompt)} if prompt.is_chat else {"text": prompt.text}

    async def with_endings(self, prompt: Prompt, endings: Sequence[str]) -> list[list[int]]:
        """Ids of the prompt followed by each of the endings, tokenized as a whole."""
        if prompt.is_chat:
            return await asyncio.gather(*(self._chat(replace(prompt, text=prompt.text + ending)) for ending in endings))
        return await self._ids([prompt.text + ending for ending in endings])

    async def start(self) -> list[int]:
        """What the tokenizer puts before every text."""
        return (await self._ids([""]))[0]

    async def _chat(self, prompt: Prompt) -> list[int]:
        """Ids of a conversation: of finished turns, up to where the assistant speaks, or to the end of the open turn's text."""
        if prompt in self._known:
            self._known.move_to_end(prompt)
            return self._known[prompt]
        begins = prompt.role == "assistant" and not prompt.text
        turns = prompt.messages if begins else prompt.turns
        body = {"messages": [{"role": turn.role, "content": turn.content} for turn in turns], "add_generation_prompt": begins}
        if prompt.role is not None and not begins:
            body |= {"continue_final_message": True}
        ids: list[int] = (await self._http.post("/tokenize", {**body, **self._template}))["tokens"]
        self._known[prompt] = ids
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return ids

    async def _ids(self, texts: list[str]) -> list[list[int]]:
        answer = await self._http.post("/tokenize", {"text": texts})
        tokens: list[list[int]] = answer["tokens"]
        return tokens
