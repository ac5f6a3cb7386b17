"""A radixpd server (or a load balancer before several), over its native API.

Plain text goes out as text, a conversation as the ids that the server's own template makes of it. `select` scores choices with prompt
log-probabilities, tokenized in context. `warm` is a prompt that asks for no token. Programs that use neither roles nor `select` run on any
server of SGLang's native API.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from radixpd_lang import loop
from radixpd_lang.backends.base import Completion, Delta
from radixpd_lang.backends.http import Http
from radixpd_lang.backends.rendering import Rendering
from radixpd_lang.choices import Scores, first_difference
from radixpd_lang.errors import BackendError
from radixpd_lang.sampling import Sampling
from radixpd_lang.transcript import Prompt

__all__ = ["RuntimeEndpoint"]

# Ours -> the server's, inside sampling_params; what is in neither list has the same name there.
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
BESIDE = ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs")


class RuntimeEndpoint:
    """`RuntimeEndpoint("http://127.0.0.1:30000")`.

    `timeout`: seconds that one request may take. `chat_template_kwargs`: variables for the server's chat template. `extra_body`: further
    fields of every `/generate` request, such as `priority` or `cache_salt`. `http`: another way to send requests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        chat_template_kwargs: dict[str, Any] | None = None,
        extra_body: dict[str, Any] | None = None,
        http: Http | None = None,
    ) -> None:
        self._http = http or Http(base_url.rstrip("/").removesuffix("/v1"), api_key=api_key, timeout=timeout)
        self._rendering = Rendering(self._http, chat_template_kwargs)
        self._extra = extra_body or {}

    def __repr__(self) -> str:
        return f"RuntimeEndpoint({self._http.base_url!r})"

    # What users call

    def get_server_info(self) -> dict[str, Any]:
        """The server's settings, sizes and load."""
        info: dict[str, Any] = loop.call(self._http.get("/server_info"), self._http.timeout)
        return info

    def flush_cache(self) -> None:
        """Drop the server's prefix cache; an error while requests run."""
        loop.call(self._http.post("/flush_cache", {}), self._http.timeout)

    def close(self) -> None:
        """Close connections. The next request opens new ones."""
        loop.call(self._http.close(), self._http.timeout)

    # What the interpreter calls

    async def generate(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> list[Completion]:
        """The completions of a prompt."""
        body = {**await self._rendering.source(prompt), **self._body(sampling)}
        answer = await self._http.post("/generate", body)
        return [_completion(each) for each in (answer if isinstance(answer, list) else [answer])]

    async def stream(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> AsyncGenerator[Delta, None]:
        """One completion, piece by piece; events may hold all the text so far, or what is new."""
        body = {**await self._rendering.source(prompt), **self._body(sampling), "stream": True}
        sent = ""
        async with aclosing(self._http.events("/generate", body)) as events:
            async for event in events:
                whole = _completion(event)
                ids = event.get("output_ids")
                all_so_far = ids is None or len(ids) == whole.meta.get("completion_tokens")
                new = whole.text[len(sent) :] if all_so_far else whole.text
                sent += new
                yield Delta(new, whole.meta)

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool, staged: bool, name: str | None) -> Scores:
        """Prompts that end with the choices and ask for no token; with `unconditional` once more after nothing."""
        bare, *wholes = await self._rendering.with_endings(prompt, ["", *choices])
        start = first_difference(bare, wholes)
        first = 1 if staged else len(wholes)
        conditional = await self._logprobs(wholes[:first], start)
        conditional += await self._logprobs(wholes[first:], start)
        alone = None
        if unconditional:
            head = await self._rendering.start()
            alone = await self._logprobs([head + whole[start:] for whole in wholes], len(head))
        tokens = [whole[start:] for whole in wholes]
        return Scores(conditional, alone, {"prompt_tokens": len(bare), "scored_from": start, "choice_tokens": tokens})

    async def warm(self, prompt: Prompt) -> None:
        """Compute a prefix into the cache."""
        body = {**await self._rendering.source(prompt), **self._body(Sampling(max_tokens=0))}
        await self._http.post("/generate", body)

    async def _logprobs(self, rows: list[list[int]], start: int) -> tuple[tuple[float, ...], ...]:
        """Log-probabilities of the tokens from `start` on; the very first token of a text has none and counts 0."""
        if not rows:
            return ()
        body = {"input_ids": rows, **self._body(Sampling(max_tokens=0, return_logprob=True, logprob_start_len=start))}
        answers = await self._http.post("/generate", body)
        found = tuple(tuple(entry[0] or 0.0 for entry in answer["meta_info"]["input_token_logprobs"]) for answer in answers)
        if [len(values) for values in found] != [len(row) - start for row in rows]:
            raise BackendError("/generate scored other positions than those it was asked for")
        return found

    def _body(self, sampling: Sampling) -> dict[str, Any]:
        said = sampling.said()
        beside = {name: said.pop(name) for name in BESIDE if name in said}
        return {**self._extra, "sampling_params": {RENAMED.get(name, name): value for name, value in said.items()}, **beside}


def _completion(answer: dict[str, Any]) -> Completion:
    meta = answer["meta_info"]
    finish = meta.get("finish_reason") or {}
    if finish.get("type") == "abort":
        raise BackendError(f"the server aborted the request: {finish.get('message', 'no reason given')}", status=finish.get("status_code"))
    return Completion(answer["text"], {**meta, "output_ids": answer.get("output_ids", [])})
