"""Any server with OpenAI's API: chat completions for programs with roles, completions for plain text.

Sampling parameters go out under OpenAI's names; those that OpenAI does not have, under the names that SGLang, vLLM and radixpd share, and a
server that lacks one refuses it. `select` is scored with the echo of completions where the model is not a chat model; a chat model only
shows what it writes, so there the choice nearest to its greedy answer is taken, and the meta information says so. `warm` does nothing:
prompts cost money.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from radixpd_lang import loop
from radixpd_lang.backends.base import Completion, Delta
from radixpd_lang.backends.http import Http
from radixpd_lang.choices import Scores, first_difference
from radixpd_lang.errors import BackendError
from radixpd_lang.sampling import Sampling
from radixpd_lang.transcript import Prompt

__all__ = ["OpenAI"]

DEFAULT_TOKENS = 128  # of a `gen` that does not say: the API's own default for completions is 16
LIKELY, UNLIKELY = 0.0, -1.0  # the "log-probability" of a choice by a chat model
NO_SCORES = ("return_logprob", "top_logprobs_num", "logprob_start_len", "token_ids_logprob", "return_text_in_logprobs")


class OpenAI:
    """`OpenAI("gpt-4o-mini")`, or `OpenAI("default", base_url="http://127.0.0.1:30000/v1")`.

    `is_chat_model`: false for a model that completes plain text. `continue_final_message`: the server goes on with an assistant's turn that
    has begun (vLLM, SGLang and radixpd do, OpenAI does not). `extra_body`: further fields of every request.
    """

    def __init__(
        self,
        model_name: str,
        *,
        base_url: str = "https://api.openai.com/v1",
        api_key: str | None = None,
        is_chat_model: bool = True,
        continue_final_message: bool = False,
        timeout: float = 600.0,
        extra_body: dict[str, Any] | None = None,
    ) -> None:
        self._http = Http(base_url, api_key=api_key or os.environ.get("OPENAI_API_KEY"), timeout=timeout)
        self._model = model_name
        self._chat = is_chat_model
        self._continue = continue_final_message
        self._extra = extra_body or {}

    def __repr__(self) -> str:
        return f"OpenAI({self._model!r}, base_url={self._http.base_url!r})"

    def close(self) -> None:
        """Close connections. The next request opens new ones."""
        loop.call(self._http.close(), self._http.timeout)

    async def generate(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> list[Completion]:
        """The completions of a prompt."""
        path, body = self._request(prompt, sampling)
        answer = await self._http.post(path, body)
        return [Completion(_text(choice), _meta(answer, choice)) for choice in answer["choices"]]

    async def stream(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> AsyncGenerator[Delta, None]:
        """One completion, piece by piece."""
        path, body = self._request(prompt, sampling)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        meta: dict[str, Any] = {}
        async with aclosing(self._http.events(path, body)) as events:
            async for event in events:
                choices = event.get("choices") or [{}]
                known = _meta(event, choices[0])
                meta = {**meta, **{name: value for name, value in known.items() if value is not None}}
                yield Delta(_text(choices[0]), meta)

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool, staged: bool, name: str | None) -> Scores:
        """The echo's log-probabilities, or with a chat model what it would say."""
        if self._chat:
            if unconditional:
                raise BackendError("a chat model does not tell the log-probability of a choice: use token_length_normalized")
            return await self._by_answer(prompt, choices)
        text = self._plain(prompt)
        bare, *rows = await self._echo([text, *(text + choice for choice in choices)])
        start = first_difference([token for token, _ in bare], [[token for token, _ in row] for row in rows])
        given = tuple(tuple(value or 0.0 for _, value in row[start:]) for row in rows)
        if not unconditional:
            return Scores(given)
        tails = await self._echo(["".join(token for token, _ in row[start:]) for row in rows])
        if [len(tail) for tail in tails] != [len(row) for row in given]:
            raise BackendError("the server tokenizes the choices otherwise without their prompt: unconditional scores cannot be compared")
        return Scores(given, tuple(tuple(value or 0.0 for _, value in tail) for tail in tails))

    async def warm(self, prompt: Prompt) -> None:
        """Nothing."""

    async def _echo(self, texts: list[str]) -> list[list[tuple[str, float | None]]]:
        """Tokens of texts, and their log-probabilities."""
        body = {"model": self._model, "prompt": texts, "max_tokens": 0, "echo": True, "logprobs": 1, **self._extra}
        answer = await self._http.post("/completions", body)
        found = []
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"])):
            if not choice.get("logprobs"):
                raise BackendError("the server does not echo log-probabilities of a prompt: select needs them")
            found.append(list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True)))
        return found

    async def _by_answer(self, prompt: Prompt, choices: Sequence[str]) -> Scores:
        longest = max(len(choice) for choice in choices)
        [answer] = await self.generate(prompt, Sampling(max_tokens=longest + 8, temperature=0.0), name=None)
        said = answer.text.strip()
        begun = [choice for choice in choices if said.casefold().startswith(choice.strip().casefold())]
        near = max(begun, key=len) if begun else max(choices, key=lambda choice: difflib.SequenceMatcher(None, choice, said).ratio())
        rows = tuple((LIKELY if choice == near else UNLIKELY,) for choice in choices)
        return Scores(rows, None, {"emulated": True, "answer": answer.text})

    def _request(self, prompt: Prompt, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        body = {"model": self._model, **self._fields(sampling), **self._extra}
        if not self._chat:
            return "/completions", {**body, "prompt": self._plain(prompt)}
        if prompt.role != "assistant":
            raise BackendError("a chat model writes in assistant turns only: assistant(gen(...))")
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        if prompt.text:
            if not self._continue:
                raise BackendError("this server cannot go on with a turn that has begun: put gen first, or see continue_final_message")
            messages.append({"role": "assistant", "content": prompt.text})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return "/chat/completions", {**body, "messages": messages}

    def _plain(self, prompt: Prompt) -> str:
        if prompt.is_chat:
            raise BackendError("roles need a chat model (is_chat_model=True)")
        return prompt.text

    def _fields(self, sampling: Sampling) -> dict[str, Any]:
        said = {"max_tokens": DEFAULT_TOKENS, **sampling.said()}
        if said.get("return_logprob"):
            count = said.get("top_logprobs_num", 0)
            said |= {"logprobs": True, "top_logprobs": count} if self._chat else {"logprobs": count}
        for name in NO_SCORES:
            said.pop(name, None)
        if (schema := said.pop("json_schema", None)) is not None:
            form = {"name": "answer", "schema": json.loads(schema), "strict": True}
            said["response_format"] = {"type": "json_schema", "json_schema": form}
        if (tag := said.pop("structural_tag", None)) is not None:
            said["response_format"] = json.loads(tag)
        return said


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice or of a chunk's."""
    holder = choice.get("message") or choice.get("delta")
    return str((holder.get("content") if holder else choice.get("text")) or "")


def _meta(answer: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """Meta information in the native shape."""
    usage = answer.get("usage") or {}
    finish = choice.get("finish_reason")
    return {
        "id": answer.get("id"),
        "finish_reason": None if finish is None else {"type": finish, "matched": choice.get("matched_stop")},
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "logprobs": choice.get("logprobs"),
    }
